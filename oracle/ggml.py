"""Activations to ggml's blocks of eight-bit codes, and a table of weights in blocks read row by row.

Every float32 operation on the way to a code or a scale is a rounding point of the definition, so truth and mirror agree
to the byte. Block layouts are those of `vtlab.ops.blocks`.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.blocks import LAYOUTS, WEIGHT_TYPES, quant_traits, row_size_bytes
from vtlab.ops.contract import EXACT, Bound, Choice, Parity, Tensor, refuse
from vtlab.ops.dtypes import FLOATS, IDS
from vtlab.ops.table import op

from . import ggml_blocks

ROW = "KERNEL-QUANT-CIQ-IQUANT"
QUANT_TYPES = Choice(WEIGHT_TYPES)
_EXACT = Bound(ulps=0, why="float32 roundings are part of the definition: a product or quotient of two float32 rounds "
               "to the same float32 from float64 as directly")  # fmt: skip


def random_blocks(rng, quant_type: str, rows: int, length: int) -> np.ndarray:
    """uint8 [rows, bytes]: codes at random, scales such that the weights are about as large as trained ones."""
    layout = LAYOUTS[quant_type]
    raw = rng.integers(0, 256, (rows, row_size_bytes(quant_type, length)), dtype=np.uint8)
    blocks = raw.reshape(-1).view(layout.block)
    for field, size in (("d", 0.0125), ("dmin", 0.0075), ("m", -0.05)):
        if field in layout.block.names:
            blocks[field] = size * rng.uniform(0.5, 1.5, len(blocks)) * (0.02 if layout.elements == 256 else 1)
    return raw


def whole_blocks(quant_type: str):
    """A check that rows of x are whole blocks of the type."""
    elements = LAYOUTS[quant_type].elements

    def check(arguments, axes):
        if arguments["x"].shape[1] % elements:
            raise refuse("x", f"rows of {arguments['x'].shape[1]}", f"rows of a multiple of {elements}")

    check.__doc__ = f"rows of whole blocks: K is a multiple of {elements}"
    return check


def single(nx, value):
    """The value rounded to float32: a rounding point in both arithmetics."""
    return nx.load(nx.store(value, np.float32))


def _rows(x: np.ndarray, quant_type: str) -> tuple[np.ndarray, np.ndarray]:
    """x float32 [M, blocks, elements], and empty blocks [M, blocks] to fill."""
    layout = LAYOUTS[quant_type]
    blocks = np.zeros((len(x), x.shape[1] // layout.elements), layout.block)
    return x.reshape(*blocks.shape, layout.elements), blocks


def _bytes(blocks: np.ndarray) -> np.ndarray:
    return blocks.view(np.uint8).reshape(len(blocks), blocks.shape[1] * blocks.itemsize)


def _half_away(v: np.ndarray) -> np.ndarray:
    """float64 v to the nearest integers, halves away from zero; NaN to 0."""
    size = np.abs(np.where(np.isnan(v), 0, v))
    low = np.floor(size)
    return (np.sign(v) * (low + (size - low >= 0.5))).astype(np.float64)


def _eight_bits(nx, x: np.ndarray):
    """d float32 [M, blocks, 1] and codes of Q8_0 and Q8_1; a block whose 1 / d is infinite has codes 0."""
    with np.errstate(all="ignore"):
        d = single(nx, nx.div(nx.max(nx.abs(x), keepdims=True), 127))
        inverse = single(nx, nx.div(1, d))
        inverse = nx.where(np.isfinite(inverse), inverse, 0)
        codes = _half_away(np.asarray(single(nx, nx.mul(x, inverse)), np.float64))
    return d, np.nan_to_num(codes, nan=0.0)


@op(
    row=ROW,
    rows="M",
    args={"x": Tensor("M K", layout="rows")},
    returns={"out": Tensor("M K/32*34", ("uint8",))},
    rounding=("d = f32(max|x| / 127)", "inverse = f32(1 / d), 0 where that is not finite", "v = f32(x * inverse)",
              "q = v to the nearest integer, halves away from zero", "stored d = f16(d)"),
    parity=Parity("bytes"),
    mirror=_EXACT,
    nan="a NaN or an infinity makes d NaN or infinite and codes 0 in its block; d above 65504 is stored as infinity",
    ties="halves away from zero",
    layout="x may be strided rows; out is blocks of 34 bytes: d, then 32 codes",
    upstream="ggml/src/ggml-quants.c: quantize_row_q8_0_ref",
    examples=(
        {"M": 5, "K": 96, "x": "float32"},
        {"M": 2, "K": 32, "x": "bfloat16"},
        {"M": 0, "K": 64, "x": "float16"},
    ),
    requires=(whole_blocks("Q8_0"),),
)  # fmt: skip
def quantize_row_q8_0(nx, x):
    """q = round(x / d), d = max|x| / 127 over each 32 neighbours: blocks of Q8_0.

    Shapes: x [M, K], K a multiple of 32; out uint8 [M, K / 32 * 34].
    Rounding points: d, its reciprocal and the product to float32; the code to the nearest integer, halves away from
    zero; d once more, to float16, after the codes are made. ggml leaves the codes undefined where 1 / d is infinite
    (d below 2.94e-39), here they are 0.
    Errors: ContractError for a ragged row.
    Source: ggml/src/ggml-quants.c, quantize_row_q8_0_ref.
    """
    x, blocks = _rows(nx.load(x), "Q8_0")
    d, blocks["qs"] = _eight_bits(nx, x)
    blocks["d"] = nx.store(d[..., 0], np.float16)
    return _bytes(blocks)


@op(
    row=ROW,
    rows="M",
    args={"x": Tensor("M K", layout="rows")},
    returns={"out": Tensor("M K/32*36", ("uint8",))},
    rounding=("d, inverse, v, q, stored d as in quantize_row_q8_0", "s = f16(f32(d * sum q)), with the float32 d"),
    parity=Parity("bytes"),
    mirror=_EXACT,
    nan="as quantize_row_q8_0; s is d * 0 then, a NaN",
    ties="halves away from zero",
    layout="x may be strided rows; out is blocks of 36 bytes: d, s, then 32 codes",
    upstream="ggml/src/ggml-quants.c: quantize_row_q8_1_ref",
    examples=(
        {"M": 5, "K": 96, "x": "float32"},
        {"M": 3, "K": 64, "x": "float16"},
    ),
    requires=(whole_blocks("Q8_1"),),
)
def quantize_row_q8_1(nx, x):
    """Blocks of Q8_0 with the sum of what they hold: s = d * sum(q).

    Shapes: x [M, K], K a multiple of 32; out uint8 [M, K / 32 * 36].
    Rounding points: those of quantize_row_q8_0; the sum of codes is exact, its product with the float32 d rounds to
    float32, then to float16.
    Errors: ContractError for a ragged row.
    Source: ggml/src/ggml-quants.c, quantize_row_q8_1_ref.
    """
    x, blocks = _rows(nx.load(x), "Q8_1")
    d, codes = _eight_bits(nx, x)
    total = single(nx, nx.mul(d[..., 0], nx.load(codes.sum(-1))))
    blocks["d"], blocks["s"], blocks["qs"] = nx.store(d[..., 0], np.float16), nx.store(total, np.float16), codes
    return _bytes(blocks)


@op(
    row=ROW,
    rows="M",
    args={"x": Tensor("M K", layout="rows")},
    returns={"out": Tensor("M K/256*292", ("uint8",))},
    rounding=("inverse = f32(-127 / m), m the first x of the largest magnitude", "v = f32(inverse * x)",
              "q = min(127, v to the nearest integer, ties to even)", "d = f32(1 / inverse)"),
    parity=Parity("bytes"),
    mirror=_EXACT,
    nan="a NaN is passed over in the search for m and has code 0; an infinity makes d infinite and codes 0",
    ties="of equal magnitudes the first is m; halves of v go to the even code",
    layout="x may be strided rows; out is blocks of 292 bytes: d float32, 256 codes, the sums of each 16 as int16",
    upstream="ggml/src/ggml-quants.c: quantize_row_q8_K_ref",
    examples=(
        {"M": 5, "K": 512, "x": "float32"},
        {"M": 2, "K": 256, "x": "bfloat16"},
        {"M": 1, "K": 0, "x": "float32"},
    ),
    requires=(whole_blocks("Q8_K"),),
)  # fmt: skip
def quantize_row_q8_k(nx, x):
    """q = round(-127 x / m), m the extremum of each 256 neighbours, sign and all: blocks of Q8_K.

    Shapes: x [M, K], K a multiple of 256; out uint8 [M, K / 256 * 292].
    Rounding points: the inverse scale, the product and d to float32; the code to the nearest integer, ties to even. d
    has the sign opposite to m's: m itself becomes -127, and the other side reaches at most +127. A block whose inverse
    scale is infinite (|m| below 3.7e-37, where ggml's codes are undefined) is stored as zeros, as one of zeros is.
    Errors: ContractError for a ragged row.
    Source: ggml/src/ggml-quants.c, quantize_row_q8_K_ref.
    """
    x, blocks = _rows(nx.load(x), "Q8_K")
    if not x.size:
        return _bytes(blocks)
    size = np.where(np.isnan(x), 0, nx.abs(x))
    extremum = np.take_along_axis(x, size.argmax(-1, keepdims=True), -1)
    with np.errstate(all="ignore"):
        inverse = single(nx, nx.div(-127, extremum))
        dead = np.isinf(inverse) | (size.max(-1, keepdims=True) == 0)
        v = np.rint(np.asarray(single(nx, nx.mul(inverse, x)), np.float64))
        d = np.where(dead, 0, single(nx, nx.div(1, inverse)))
    codes = np.where(dead | np.isnan(v), 0, np.minimum(v, 127))
    blocks["d"], blocks["qs"] = d[..., 0], codes
    blocks["bsums"] = codes.reshape(*codes.shape[:2], 16, 16).sum(-1)
    return _bytes(blocks)


def rows_of(name: str, length: int, quant_type: str, array) -> None:
    """Refuse rows of blocks that do not hold `length` values."""
    traits = quant_traits(quant_type)
    if length % traits.elements:
        raise refuse(name, f"rows of {length} values", f"a multiple of {traits.elements} for {quant_type}")
    want = row_size_bytes(quant_type, length)
    if array.shape[1] != want:
        raise refuse(name, f"rows of {array.shape[1]} bytes", f"{want} bytes: {length} values of {quant_type}")


def _whole_rows(arguments, axes):
    """rows of the table are whole blocks of the type"""
    nbytes = quant_traits(arguments["quant_type"]).nbytes
    if arguments["table"].shape[1] % nbytes:
        raise refuse("table", f"rows of {arguments['table'].shape[1]} bytes", f"whole blocks of {nbytes} bytes")


def _ids_in_range(arguments, axes):
    """0 <= ids < V"""
    ids, rows = arguments["ids"], arguments["table"].shape[0]
    if isinstance(ids, np.ndarray) and ids.size and (ids.min() < 0 or ids.max() >= rows):
        raise refuse("ids", f"{ids.min()} to {ids.max()}", f"0 to {rows - 1}")


def _terms(arguments, results):
    """|d * s * q| + |dmin * m| of every element: what its roundings are relative to."""
    from vtlab.ops.numerics import TRUTH

    parts = ggml_blocks.take_apart(arguments["table"][arguments["ids"]], arguments["quant_type"])
    high = np.abs(ggml_blocks.values(TRUTH, parts._replace(dmin=None)))
    return (
        high
        if parts.dmin is None
        else high + np.abs(ggml_blocks.values(TRUTH, parts._replace(q=np.zeros_like(parts.q))))
    )


@op(
    row=ROW,
    args={
        "table": Tensor("V B", ("uint8",), layout="rows",
                        values=lambda rng, axes: random_blocks(rng, axes["quant_type"], axes["V"], axes["elements"])),
        "ids": Tensor("T", IDS, values=lambda rng, axes: rng.integers(0, axes["V"], axes["T"])),
        "quant_type": QUANT_TYPES,
        "out_dtype": Choice(FLOATS, optional=True),
    },
    returns={"out": Tensor("T H", FLOATS)},
    rounding=("scale = f32(d * s), minimum = f32(dmin * m)", "v = f32(scale * q), then f32(v - minimum)",
              "out = round(v), in out_dtype"),
    parity=Parity("bytes"),
    mirror=Bound("4", scale=_terms, ulps=1, why="two products, the minimum's product and a difference"),
    nan="NaN or infinite scales of a block propagate",
    layout="rows of the table may be strided; only those that are asked for are read",
    upstream="ggml/src/ggml-cpu/ops.cpp: ggml_compute_forward_get_rows_q; ggml/src/ggml-quants.c: dequantize_row_*",
    examples=(
        {"V": 9, "T": 5, "elements": 96, "quant_type": "Q8_0"},
        {"V": 3, "T": 4, "elements": 512, "quant_type": "Q4_K", "ids": "int64", "out_dtype": "bfloat16"},
        {"V": 2, "T": 3, "elements": 256, "quant_type": "IQ3_XXS", "out_dtype": "float16"},
        {"V": 2, "T": 0, "elements": 64, "quant_type": "Q5_1"},
    ),
    requires=(_whole_rows, _ids_in_range),
)  # fmt: skip
def embedding_quant(nx, table, ids, *, quant_type, out_dtype=None):
    """out[t] = dequantised row ids[t] of a table that is kept in blocks.

    Shapes: table uint8 [V, bytes of a row], ids int32 or int64 [T]; out [T, H] in `out_dtype`, by default float32.
    Rounding points: as ggml's dequantize_row of the type, each float32 operation, then the store. Truth rounds once.
    Errors: ContractError for rows that are no whole blocks, for ids outside 0 <= id < V (NumPy arrays only: a GPU's ids
    are not read by the host).
    Source: ggml/src/ggml-quants.c, dequantize_row_*.
    """
    rows = ggml_blocks.values(nx, ggml_blocks.take_apart(table[ids], quant_type))
    return nx.store(rows, out_dtype or np.float32)


def _fours(arguments, axes):
    """N is a multiple of four; rows are whole blocks of Q8_0"""
    rows, width = arguments["b"].shape
    if rows % 4 or width % LAYOUTS["Q8_0"].nbytes:
        raise refuse("b", f"[{rows}, {width}]", "rows in fours, of whole 34-byte blocks")


@op(
    row=ROW,
    args={
        "b": Tensor(
            "N B",
            ("uint8",),
            layout="rows",
            values=lambda rng, axes: random_blocks(rng, "Q8_0", axes["N"], axes["elements"]),
        )
    },
    returns={"out": Tensor("N/4 4*B", ("uint8",))},
    rounding=("none: bytes are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="bytes are moved",
    layout="out: for each block of four rows their four d, then chunks of eight codes, row by row",
    upstream="ggml/src/ggml-cpu/repack.cpp: ggml_quantize_mat_q8_0_4x8_generic's layout, block_q8_0x4",
    examples=({"N": 8, "elements": 96}, {"N": 4, "elements": 32}),
    requires=(_fours,),
)
def repack_q8_0x4(nx, b):
    """Blocks of Q8_0 of four rows as one: four scales, then the codes in chunks of eight, a chunk of each row in turn.

    Shapes: b uint8 [N, B], N a multiple of 4, B whole blocks of 34 bytes; out uint8 [N / 4, 4 B].
    Rounding points: none, a permutation of bytes.
    Errors: ContractError for other shapes.
    Source: ggml/src/ggml-cpu/repack.cpp, block_q8_0x4.
    """
    rows, width = b.shape
    blocks = b.reshape(rows // 4, 4, width // 34, 34).swapaxes(1, 2)
    out = np.empty((rows // 4, width // 34, 136), np.uint8)
    out[..., :8] = blocks[..., :2].reshape(*out.shape[:2], 8)
    out[..., 8:] = blocks[..., 2:].reshape(*out.shape[:2], 4, 4, 8).swapaxes(2, 3).reshape(*out.shape[:2], 128)
    return out.reshape(rows // 4, 4 * width)
