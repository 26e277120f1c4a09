"""8-bit products with a scale for each stretch of k, on a GPU: launchers of cuda/fp8_blocks.cu.

Tensor cores serve as in fp8_matmul.py, where stretches are of 128.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.dtypes import dtype

from .fp8_matmul import ends_in_half
from .judged import judged_by_norm
from .launch import PROVIDER, kind, results, vectors
from .tiles import on_tensor_cores, rows_of, start_exact, start_loaded

BLOCK = 128
_ALONE, _CONTIGUOUS, _MASKED = range(3)  # as in the .cu file
_BFLOAT16, _FLOAT32 = dtype("bfloat16"), dtype("float32")


def _of_128(arguments) -> bool:
    return ends_in_half(arguments) and arguments["block_n"] == arguments["block_k"] == BLOCK


judged_by_norm("scaled_mm_block", _of_128, coarse=True)
for _op in ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"):
    judged_by_norm(_op, coarse=True)


def _product(op, a, scale_a, b, scale_b, target, blocks, first, of=_ALONE, experts=None, high=None) -> None:
    """Fill `target`. a [E?, M, K], b [E?, N, K]; blocks: (n, k) of a weight's scale; high: tokens of one expert that
    surely stand together."""
    rows, depth = a.shape[-2:]
    columns, many = b.shape[-2], b.shape[0] if b.ndim == 3 else 1
    matrices = many if of == _MASKED else 1
    if not matrices * rows * columns:
        return
    high = high or max(rows, 1)
    left, right = rows_of(a, depth), rows_of(b, depth)
    moves = vectors(columns, (target, columns))
    steps = [step // scale_a.itemsize for step in scale_a.strides[-2:]]
    args = [
        a, depth, b, depth, rows, columns, depth, blocks[1], blocks[0], int(left.words and right.words),
        scale_a, *steps, int(scale_a.dtype != _FLOAT32), scale_b, scale_b.shape[-1], int(first), of, experts, many,
        high, target, kind(target), int(moves),
    ]  # fmt: skip
    tiled = a.dtype == np.uint8 and target.dtype != _FLOAT32 and blocks == (BLOCK, BLOCK) and depth > 0
    if tiled and on_tensor_cores(left, right):
        operands = (a, matrices * rows, depth), (b, many * columns, depth)
        start_loaded(op, "fp8_blocks", "loaded_blocks", matrices, rows, high, columns, operands, args)
    else:
        kernel = "exact_e4m3_blocks" if a.dtype == np.uint8 else "exact_s8_blocks"
        start_exact(op, "fp8_blocks", kernel, matrices, rows, high, columns, args)


@providers.provider("scaled_mm_block", "cuda", PROVIDER)
def scaled_mm_block(a, b, scale_a, scale_b, *, block_n=BLOCK, block_k=BLOCK, out_dtype=_BFLOAT16, out=None):
    """oracle.fp8_blocks.scaled_mm_block."""
    op = "scaled_mm_block"
    (target,) = results(op, out, (a, b, scale_a, scale_b), ((a.shape[0], b.shape[0]), dtype(out_dtype)))
    _product(op, a, scale_a, b, scale_b, target, (block_n, block_k), False)
    return target


@providers.provider("fp8_gemm_nt", "cuda", PROVIDER)
def fp8_gemm_nt(a, scale_a, b, scale_b, *, out=None):
    """oracle.fp8_blocks.fp8_gemm_nt."""
    op = "fp8_gemm_nt"
    (target,) = results(op, out, (a, scale_a, b, scale_b), ((a.shape[0], b.shape[0]), _BFLOAT16))
    _product(op, a, scale_a, b, scale_b, target, (BLOCK, BLOCK), True)
    return target


@providers.provider("m_grouped_fp8_gemm_nt_contiguous", "cuda", PROVIDER)
def m_grouped_fp8_gemm_nt_contiguous(a, scale_a, b, scale_b, m_indices, *, alignment=BLOCK, out=None):
    """oracle.fp8_blocks.m_grouped_fp8_gemm_nt_contiguous."""
    op = "m_grouped_fp8_gemm_nt_contiguous"
    (target,) = results(op, out, (a, scale_a, b, scale_b, m_indices), ((a.shape[0], b.shape[1]), _BFLOAT16))
    high = alignment & -alignment  # a power of two, so that tiles of one height or another never span two experts
    _product(op, a, scale_a, b, scale_b, target, (BLOCK, BLOCK), True, _CONTIGUOUS, m_indices, high)
    return target


@providers.provider("m_grouped_fp8_gemm_nt_masked", "cuda", PROVIDER)
def m_grouped_fp8_gemm_nt_masked(a, scale_a, b, scale_b, masked_m, *, out=None):
    """oracle.fp8_blocks.m_grouped_fp8_gemm_nt_masked."""
    op = "m_grouped_fp8_gemm_nt_masked"
    form = ((*a.shape[:2], b.shape[1]), _BFLOAT16)
    (target,) = results(op, out, (a, scale_a, b, scale_b, masked_m), form)
    _product(op, a, scale_a, b, scale_b, target, (BLOCK, BLOCK), True, _MASKED, masked_m)
    return target
