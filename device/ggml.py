"""GGML blocks on a GPU: activations to blocks of codes, rows of a table in blocks; launchers of cuda/ggml.cu."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.blocks import quant_traits

from .codes import dense
from .early import EARLY
from .launch import KINDS, PROVIDER, VECTOR, as_rows, kind, map_rows, results, start, vectors
from .runtime import current

_FAMILY = "ggml"
_BLOCK = 256
_STAGED_DEPTH, _LOOKUP_DEPTH = 4, 2
"""Vectors a thread, as the kernels know."""
_FEW = 1 << 15
"""Under so many vectors of 8 each has a thread of its own."""


def reachable(array, nbytes: int):
    """(rows of blocks, bytes from one to the next) where words of them can be read, else of a copy.

    Blocks of a multiple of 16 bytes are read as such, of four as words, others at even addresses.
    """
    item = 16 if nbytes % 16 == 0 else 4 if nbytes % 4 == 0 else 2
    step = array.strides[0] if len(array) > 1 else array.shape[1]
    if step % item or current().pointer(array) % item:
        return dense(array), array.shape[1]
    return array, step


def _form(array) -> tuple:
    return array.shape, array.dtype


def _blocks(op: str, quant_type: str, x, out):
    traits = quant_traits(quant_type)
    blocks = x.shape[1] // traits.elements
    (target,) = results(op, out, (x,), ((x.shape[0], blocks * traits.nbytes), np.dtype(np.uint8)))
    count = x.shape[0] * blocks
    if not count:
        return target
    vector_count, nbytes = x.size // VECTOR, target.size
    x, _, stride = as_rows(op, "x", x)
    wide, item = vectors(x.shape[1], (x, stride)), 4 if traits.elements == 256 else 2
    staged = wide and stride == x.shape[1] and nbytes % 16 == 0 and _FEW <= vector_count < 2**31
    written = target if current().pointer(target) % (16 if staged else item) == 0 else current().empty(*_form(target))
    if staged:
        ending = ("_bf16" if kind(x) == KINDS["bfloat16"] else "") + EARLY
        grid = -(-vector_count // (_BLOCK * _STAGED_DEPTH))
        args = [vector_count, x, kind(x), written]
        start(op, _FAMILY, f"ggml_staged_{traits.nbytes}{ending}", grid, (_BLOCK, 1), args)
    else:
        args = [count, blocks, x, stride, kind(x), int(wide), written, int(quant_type == "Q8_1")]
        lanes = 32 if traits.elements == 256 else 4
        start(op, _FAMILY, f"ggml_blocks_{traits.elements}{EARLY}", -(-count * lanes // _BLOCK), (_BLOCK, 1), args)
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
    written = target if current().pointer(target) % 16 == 0 else current().empty(*_form(target))
    args = [table, step, ids, int(ids.dtype.itemsize == 8), written, kind(target)]
    kernel = f"ggml_rows_{quant_type.lower()}"
    map_rows(op, _FAMILY, kernel, ids.size, width, True, args, depth=_LOOKUP_DEPTH, ending=EARLY)
    if written is not target:
        target[...] = written
    return target
