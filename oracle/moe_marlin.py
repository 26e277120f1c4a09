"""Products with the matrix of the expert that each row goes to, where matrices lie in Marlin's layouts."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Choice, Parity, Tensor, refuse
from vtlab.ops.shapes import sizes
from vtlab.ops.table import op

from .lowbit import FINITE_SCALES, HALVES, WHY, finite, permutation, positive_scales, random_words, rounded
from .marlin import ROW
from .marlin_matmul import marlin_gemm, shapes_fit, sum_sizes
from .matmul import ORDER
from .moe import draw_experts, rows_and_experts, source_rows

_OF_EXPERTS = ("b_q_weight", "b_scales", "b_zeros", "b_bias", "perm")
_ROUNDED_FOUR_TIMES = Parity(
    "nmse", 2.0**-12, "tensor cores: as with one store, for up to four roundings on either side, (8 * 2^-9)^2"
)


def _words(shape: str, **more) -> Tensor:
    """Words of random bits of named axes."""

    def draw(rng, axes):
        return random_words(rng, sizes(shape, {name: size for name, size in axes.items() if isinstance(size, int)}))

    return Tensor(shape, ("int32",), values=draw, **more)


def _draw_orders(rng, axes):
    return np.array([rng.permutation(axes["K"]) for _ in range(axes["E"])]).reshape(axes["E"], axes["K"])


def _groups_divide(arguments, axes):
    """the groups of b_scales divide K"""
    if axes["G"] < 1 or axes["K"] % axes["G"]:
        raise refuse("b_scales", f"{axes['G']} groups", f"a number that divides K = {axes['K']}")


def _permutations(arguments, axes):
    """each expert's perm is a permutation of the rows; on a GPU the host does not look"""
    if isinstance(arguments["perm"], np.ndarray):
        for one in arguments["perm"]:
            _PERMUTATION({"perm": one}, axes)


_PERMUTATION = permutation("perm", lambda call: len(call["perm"]))


def _of_expert(arguments, expert: int) -> dict:
    """What is one expert's own of the arguments."""
    return {name: None if arguments[name] is None else arguments[name][expert] for name in _OF_EXPERTS}


def _sizes(arguments, results):
    """marlin_gemm's, with one more rounding to T before the product with T(w)."""
    a, ids, weights = arguments["a"], arguments["ids"], arguments["weights"]
    flat, source = ids.reshape(-1), source_rows(a, ids)
    out = np.zeros((flat.size, arguments["b_scales"].shape[-1]))
    for expert in np.unique(flat[flat >= 0]):
        rows = np.flatnonzero(flat == expert)
        call = {"a": a[source[rows]], "quant_type": arguments["quant_type"], **_of_expert(arguments, expert)}
        out[rows] = sum_sizes(call, (), more=weights is not None)
    return out if weights is None else out * np.abs(weights.astype(a.dtype).astype(np.float64)).reshape(-1, 1)


@op(
    row=ROW,
    args={
        "a": Tensor("R K", HALVES),
        "b_q_weight": _words("E K/16 N*bits/2"),
        "b_scales": positive_scales("E G N", HALVES, like="a"),
        "ids": Tensor("T k", ("int32",), values=draw_experts),
        "weights": Tensor("T k", ("float32",), optional=True),
        "b_zeros": _words("E G N*bits/32", optional=True),
        "b_bias": Tensor("E N", HALVES, like="a", optional=True),
        "perm": Tensor("E K", ("int32",), optional=True, values=_draw_orders),
        "quant_type": Choice(("uint4", "uint4b8", "uint8b128")),
    },
    returns={"out": Tensor("T*k N", like="a")},
    rounding=(
        "groups: w = T((q - zero) * scale), out = T(sum_k a * w)",
        "one group: q - zero is exact in T; of 8 bits out = T(sum * scale), of 4 bits out = T(T(sum) * scale)",
        "with a bias: out = T(out + bias)",
        "with weights: out = T(out * T(weight))",
    ),
    order=str(ORDER),
    parity=_ROUNDED_FOUR_TIMES,
    mirror=Bound("1", scale=_sizes, ulps=2, why=WHY + "; a rounding to T between them may take the neighbour"),
    nan=FINITE_SCALES,
    layout="each expert's as marlin_gemm takes them; row t k + r of out is choice r of token t",
    upstream="vllm/_custom_ops.py: moe_wna16_marlin_gemm, use_fp32_reduce; fused_moe/experts/marlin_moe.py",
    examples=(
        {"R": 3, "T": 3, "k": 2, "E": 3, "K": 128, "N": 64, "G": 4, "bits": 4, "a": "bfloat16",
         "quant_type": "uint4b8", "weights": "float32"},
        {"R": 2, "T": 1, "k": 2, "E": 2, "K": 64, "N": 128, "G": 1, "bits": 4, "a": "float16", "quant_type": "uint4",
         "b_zeros": "int32", "weights": "float32"},
        {"R": 2, "T": 2, "k": 2, "E": 2, "K": 64, "N": 128, "G": 2, "bits": 8, "a": "float16",
         "quant_type": "uint8b128", "b_bias": "float16", "perm": "int32", "weights": "float32"},
        {"R": 1, "T": 1, "k": 1, "E": 2, "K": 128, "N": 64, "G": 1, "bits": 8, "a": "bfloat16",
         "quant_type": "uint8b128"},
    ),
    requires=(rows_and_experts, shapes_fit, _groups_divide, finite("b_scales"), _permutations),
)  # fmt: skip
def moe_wna16_marlin_gemm(
    nx, a, b_q_weight, b_scales, ids, weights=None, b_zeros=None, b_bias=None, perm=None, *, quant_type
):
    """out[t k + r] = weights[t, r] * marlin_gemm(a[t], what is expert ids[t, r]'s own of b_* and perm).

    Shapes: a [T, K], or [T k, K] where each choice has a row of its own, bfloat16 or float16; b_q_weight int32
    [E, K / 16, N * bits / 2]; b_scales [E, G, N]; ids int32 [T, k], -1: a row of zeros; weights float32 [T, k] or None;
    b_zeros int32 [E, G, N / 8] for uint4; b_bias [E, N]; perm int32 [E, K]; out [T k, N].
    Rounding points: as `marlin_gemm`, whose result a weight multiplies in a's dtype T, itself rounded to T: unlike
    `moe_grouped_gemm` and `moe_wna16_gemm`, whose weights meet the float32 sum.
    Errors: as `marlin_gemm`; an expert that there is not, another number of rows.
    Source: vllm/_custom_ops.py, moe_wna16_marlin_gemm, which leaves rows without an expert as they were.
    """
    flat, source = ids.reshape(-1), source_rows(a, ids)
    out = np.zeros((flat.size, b_scales.shape[-1]), a.dtype)
    given = {"b_q_weight": b_q_weight, "b_scales": b_scales, "b_zeros": b_zeros, "b_bias": b_bias, "perm": perm}
    for expert in np.unique(flat[flat >= 0]):
        rows = np.flatnonzero(flat == expert)
        total = marlin_gemm.body(nx, a[source[rows]], **_of_expert(given, expert), quant_type=quant_type)
        if weights is not None:
            factor = rounded(nx, nx.load(weights.reshape(-1)[rows]), a.dtype)
            total = nx.store(nx.mul(nx.load(total), factor[:, None]), a.dtype)
        out[rows] = total
    return out
