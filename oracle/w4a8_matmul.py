"""The product of e4m3 activations with weights of 4 bits, each of them an entry of its scale's table."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops.contract import Bound, Tensor, refuse
from vtlab.ops.table import op

from .fp8_matmul import TENSOR_CORES
from .lowbit import WHY, finite, magnitudes, random_words, total, words
from .matmul import ORDER
from .quant_fp8 import E4M3
from .w4a8 import GROUP, ROW, cutlass_pack_scale_fp8, encoded_columns, no_nan


def looked_up(codes: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """e4m3 codes [K, N] of encoded codes [K, N] by tables [G, N, 8]: an entry, its sign flipped for codes 1 ... 7."""
    groups, columns, _ = tables.shape
    entries = np.empty((groups, 16, columns), np.uint8)
    entries[:, 8:] = tables.transpose(0, 2, 1)
    entries[:, :8] = entries[:, 8:] ^ 0x80
    entries[:, 0] = 0
    out, size, places = np.empty(codes.shape, np.uint8), len(codes) // groups, np.arange(columns)
    for g, table in enumerate(entries.reshape(groups, -1)):
        rows = slice(g * size, (g + 1) * size)
        out[rows] = table[codes[rows] * columns + places]
    return out


def _shapes_fit(arguments, axes):
    """K and N are multiples of 128; groups are of 128"""
    k, n, groups = axes["K"], axes["N"], axes["G"]
    if k % GROUP or k < GROUP:
        raise refuse("a", f"K = {k}", f"a multiple of {GROUP}")
    if n % GROUP:
        raise refuse("b_channel_scales", f"N = {n}", f"a multiple of {GROUP}")
    if groups != k // GROUP:
        raise refuse("b_group_scales", f"{groups} groups", f"{k // GROUP}: groups of {GROUP}")


def _weights(columns, tables) -> np.ndarray:
    """The e4m3 weights [K, N] of words [N, K / 8]."""
    return looked_up(encoded_columns(columns), tables).view(E4M3)


def _scaled_sums(nx, a, columns, tables, channel, token) -> np.ndarray:
    """channel * (token * sum_k a * w) in nx's numbers."""
    sums = total(nx, a.view(E4M3), _weights(columns, tables))
    return nx.mul(nx.load(channel), nx.mul(nx.load(token)[:, None], sums))


def _sizes(arguments, results):
    """|channel| |token| sum |a| |w|."""
    sums = magnitudes(arguments["a"].view(E4M3), _weights(arguments["b_q"].T, arguments["b_group_scales"]))
    factors = (np.abs(arguments[name].astype(np.float64)) for name in ("a_token_scales", "b_channel_scales"))
    token, channel = factors
    return token[:, None] * sums * channel


def _tables(rng, axes):
    return cutlass_pack_scale_fp8(rng.integers(0, 0x67, (axes["G"], axes["N"])).astype(np.uint8))


def _expert_tables(rng, axes):
    return np.stack([_tables(rng, axes) for _ in range(axes["E"])])


def _dealt(axes) -> tuple[np.ndarray, np.ndarray]:
    """(offsets, (N, rows, K)) of experts: rows dealt out unevenly, the second expert has none, nobody the last row."""
    experts, rows = axes["E"], max(axes["P"] - 1, 0)
    share = [0 if e == 1 else e + 1 for e in range(experts)]
    ends = np.cumsum(share) * rows // max(sum(share), 1)
    counts = np.diff(ends, prepend=0)
    sizes = np.stack([np.full(experts, axes["N"]), counts, np.full(experts, axes["K"])], axis=1)
    return ends - counts, sizes


@op(
    row=ROW,
    args={
        "a": Tensor("M K", ("uint8",), holds="float8_e4m3fn",
                    values=lambda rng, axes: rng.integers(-0x7E, 0x7F, (axes["M"], axes["K"])) % 0xFF),
        "b_q": words("K/8", "N", layout="any"),
        "b_group_scales": Tensor("G N 8", ("uint8",), holds="float8_e4m3fn", values=_tables),
        "b_channel_scales": Tensor("N", ("float32",), values=lambda rng, axes: rng.uniform(0.001, 0.002, axes["N"])),
        "a_token_scales": Tensor("M", ("float32",), values=lambda rng, axes: rng.uniform(0.001, 0.01, axes["M"])),
    },
    returns={"out": Tensor("M N", ("bfloat16",))},
    rounding=("w = e4m3(q * value(scale)), by the table", "out = bf16(channel * (token * sum_k a * w))"),
    order=str(ORDER),
    parity=TENSOR_CORES,
    mirror=Bound("(K + 511) // 512 * 16 + 34", scale=_sizes, ulps=1, why=WHY + "s: a token's and a channel's"),
    nan="NaN scales are refused; codes of NaN in a as in any product",
    layout="b_q as cutlass_encode_and_reorder_int4b gives it, of any strides: on a GPU column-major words are read in "
    "place, others copied; b_group_scales as cutlass_pack_scale_fp8 gives them",
    upstream="vllm/_custom_ops.py: cutlass_w4a8_mm",
    examples=(
        {"M": 3, "K": 256, "N": 128, "G": 2},
        {"M": 1, "K": 128, "N": 128, "G": 1},
        {"M": 0, "K": 128, "N": 128, "G": 1},
    ),
    requires=(_shapes_fit, no_nan("b_group_scales"), finite("b_channel_scales", "a_token_scales")),
)  # fmt: skip
def cutlass_w4a8_mm(nx, a, b_q, b_group_scales, b_channel_scales, a_token_scales):
    """out[m, n] = channel[n] * (token[m] * sum_k a[m, k] * e4m3(q[k, n] * scale[k / 128, n])).

    Shapes: a codes uint8 [M, K]; b_q int32 [K / 8, N], encoded and reordered; b_group_scales uint8 [K / 128, N, 8];
    b_channel_scales float32 [N]; a_token_scales float32 [M]; out bfloat16 [M, N].
    Rounding points: the weight to e4m3, then the store; in the mirror the sum, its product with the token's scale and
    that with the channel's are float32.
    Errors: ContractError for K or N that are no multiples of 128, other groups, scales that are not finite.
    Source: vllm/_custom_ops.py, cutlass_w4a8_mm.
    """
    scaled = _scaled_sums(nx, a, b_q.T, b_group_scales, b_channel_scales, a_token_scales)
    return nx.store(scaled, ml_dtypes.bfloat16)


def _experts_fit(arguments, axes):
    """K and N are multiples of 128; groups are of 128"""
    if axes["K"] % GROUP or axes["K"] < GROUP:
        raise refuse("a_tensors", f"K = {axes['K']}", f"a multiple of {GROUP}")
    if axes["N"] % GROUP:
        raise refuse("b_tensors", f"N = {axes['N']}", f"a multiple of {GROUP}")
    if axes["G"] != axes["K"] // GROUP:
        raise refuse("b_group_scales", f"{axes['G']} groups", f"{axes['K'] // GROUP}: groups of {GROUP}")


def _problems_fit(arguments, axes):
    """problem_sizes are (N, rows, K) and the experts' rows exist, none of them twice; on a GPU the host does not read
    them, rows beyond the last one are left out, and an expert that begins outside has none"""
    offsets, sizes = arguments["expert_offsets"], arguments["problem_sizes"]
    if not (isinstance(offsets, np.ndarray) and isinstance(sizes, np.ndarray)):
        return
    n, k = axes["N"], axes["K"]
    for at, (across, count, down) in enumerate(sizes.tolist()):
        if (across, down) != (n, k) or count < 0:
            raise refuse("problem_sizes", f"{(across, count, down)}, number {at}", f"({n}, 0 or more rows, {k})")
    end = 0
    for begin, count in sorted(zip(offsets.tolist(), sizes[:, 1].tolist())):
        if begin < 0 or begin + count > axes["P"] or (count and begin < end):
            want = f"rows of their own among {axes['P']}"
            raise refuse("expert_offsets", f"rows {begin} to {begin + count}", want)
        end = max(end, begin + count)


def _owned(expert_offsets, problem_sizes):
    """(expert, its rows) of the experts that have some."""
    for e, (begin, count) in enumerate(zip(expert_offsets.tolist(), problem_sizes[:, 1].tolist())):
        if count:
            yield e, slice(begin, begin + count)


def _expert_sizes(arguments, results):
    """|channel| |token| sum |a| |w| of the row's expert."""
    out = np.zeros(results[0].shape)
    for e, rows in _owned(arguments["expert_offsets"], arguments["problem_sizes"]):
        own = {"a": arguments["a_tensors"][rows], "b_q": arguments["b_tensors"][e].T,
               "b_group_scales": arguments["b_group_scales"][e], "b_channel_scales": arguments["b_scales"][e],
               "a_token_scales": arguments["a_scales"][rows]}  # fmt: skip
        out[rows] = _sizes(own, None)
    return out


@op(
    row=ROW,
    args={
        "a_tensors": Tensor("P K", ("uint8",), holds="float8_e4m3fn",
                            values=lambda rng, axes: rng.integers(-0x7E, 0x7F, (axes["P"], axes["K"])) % 0xFF),
        "b_tensors": Tensor("E N K/8", ("int32",),
                            values=lambda rng, axes: random_words(rng, (axes["E"], axes["N"], axes["K"] // 8))),
        "a_scales": Tensor("P", ("float32",), values=lambda rng, axes: rng.uniform(0.001, 0.01, axes["P"])),
        "b_scales": Tensor("E N", ("float32",),
                           values=lambda rng, axes: rng.uniform(0.001, 0.002, (axes["E"], axes["N"]))),
        "b_group_scales": Tensor("E G N 8", ("uint8",), holds="float8_e4m3fn", values=_expert_tables),
        "expert_offsets": Tensor("E", ("int64",), values=lambda rng, axes: _dealt(axes)[0]),
        "problem_sizes": Tensor("E 3", ("int32",), values=lambda rng, axes: _dealt(axes)[1]),
    },
    returns={"out": Tensor("P N", ("bfloat16",))},
    rounding=("w = e4m3(q * value(scale)), by the expert's table", "out = bf16(channel * (token * sum_k a * w))"),
    order=str(ORDER),
    parity=TENSOR_CORES,
    mirror=Bound("(K + 511) // 512 * 16 + 34", scale=_expert_sizes, ulps=1, why=WHY + "s: a token's and a channel's"),
    nan="NaN scales are refused; codes of NaN in a_tensors as in any product",
    layout="b_tensors[e] is cutlass_encode_and_reorder_int4b's result transposed: an expert's words side by side",
    upstream="vllm/_custom_ops.py: cutlass_w4a8_moe_mm",
    examples=(
        {"P": 12, "K": 256, "N": 128, "G": 2, "E": 3},
        {"P": 1, "K": 128, "N": 128, "G": 1, "E": 2},
        {"P": 0, "K": 128, "N": 128, "G": 1, "E": 2},
    ),
    requires=(_experts_fit, no_nan("b_group_scales"), finite("b_scales", "a_scales"), _problems_fit),
)  # fmt: skip
def cutlass_w4a8_moe_mm(
    nx, a_tensors, b_tensors, a_scales, b_scales, b_group_scales, expert_offsets, problem_sizes
):  # fmt: skip
    """out[expert_offsets[e] + i] = cutlass_w4a8_mm(those rows of a_tensors, expert e's weights and scales)[i].

    Shapes: a_tensors codes uint8 [P, K]; b_tensors int32 [E, N, K / 8]; a_scales float32 [P]; b_scales float32 [E, N];
    b_group_scales uint8 [E, K / 128, N, 8]; expert_offsets int64 [E]; problem_sizes int32 [E, 3], for expert e (N, its
    rows, K), as vLLM swaps them; out bfloat16 [P, N]. Rows that no expert has are zeros; vLLM leaves them as they were.
    Rounding points: as cutlass_w4a8_mm's.
    Errors: ContractError for K or N that are no multiples of 128, other groups or sizes, rows that do not exist or
    have two experts, scales that are not finite.
    Source: vllm/_custom_ops.py, cutlass_w4a8_moe_mm; model_executor/layers/fused_moe/experts/cutlass_moe.py.
    """
    out = np.zeros((len(a_tensors), b_tensors.shape[1]), ml_dtypes.bfloat16)
    for e, rows in _owned(expert_offsets, problem_sizes):
        own = a_tensors[rows], b_tensors[e], b_group_scales[e], b_scales[e], a_scales[rows]
        out[rows] = nx.store(_scaled_sums(nx, *own), ml_dtypes.bfloat16)
    return out
