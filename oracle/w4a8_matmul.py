"""The product of e4m3 activations with weights of 4 bits, each of them an entry of its scale's table."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops.contract import Bound, Parity, Tensor, refuse
from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import op

from .lowbit import WHY, magnitudes, total, words
from .matmul import ORDER
from .quant_fp8 import E4M3
from .w4a8 import GROUP, ROW, cutlass_pack_scale_fp8, encoded_rows, no_nan


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


def _floats_are_finite(arguments, axes):
    """the scales of tokens and channels are finite; on a GPU the host does not look"""
    for name in ("b_channel_scales", "a_token_scales"):
        if isinstance(arguments[name], np.ndarray) and not np.isfinite(arguments[name]).all():
            raise refuse(name, "a NaN or an infinity", "finite numbers")


def _weights(nx, b_q, tables) -> np.ndarray:
    return looked_up(encoded_rows(b_q), tables).view(E4M3)


def _sizes(arguments, results):
    """|channel| |token| sum |a| |w|."""
    sums = magnitudes(arguments["a"].view(E4M3), _weights(TRUTH, arguments["b_q"], arguments["b_group_scales"]))
    factors = (np.abs(arguments[name].astype(np.float64)) for name in ("a_token_scales", "b_channel_scales"))
    token, channel = factors
    return token[:, None] * sums * channel


def _tables(rng, axes):
    return cutlass_pack_scale_fp8(rng.integers(0, 0x67, (axes["G"], axes["N"])).astype(np.uint8))


@op(
    row=ROW,
    args={
        "a": Tensor("M K", ("uint8",), holds="float8_e4m3fn",
                    values=lambda rng, axes: rng.integers(-0x7E, 0x7F, (axes["M"], axes["K"])) % 0xFF),
        "b_q": words("K/8", "N"),
        "b_group_scales": Tensor("G N 8", ("uint8",), holds="float8_e4m3fn", values=_tables),
        "b_channel_scales": Tensor("N", ("float32",), values=lambda rng, axes: rng.uniform(0.001, 0.002, axes["N"])),
        "a_token_scales": Tensor("M", ("float32",), values=lambda rng, axes: rng.uniform(0.001, 0.01, axes["M"])),
    },
    returns={"out": Tensor("M N", ("bfloat16",))},
    rounding=("w = e4m3(q * value(scale)), by the table", "out = bf16(channel * (token * sum_k a * w))"),
    order=str(ORDER),
    parity=Parity("bytes"),
    mirror=Bound("(K + 511) // 512 * 16 + 34", scale=_sizes, ulps=1, why=WHY + "s: a token's and a channel's"),
    nan="NaN scales are refused; codes of NaN in a as in any product",
    layout="b_q as cutlass_encode_and_reorder_int4b gives it, b_group_scales as cutlass_pack_scale_fp8 does",
    upstream="vllm/_custom_ops.py: cutlass_w4a8_mm",
    examples=(
        {"M": 3, "K": 256, "N": 128, "G": 2},
        {"M": 1, "K": 128, "N": 128, "G": 1},
        {"M": 0, "K": 128, "N": 128, "G": 1},
    ),
    requires=(_shapes_fit, no_nan("b_group_scales"), _floats_are_finite),
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
    sums = total(nx, a.view(E4M3), _weights(nx, b_q, b_group_scales))
    scaled = nx.mul(nx.load(b_channel_scales), nx.mul(nx.load(a_token_scales)[:, None], sums))
    return nx.store(scaled, ml_dtypes.bfloat16)
