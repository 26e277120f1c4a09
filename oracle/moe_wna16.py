"""Products with the matrix of the expert that each row goes to, where matrices are codes of 4 or 8 bits by groups."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Tensor, refuse
from vtlab.ops.numerics import TRUTH
from vtlab.ops.shapes import sizes
from vtlab.ops.table import op

from .lowbit import (
    BITS,
    FINITE_SCALES,
    HALVES,
    STEPS,
    STORED_TWICE,
    WEIGHT_ROUNDS,
    WHY,
    dequantised,
    finite,
    known_bits,
    magnitudes,
    positive_scales,
    total,
)  # fmt: skip
from .matmul import ORDER
from .moe import draw_experts, rows_and_experts, source_rows
from .wna16 import ROW


def _bytes(shape: str, **more) -> Tensor:
    """Random bytes of named axes."""

    def draw(rng, axes):
        known = {name: size for name, size in axes.items() if isinstance(size, int)}
        return rng.integers(0, 256, sizes(shape, known))

    return Tensor(shape, ("uint8",), values=draw, **more)


def byte_codes(packed, bits: int, axis: int) -> np.ndarray:
    """Codes along `axis` of bytes: two a byte of 4 bits, the lower half first."""
    codes = packed.astype(np.int32)
    if bits == 8:
        return codes
    both = np.stack((codes & 15, codes >> 4), axis + 1)
    return both.reshape(*codes.shape[:axis], 2 * codes.shape[axis], *codes.shape[axis + 1 :])


def _groups_fit(arguments, axes):
    """a byte holds whole codes; groups divide K"""
    if arguments["bits"] == 4:
        for name, size in (("x", axes["K"]), ("scales", axes["N"] if arguments["qzeros"] is not None else 0)):
            if size % 2:
                raise refuse(name, f"{'K' if name == 'x' else 'N'} = {size}", "an even number: two codes a byte")
    groups = axes["G"]
    if groups < 1 or axes["K"] % groups:
        raise refuse("scales", f"{groups} groups", f"a number that divides K = {axes['K']}")


def expert_matrix(nx, qweight, scales, qzeros, bits: int) -> np.ndarray:
    """T((q - zero) * scale) [K, N] of one expert."""
    q = byte_codes(qweight, bits, 1).T
    zero = 1 << bits - 1 if qzeros is None else byte_codes(qzeros, bits, 0).T
    return dequantised(nx, q, zero, np.ascontiguousarray(scales.T))


def _magnitudes(arguments, results):
    """|w| sum_k |x_k| |W_k|."""
    x, ids, weights, bits = (arguments[name] for name in ("x", "ids", "weights", "bits"))
    flat, source = ids.reshape(-1), source_rows(x, ids)
    out = np.zeros((flat.size, arguments["qweight"].shape[1]))
    for expert in np.unique(flat[flat >= 0]):
        rows = np.flatnonzero(flat == expert)
        zeros = None if arguments["qzeros"] is None else arguments["qzeros"][expert]
        matrix = expert_matrix(TRUTH, arguments["qweight"][expert], arguments["scales"][expert], zeros, bits)
        out[rows] = magnitudes(x[source[rows]], matrix)
    return out if weights is None else out * np.abs(weights.astype(np.float64)).reshape(-1, 1)


@op(
    row=ROW,
    args={
        "x": Tensor("R K", HALVES),
        "qweight": _bytes("E N K*bits/8"),
        "scales": positive_scales("E N G", HALVES, like="x"),
        "ids": Tensor("T k", ("int32",), values=draw_experts),
        "weights": Tensor("T k", ("float32",), optional=True),
        "qzeros": _bytes("E N*bits/8 G", optional=True),
        "bits": BITS,
    },
    returns={"out": Tensor("T*k N", like="x")},
    rounding=(*WEIGHT_ROUNDS[:1], "out = T(w sum_k x * W), the product with w in float32"),
    order=str(ORDER),
    parity=STORED_TWICE,
    mirror=Bound(STEPS, scale=_magnitudes, ulps=1, why=WHY + "; zero rows are exact"),
    nan=FINITE_SCALES,
    layout="codes along K, zero points along N, two a byte of 4 bits, the lower half first; row t k + r of out is "
    "choice r of token t",
    upstream="vllm/model_executor/layers/fused_moe/fused_moe.py: fused_moe_kernel_gptq_awq; "
    "quantization/moe_wna16.py; _custom_ops.py: moe_wna16_gemm",
    examples=(
        {"R": 5, "T": 5, "k": 2, "E": 4, "N": 6, "K": 64, "G": 2, "bits": 4, "x": "bfloat16", "qzeros": "uint8"},
        {"R": 6, "T": 3, "k": 2, "E": 3, "N": 5, "K": 96, "G": 3, "bits": 4, "x": "float16", "weights": "float32"},
        {"R": 2, "T": 2, "k": 3, "E": 2, "N": 3, "K": 32, "G": 1, "bits": 8, "x": "bfloat16", "qzeros": "uint8",
         "weights": "float32"},
        {"R": 1, "T": 1, "k": 1, "E": 2, "N": 4, "K": 64, "G": 2, "bits": 8, "x": "float16"},
    ),
    requires=(rows_and_experts, known_bits(4, 8), _groups_fit, finite("scales")),
)  # fmt: skip
def moe_wna16_gemm(nx, x, qweight, scales, ids, weights=None, qzeros=None, *, bits=4):
    """out[t k + r] = weights[t, r] * x[t] W_e^T, W_e = (q - zero) * scale by groups, e = ids[t, r].

    Shapes: x [T, K], or [T k, K] where each choice has a row of its own; qweight uint8 [E, N, K bits / 8]; scales
    [E, N, G] of x's dtype T; ids int32 [T, k], -1: a row of zeros; weights float32 [T, k] or None; qzeros uint8
    [E, N bits / 8, G], or None: 8 of 4 bits, 128 of 8; out [T k, N].
    Rounding points: a weight to T, the difference exact, and the store after the product with `weights` in float32.
    The mirror sums as matmul_bt. Roundings are those of vLLM's Triton kernel; it has a CUDA kernel for few rows too.
    Errors: ContractError for other bits, groups that do not divide K, an odd K, or N of zero points, of 4 bits, an
    expert that there is not, another number of rows, scales that are not finite.
    Source: vllm/model_executor/layers/fused_moe/fused_moe.py, fused_moe_kernel_gptq_awq.
    """
    flat, source = ids.reshape(-1), source_rows(x, ids)
    out = np.zeros((flat.size, qweight.shape[1]), x.dtype)
    for expert in np.unique(flat[flat >= 0]):
        rows = np.flatnonzero(flat == expert)
        zeros = None if qzeros is None else qzeros[expert]
        sums = total(nx, x[source[rows]], expert_matrix(nx, qweight[expert], scales[expert], zeros, bits))
        if weights is not None:
            sums = nx.mul(sums, nx.load(weights.reshape(-1)[rows])[:, None])
        out[rows] = nx.store(sums, x.dtype)
    return out
