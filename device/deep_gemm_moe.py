"""Around DeepGEMM's grouped products, on a GPU: launchers of cuda/deep_gemm_moe.cu."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .codes import settled
from .launch import (
    KINDS,
    MULTIPROCESSORS,
    PROVIDER,
    VECTOR,
    as_rows,
    check_places,
    kind,
    map_rows,
    results,
    start,
    vectors,
)
from .quant_fp8 import CODES, divider, steps, whole_vectors, with_scales
from .runtime import current
from .scratch import scratch
from .units import unit_of

BLOCK = 128
_FAMILY = "deep_gemm_moe"
_THREADS, _WARPS, _CHUNK = 256, 8, 2048
"""Threads and warps of a block that finds places, and the choices that it sees."""
_MOST_EXPERTS = 1024
_DEEP_THREADS, _DEEP, _MANY = 64, 2, 1 << 14
"""Threads and vectors a thread of the columns' kernel for many vectors, and how many those are."""
_RESIDENT = 3 * MULTIPROCESSORS
"""Blocks of the masked activation, which share what rows there are."""
_WORDS = np.dtype(np.int32)


def _items(array) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(step // array.dtype.itemsize for step in array.strides)


@providers.provider("ep_scatter", "cuda", PROVIDER)
def ep_scatter(a, a_scale, x, x_scale, topk_ids, expert_map=None, *, num_experts, alignment=BLOCK, out=None):
    """oracle.deep_gemm_moe.ep_scatter. What lies outside of `a`, and experts that there are not, are left out."""
    arrays = a, a_scale, x, x_scale, topk_ids, expert_map
    return _scatter("ep_scatter", "ep_copy", *arrays, num_experts, alignment, out)


@providers.provider("ep_scatter_ue8m0", "cuda", PROVIDER)
def ep_scatter_ue8m0(a, a_scale, x, x_scale, topk_ids, expert_map=None, *, num_experts, alignment=BLOCK, out=None):
    """oracle.deep_gemm_moe.ep_scatter_ue8m0, as ep_scatter."""
    arrays = a, a_scale, x, x_scale, topk_ids, expert_map
    return _scatter("ep_scatter_ue8m0", "ep_copy_packed", *arrays, num_experts, alignment, out)


def _scatter(op: str, kernel: str, a, a_scale, x, x_scale, topk_ids, expert_map, num_experts, alignment, out):
    """Places of all choices, then `kernel`'s copies."""
    (tokens, choices), (rows, width) = topk_ids.shape, a.shape
    inputs = (a, a_scale, x, x_scale, topk_ids, expert_map)
    m_indices, inverse = results(op, out, inputs, ((rows,), _WORDS), ((tokens, choices), _WORDS))
    if num_experts > _MOST_EXPERTS:
        raise ContractError(op, "num_experts", num_experts, f"at most {_MOST_EXPERTS} on a GPU")
    count = tokens * choices
    if max(rows, count + (num_experts + 1) * alignment) >= 2**31:
        raise ContractError(op, "a", f"{count} choices, segments of {alignment}", "rows under 2**31")
    chunks = max(1, -(-count // _CHUNK))
    named = num_experts if expert_map is None else len(expert_map)
    head = [topk_ids, int(topk_ids.dtype.itemsize == 8), count, expert_map, named, num_experts]
    firsts, block = None, (_THREADS, 1)
    if chunks > 1:
        firsts = scratch.array("ep_scatter", (chunks, num_experts), _WORDS)
        counted = [*head, chunks, firsts, m_indices, rows]
        start(op, _FAMILY, "ep_count", chunks, block, counted, 4 * num_experts)
        start(op, _FAMILY, "ep_starts", 1, block, [num_experts, chunks, alignment, firsts], 4 * (num_experts + 1))
    placed = [*head, alignment, firsts, inverse, m_indices, rows]
    start(op, _FAMILY, "ep_place", chunks, block, placed, 4 * ((_WARPS + 1) * num_experts + 1))
    if rows and choices:
        _copy(op, kernel, a, a_scale, x, x_scale, inverse, width)
    return m_indices, inverse


def _copy(op: str, kernel: str, a, a_scale, x, x_scale, inverse, width: int) -> None:
    """Each token's bytes and scales to its rows."""
    (tokens, choices), groups = inverse.shape, x_scale.shape[1]
    x, _, stride = as_rows(op, "x", x)
    unit = 16 if unit_of((x, a), (width, stride)) == 16 else 1
    units = width // unit
    turns = -(-max(units, 1) // _THREADS)
    threads = max(32, -(-units // (32 * turns)) * 32)
    args = [inverse, choices, units, x, stride // unit, a, groups, x_scale, *_items(x_scale), a_scale, *_items(a_scale)]
    start(op, _FAMILY, f"{kernel}_{unit}", tokens, (threads, 1), args)


@providers.provider("ep_gather", "cuda", PROVIDER)
def ep_gather(a, topk_weights, inv_perm, *, out=None):
    """oracle.deep_gemm_moe.ep_gather."""
    op, (tokens, choices), (rows, width) = "ep_gather", inv_perm.shape, a.shape
    (target,) = results(op, out, (a, topk_weights, inv_perm), ((tokens, width), a.dtype))
    a, _, stride = as_rows(op, "a", a)
    wide = vectors(width, (a, stride), (target, width))
    kernel = "ep_gather_f32" if wide and kind(a) == KINDS["float32"] else "ep_gather"
    args = [choices, a, rows, stride, kind(a), topk_weights, inv_perm, target]
    map_rows(op, _FAMILY, kernel, tokens, width, wide, args)
    return target


@providers.provider("silu_mul_per_token_group_quant_fp8_colmajor", "cuda", PROVIDER)
def silu_mul_per_token_group_quant_fp8_colmajor(x, *, clamp_limit=None, alpha=1.0, beta=0.0, ue8m0=False, out=None):
    """oracle.deep_gemm_moe.silu_mul_per_token_group_quant_fp8_colmajor."""
    op, rows, half = "silu_mul_per_token_group_quant_fp8_colmajor", x.shape[0], x.shape[1] // 2
    (codes,), scale = with_scales(op, out, (x,), ((rows, half), CODES), (rows, half // BLOCK), True)
    if not codes.size:
        return codes, scale
    x, count, per_row = settled(x), rows * half // VECTOR, half // VECTOR
    if count >= 2**31:
        raise ContractError(op, "x", f"{count} vectors of {VECTOR}", "under 2**31")
    limit = np.float32(0 if clamp_limit is None else clamp_limit)
    alpha, beta = np.float32(alpha), np.float32(beta)
    args = [
        rows, per_row, x, kind(x), codes, int(whole_vectors(half, codes)), scale, *steps(op, scale), int(ue8m0),
        int(clamp_limit is not None), limit, alpha, beta, *divider(per_row),
    ]  # fmt: skip
    if count >= _MANY and kind(x) == KINDS["bfloat16"] and alpha == 1:
        start(op, _FAMILY, "silu_columns_deep", -(-count // (_DEEP_THREADS * _DEEP)), (_DEEP_THREADS, 1), args)
    else:
        start(op, _FAMILY, "silu_columns", -(-count // _THREADS), (_THREADS, 1), args)
    return codes, scale


@providers.provider("silu_mul_masked_quant", "cuda", PROVIDER)
def silu_mul_masked_quant(x, counts, codes, scale, *, ue8m0=False):
    """oracle.deep_gemm_moe.silu_mul_masked_quant: as many blocks as are at work at once, however many rows are real."""
    op, (experts, tokens, half) = "silu_mul_masked_quant", codes.shape
    check_places(op, current(), (x, counts, codes, scale))
    groups = experts * tokens * (half // BLOCK)
    if groups >= 2**31 or experts > 8 * _MOST_EXPERTS:
        raise ContractError(op, "x", f"{groups} groups of {experts} experts", f"under 2**31, of {8 * _MOST_EXPERTS}")
    if not codes.size:
        return
    x, blocks = settled(x), min(_RESIDENT, -(-groups // 16))
    args = [
        experts, tokens, half, blocks, x, kind(x), counts, codes, int(whole_vectors(half, codes)), scale,
        *_items(scale), int(ue8m0), *divider(half // BLOCK),
    ]  # fmt: skip
    kernel = "silu_masked_bf16" if kind(x) == KINDS["bfloat16"] else "silu_masked_any"
    start(op, _FAMILY, kernel, blocks, (_THREADS, 1), args, 4 * (experts + 1))
