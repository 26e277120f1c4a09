"""GGML blocks on a GPU: activations to blocks of codes, rows of a table in blocks; launchers of cuda/ggml.cu."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.blocks import WEIGHT_TYPES, quant_traits

from .codes import dense, spread
from .launch import PROVIDER, as_rows, kind, results, start, vectors
from .runtime import current

_FAMILY = "ggml"
_BLOCK = 256


def reachable(array, nbytes: int):
    """(rows of blocks, bytes from one to the next) where words of them can be read, else of a copy.

    Blocks of a multiple of 16 bytes are read as such, of four as words, others at even addresses.
    """
    item = 16 if nbytes % 16 == 0 else 4 if nbytes % 4 == 0 else 2
    step = array.strides[0] if len(array) > 1 else array.shape[1]
    if step % item or current().pointer(array) % item:
        return dense(array), array.shape[1]
    return array, step


def _blocks(op: str, quant_type: str, x, out):
    traits = quant_traits(quant_type)
    blocks = x.shape[1] // traits.elements
    (target,) = results(op, out, (x,), ((x.shape[0], blocks * traits.nbytes), np.dtype(np.uint8)))
    count = x.shape[0] * blocks
    if not count:
        return target
    item = 4 if traits.elements == 256 else 2
    written = target if current().pointer(target) % item == 0 else current().empty(target.shape, target.dtype)
    x, _, stride = as_rows(op, "x", x)
    wide, sums = int(vectors(x.shape[1], (x, stride))), int(quant_type == "Q8_1")
    args = [count, blocks, x, stride, kind(x), wide, written, sums]
    lanes = 32 if traits.elements == 256 else 4
    start(op, _FAMILY, f"ggml_blocks_{traits.elements}", -(-count * lanes // _BLOCK), (_BLOCK, 1), args)
    if written is not target:
        target[...] = written
    return target


@providers.provider("quantize_row_q8_0", "cuda", PROVIDER)
def quantize_row_q8_0(x, *, out=None):
    """oracle.ggml.quantize_row_q8_0."""
    return _blocks("quantize_row_q8_0", "Q8_0", x, out)


@providers.provider("quantize_row_q8_1", "cuda", PROVIDER)
def quantize_row_q8_1(x, *, out=None):
    """oracle.ggml.quantize_row_q8_1."""
    return _blocks("quantize_row_q8_1", "Q8_1", x, out)


@providers.provider("quantize_row_q8_k", "cuda", PROVIDER)
def quantize_row_q8_k(x, *, out=None):
    """oracle.ggml.quantize_row_q8_k."""
    return _blocks("quantize_row_q8_k", "Q8_K", x, out)


@providers.provider("embedding_quant", "cuda", PROVIDER)
def embedding_quant(table, ids, *, quant_type, out_dtype=None, out=None):
    """oracle.ggml.embedding_quant."""
    op, traits = "embedding_quant", quant_traits(quant_type)
    width = table.shape[1] // traits.nbytes * traits.elements
    form = ((ids.size, width), np.dtype(out_dtype or np.float32))
    (target,) = results(op, out, (table, ids), form)
    if not target.size:
        return target
    table, step = reachable(table, traits.nbytes)
    wide = vectors(width, (target, width))
    args = [
        width // 32, WEIGHT_TYPES.index(quant_type), table, step, ids, int(ids.dtype.itemsize == 8), target,
        kind(target), int(wide),
    ]  # fmt: skip
    spread(op, _FAMILY, "ggml_rows", target.size // 32, args)
    return target
