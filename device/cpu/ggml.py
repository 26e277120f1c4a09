"""GGML blocks on the CPU: activations to codes, products of weights that stay in the bytes of their file."""

from __future__ import annotations

import numpy as np

from vtlab.ops.blocks import quant_traits

from .launch import KINDS, Kernels, delivered, provider, results, rows_of
from .threads import split

ROWS, TILES, VALUES = Kernels("ggml_rows"), Kernels("ggml"), Kernels("ggml_values")
_FLOAT32 = np.dtype(np.float32)
_LANES = 16  # rows of weights that are unpacked together
_WORDS_32, _WORDS_256 = 8, 136  # of a block of activations
_OFFSETS = {"Q3_K": 4, "Q4_K": 0, "Q5_K": 0, "Q6_K": 32}
"""Of the codes of those types of which single rows of activations meet weights that are not unpacked."""


def _blocks(op: str, quant_type: str, x, out):
    traits = quant_traits(quant_type)
    blocks = x.shape[1] // traits.elements
    made = results(op, out, ((x.shape[0], blocks * traits.nbytes), np.uint8))
    array, rows, stride = rows_of(x)
    args = array, stride, KINDS[x.dtype], blocks, made[0]
    if traits.elements == 256:
        split(ROWS.blocks_256, rows, 8 * x.size, *args)
    else:
        split(ROWS.blocks_32, rows, 8 * x.size, *args, int(quant_type == "Q8_1"))
    return delivered(out, made)


@provider("quantize_row_q8_0")
def quantize_row_q8_0(x, *, out=None):
    """oracle.ggml.quantize_row_q8_0."""
    return _blocks("quantize_row_q8_0", "Q8_0", x, out)


@provider("quantize_row_q8_1")
def quantize_row_q8_1(x, *, out=None):
    """oracle.ggml.quantize_row_q8_1."""
    return _blocks("quantize_row_q8_1", "Q8_1", x, out)


@provider("quantize_row_q8_k")
def quantize_row_q8_k(x, *, out=None):
    """oracle.ggml.quantize_row_q8_k."""
    return _blocks("quantize_row_q8_k", "Q8_K", x, out)


@provider("matmul_bt_quant")
def matmul_bt_quant(a, b, *, quant_type, out_dtype=None, out=None):
    """oracle.ggml_matmul.matmul_bt_quant."""
    traits = quant_traits(quant_type)
    if not traits.has_vec_dot:
        return NotImplemented
    rows, columns, blocks = a.shape[0], b.shape[0], a.shape[1] // traits.elements
    made = results("matmul_bt_quant", out, ((rows, columns), out_dtype or _FLOAT32))
    if not made[0].size:
        return delivered(out, made)
    if columns < _LANES:
        padded = np.zeros((_LANES, b.shape[1]), np.uint8)
        padded[:columns] = b
        wide = np.empty((rows, _LANES), made[0].dtype)
        _product(a, padded, quant_type, traits, blocks, wide)
        made[0][...] = wide[:, :columns]
    else:
        _product(a, b, quant_type, traits, blocks, made[0])
    return delivered(out, made)


def _product(a, b, quant_type, traits, blocks, out) -> None:
    array, rows, stride = rows_of(a)
    columns, large = b.shape[0], traits.elements == 256
    many = False
    if large:
        many = rows >= (ROWS.EIGHTS_IN_LANES if quant_type in _OFFSETS else ROWS.EIGHTS_IN_BLOCKS)
        form = ROWS.BY_EIGHTS if many else ROWS.AS_BYTES if quant_type in _OFFSETS else ROWS.ROW_BY_ROW
        slots, quantise = -(-rows // 8) * 8 if many else rows, ROWS.words_256
        last = rows, form, _OFFSETS.get(quant_type, 0)
    else:
        slots, quantise, last = rows, ROWS.words_32, (int(traits.activation == "Q8_1"),)
    words = np.empty(slots * blocks * (_WORDS_256 if large else _WORDS_32) + _LANES, np.int32)
    scales = np.empty(slots * blocks * 2, np.float32)
    split(quantise, slots, 8 * a.size, array, stride, KINDS[a.dtype], blocks, words, scales, *last)
    split(
        getattr(TILES, quant_type.lower()), -(-columns // _LANES), columns * b.shape[1] * (1 + rows), b,
        b.strides[0] if columns > 1 else b.shape[1], columns, words, scales, rows, blocks, out, KINDS[out.dtype],
        grain=1 + many,
    )  # fmt: skip


@provider("embedding_quant")
def embedding_quant(table, ids, *, quant_type, out_dtype=None, out=None):
    """oracle.ggml.embedding_quant."""
    traits = quant_traits(quant_type)
    width = table.shape[1] // traits.nbytes * traits.elements
    made = results("embedding_quant", out, ((ids.size, width), out_dtype or _FLOAT32))
    step = table.strides[0] if table.shape[0] > 1 else table.shape[1]
    split(
        VALUES.rows, ids.size, 64 * made[0].size, table, step, ids, int(ids.dtype.itemsize == 8),
        VALUES.TYPES.index(quant_type), traits.elements, traits.nbytes, made[0], width, KINDS[made[0].dtype],
    )  # fmt: skip
    return delivered(out, made)
