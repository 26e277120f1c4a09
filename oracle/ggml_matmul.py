"""Products of weights in ggml's blocks: an activation row is quantised once, and blocks meet as integers.

The order is that of ggml's generic C code, every float32 operation rounded by itself: packaged builds let the compiler
contract some of those loops into fused multiply-adds, which these definitions do not.

`matmul_bt_quant` has a second order, that of its CUDA kernels (`ONE_SUM`), for Q3_K, Q4_K, Q5_K and Q6_K. The C code
keeps eight float32 sums for these, because a CPU's vector register had eight lanes. A GPU adds up a block of 256 in
integers, which is exact in any order, so one term a block is enough, with an eighth of the float32 operations. The two
orders have the same truth and differ by roundings of float32 alone: a normalised mean squared error of about 1e-14.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.blocks import WEIGHT_TYPES, quant_traits
from vtlab.ops.contract import Bound, Choice, Parity, Tensor, refuse
from vtlab.ops.numerics import TRUTH, parallel
from vtlab.ops.table import op

from . import ggml_blocks
from .ggml import QUANT_TYPES, ROW, quantize_row_q8_0, quantize_row_q8_1, quantize_row_q8_k, random_blocks, rows_of
from .ggml_dot import ONE_SUM, Factor, activation, lanes_of, pairs, products, weight

_QUANTISERS = {"Q8_0": quantize_row_q8_0, "Q8_1": quantize_row_q8_1, "Q8_K": quantize_row_q8_k}
_ELEMENTS = 1 << 20  # integers of one piece of a product
_DOT_ORDER = (
    "blocks ascending, from +0; Q4_0 (sumi * dw) * da, Q5_0, Q8_0 and the i-quants sumi * (dw * da), Q4_1 and Q5_1 "
    "(dw * da) * sumi + m * s, Q2_K (da * dw) * isum - (da * dmin) * summs; Q3_K, Q4_K, Q5_K and Q6_K in eight lanes "
    "(element k in lane k % 8) of (dw * da) * lane, lanes added ascending to the running minimums -(dmin * da) * sumi; "
    "IQ2_XXS times 1/8 and IQ3_XXS times 1/4 at the end"
)
_ORDER = _DOT_ORDER + (
    ". On CUDA Q3_K and Q6_K are summed like the i-quants, isum * (dw * da), and Q4_K and Q5_K like Q2_K, (dw * da) * "
    "isum - (da * dmin) * summs: the integers of a block of 256 are added up exactly and make one term"
)
_WHY = "at most five roundings of a block's term, one addition a block of 32, eight of lanes"


def quantised(nx, a: np.ndarray, quant_type: str) -> np.ndarray:
    """Blocks uint8 [M, bytes] of a, of the type that meets `quant_type`."""
    return _QUANTISERS[quant_traits(quant_type).activation].body(nx, a)


def _absolute(w: Factor, a: Factor, quant_type: str, meet) -> np.ndarray:
    """The sum of magnitudes of the terms that are added up: what the roundings of a product are relative to."""
    one = w._replace(lanes=np.abs(w.lanes), d=np.abs(w.d), fold=abs(w.fold), dmin=None, low=None)
    other = a._replace(lanes=np.abs(a.lanes), d=np.abs(a.d), low=None)
    high = meet(TRUTH, one, other, "Q8_0" if lanes_of(quant_type) == 1 else "Q6_K")
    if w.dmin is None:
        return high
    low = np.abs(a.low) if w.low is None else np.abs(w.low).sum(-1)[..., None] * np.abs(a.low).sum(-1)[:, None]
    # a bound, not the sum itself: minimums are positive, sums of codes are taken by magnitude
    if w.low is None:
        scaled = np.abs(w.dmin)[:, :, None] * low[:, None]
    else:
        scaled = (np.abs(w.dmin)[:, :, None] * np.abs(a.d)[:, None]) * low
    total = scaled.sum(0).T
    return high + (total if high.ndim == 2 else np.diagonal(total))


def _blocks_match(arguments, axes):
    """rows of w and of a hold as many values: a in the type that meets w's"""
    traits = quant_traits(arguments["quant_type"])
    length, left = divmod(arguments["w"].shape[1], traits.nbytes)
    if left:
        raise refuse("w", f"rows of {arguments['w'].shape[1]} bytes", f"whole blocks of {traits.nbytes} bytes")
    rows_of("a", length * traits.elements, traits.activation, arguments["a"])


def _activations(rng, axes):
    x = rng.standard_normal((axes["R"], axes["elements"])).astype(np.float32)
    return quantised(TRUTH, x, axes["quant_type"])


def _weights(rng, axes):
    return random_blocks(rng, axes["quant_type"], axes.get("N", axes.get("R")), axes.get("K", axes.get("elements")))


def _pair_scale(arguments, results):
    kind = arguments["quant_type"]
    w = weight(arguments["w"], kind)
    return _absolute(w, activation(arguments["a"], quant_traits(kind).activation, lanes_of(kind)), kind, pairs)


@op(
    row=ROW,
    args={
        "w": Tensor("R B", ("uint8",), layout="rows", values=_weights),
        "a": Tensor("R C", ("uint8",), layout="rows", values=_activations),
        "quant_type": QUANT_TYPES,
    },
    returns={"out": Tensor("R", ("float32",))},
    rounding=("every float32 operation of the order", "out = f32"),
    order=_DOT_ORDER,
    parity=Parity("bytes"),
    mirror=Bound("B // 18 + 14", scale=_pair_scale, ulps=1, why=_WHY),
    nan="NaN and infinite scales propagate: 0 * inf is NaN",
    layout="rows may be strided",
    upstream="ggml/src/ggml-cpu/quants.c: ggml_vec_dot_<type>_<activation>_generic",
    examples=tuple({"R": 3, "elements": 512, "quant_type": kind} for kind in WEIGHT_TYPES),
    requires=(_blocks_match,),
)
def vec_dot(nx, w, a, *, quant_type):
    """out[r] = the dot product of row r of w with row r of a, both in blocks.

    Shapes: w uint8 [R, bytes of a row of `quant_type`], a uint8 [R, bytes of as many values] in Q8_0 (for Q4_0, Q5_0,
    Q8_0), Q8_1 (Q4_1, Q5_1) or Q8_K (the others); out float32 [R].
    Rounding points: integer sums are exact and round to float32 once; then every product, sum and difference of the
    declared order. Truth is the float64 product of the values that the blocks stand for, with Q8_1's stored sums.
    Errors: ContractError for rows that are no whole blocks or differ in length.
    Source: ggml/src/ggml-cpu/quants.c, ggml_vec_dot_*_generic.
    """
    factor = activation(a, quant_traits(quant_type).activation, lanes_of(quant_type))
    return nx.store(pairs(nx, weight(w, quant_type), factor, quant_type), np.float32)


def _rows_match(arguments, axes):
    """K is a multiple of the type's block, and a row of b holds K values"""
    traits, length = quant_traits(arguments["quant_type"]), axes["K"]
    if length % traits.elements or length // traits.elements * traits.nbytes != axes["B"]:
        kind = arguments["quant_type"]
        if length % traits.elements:
            raise refuse("a", f"K = {length}", f"a multiple of {traits.elements} for {kind}")
        rows_of("b", length, kind, arguments["b"])


def _product_scale(arguments, results):
    kind, a, b = arguments["quant_type"], arguments["a"], arguments["b"]
    if kind == "Q8_K":
        return np.abs(a.astype(np.float64)) @ np.abs(ggml_blocks.values(TRUTH, ggml_blocks.take_apart(b, kind))).T
    factor = activation(quantised(TRUTH, a, kind), quant_traits(kind).activation, lanes_of(kind))
    return _absolute(weight(b, kind), factor, kind, products)


@op(
    row=ROW,
    args={
        "a": Tensor("M K", layout="rows"),
        "b": Tensor("N B", ("uint8",), layout="rows", values=_weights),
        "quant_type": Choice((*WEIGHT_TYPES, "Q8_K")),
        "out_dtype": Choice(("float32", "bfloat16"), optional=True),
    },
    returns={"out": Tensor("M N", ("float32", "bfloat16"))},
    rounding=("a is quantised as by quantize_row_q8_0, q8_1 or q8_k", "every float32 operation of the order",
              "out = round(...), in out_dtype"),
    order=_ORDER,
    parity=Parity("bytes"),
    mirrors={"cuda": ONE_SUM},
    mirror=Bound("(K // 32 + 14) * (1 + 31 * (B * 256 == K * 292))", scale=_product_scale, ulps=1, why=_WHY + "; rows "
                 "of Q8_K, which meet nothing as integers, one fma a value"),
    nan="NaN in a gives NaN in its row under Q8_0 and Q8_1, nothing under Q8_K, whose codes pass it over",
    layout="rows of a and b may be strided views; out is contiguous",
    upstream="ggml/src/ggml-cpu/ggml-cpu.c: ggml_compute_forward_mul_mat",
    examples=(
        *({"M": 3, "K": 512, "N": 5, "quant_type": kind, "a": "float32"} for kind in WEIGHT_TYPES),
        {"M": 2, "K": 96, "N": 17, "quant_type": "Q4_1", "a": "bfloat16", "out_dtype": "bfloat16"},
        {"M": 1, "K": 256, "N": 33, "quant_type": "Q6_K", "a": "float16"},
        {"M": 2, "K": 256, "N": 3, "quant_type": "Q8_K", "a": "float32"},
        {"M": 0, "K": 64, "N": 3, "quant_type": "Q8_0", "a": "float32"},
    ),
    requires=(_rows_match,),
)  # fmt: skip
def matmul_bt_quant(nx, a, b, *, quant_type, out_dtype=None):
    """out[m, n] = sum_k a[m, k] * b[n, k], with b in blocks that are never expanded.

    Shapes: a [M, K] float32, bfloat16 or float16, rows may be strided; b uint8 [N, bytes of K values]; out [M, N] in
    `out_dtype`, by default float32.
    Rounding points: each row of a to codes, once (see the quantisers); then those of vec_dot; then the store. CUDA
    kernels have a mirror of their own for Q3_K, Q4_K, Q5_K and Q6_K, `matmul_bt_quant.mirror_on("cuda", ...)`: the
    integers of a block of 256 become one term rather than eight lanes. The integers are the same; the float32 sums
    differ by a normalised mean squared error below 1e-6 (about 1e-14), and no other type differs. A weight in Q8_K,
    which no activation type meets, is dequantised to float32 and multiplied by the unquantised a, one fma after the
    other. An element depends on its row of a and its row of b alone.
    Errors: ContractError for K that is no whole blocks, rows of b of another length, a float16 result.
    Source: ggml/src/ggml-cpu/ggml-cpu.c, ggml_compute_forward_mul_mat.
    """
    out = np.empty((len(a), len(b)), out_dtype or np.float32)
    if quant_type == "Q8_K":
        rows = nx.store(ggml_blocks.values(nx, ggml_blocks.take_apart(b, quant_type)), np.float32)
        out[...] = nx.store(nx.matmul(a, rows, fused=True), out.dtype)
        return out
    factor = activation(quantised(nx, a, quant_type), quant_traits(quant_type).activation, lanes_of(quant_type, nx))
    step = max(1, _ELEMENTS // max(1, a.shape[1], factor.lanes[..., 0].size))

    def piece(start: int) -> None:
        part = weight(b[start : start + step], quant_type, nx)
        out[:, start : start + step] = nx.store(products(nx, part, factor, quant_type), out.dtype)

    parallel(piece, range(0, len(b), step), work=len(b) * a.shape[1])
    return out
