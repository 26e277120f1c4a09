"""Around DeepGEMM's grouped products, on a GPU: launchers of cuda/deep_gemm_moe.cu."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .codes import settled
from .early import EARLY
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
_THREADS, _WARPS, _CHUNK = 256, 8, 1024
"""Threads and warps of a block that finds places, and the choices that it sees."""
_MOST_EXPERTS = 1024
_DEEP = ((1 << 19, 4, 64), (1 << 16, 2, 128), (0, 1, 64))
"""Columns of bfloat16: vectors from which on a lane has so many, and threads of a block."""
_WHOLE = 8 * _CHUNK
"""Choices up to which one kernel does it all."""
_GATHERED = 128
"""Threads of a block that gathers."""
_ROWS = 1024
"""Rows of m_indices that a block writes where one kernel does it all."""
_MASKED_THREADS, _RESIDENT = 128, 7 * MULTIPROCESSORS
"""Threads of a block of the masked activation, and blocks, which share what rows there are."""
_WORDS = np.dtype(np.int32)


class _Scatter(NamedTuple):
    """The kernels that copy rows to the places that others found, and that do it all."""

    copy: str
    whole: str


_FLOATS, _EXPONENTS = _Scatter("ep_copy", "ep_whole"), _Scatter("ep_copy_packed", "ep_whole_packed")


def _items(array) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(step // array.dtype.itemsize for step in array.strides)


@providers.provider("ep_scatter", "cuda", PROVIDER)
def ep_scatter(a, a_scale, x, x_scale, topk_ids, expert_map=None, *, num_experts, alignment=BLOCK, out=None):
    """oracle.deep_gemm_moe.ep_scatter. What lies outside of `a`, and experts that there are not, are left out."""
    arrays = a, a_scale, x, x_scale, topk_ids, expert_map
    return _scatter("ep_scatter", _FLOATS, *arrays, num_experts, alignment, out)


@providers.provider("ep_scatter_ue8m0", "cuda", PROVIDER)
def ep_scatter_ue8m0(a, a_scale, x, x_scale, topk_ids, expert_map=None, *, num_experts, alignment=BLOCK, out=None):
    """oracle.deep_gemm_moe.ep_scatter_ue8m0, as ep_scatter."""
    arrays = a, a_scale, x, x_scale, topk_ids, expert_map
    return _scatter("ep_scatter_ue8m0", _EXPONENTS, *arrays, num_experts, alignment, out)


def _scatter(op: str, kernels: _Scatter, a, a_scale, x, x_scale, topk_ids, expert_map, num_experts, alignment, out):
    """Places of all choices, then copies, or both at once."""
    (tokens, choices), rows = topk_ids.shape, a.shape[0]
    inputs = (a, a_scale, x, x_scale, topk_ids, expert_map)
    m_indices, inverse = results(op, out, inputs, ((rows,), _WORDS), ((tokens, choices), _WORDS))
    if num_experts > _MOST_EXPERTS:
        raise ContractError(op, "num_experts", num_experts, f"at most {_MOST_EXPERTS} on a GPU")
    count = tokens * choices
    if max(rows, count + (num_experts + 1) * alignment) >= 2**31:
        raise ContractError(op, "a", f"{count} choices, segments of {alignment}", "rows under 2**31")
    chunks = -(-count // _CHUNK)
    named = num_experts if expert_map is None else len(expert_map)
    head = [topk_ids, int(topk_ids.dtype.itemsize == 8), count, expert_map, named, num_experts]
    if count <= _WHOLE:
        _whole(op, kernels.whole, head, alignment, inverse, m_indices, a, a_scale, x, x_scale)
        return m_indices, inverse
    block, counts = (_THREADS, 1), scratch.array("ep_scatter", (chunks, num_experts), _WORDS)
    counted = [*head, chunks, counts, m_indices, rows]
    start(op, _FAMILY, f"ep_count{EARLY}", chunks, block, counted, 4 * num_experts)
    placed = [*head, chunks, alignment, counts, inverse, m_indices, rows]
    start(op, _FAMILY, f"ep_place{EARLY}", chunks, block, placed, 4 * ((_WARPS + 2) * num_experts + 1))
    if rows:
        name, units, moved = _moved(op, kernels.copy, a, a_scale, x, x_scale)
        threads = max(32, -(-units // (32 * -(-max(units, 1) // _THREADS))) * 32)
        start(op, _FAMILY, name, tokens, (threads, 1), [inverse, choices, units, *moved])
    return m_indices, inverse


def _moved(op: str, kernel: str, a, a_scale, x, x_scale) -> tuple[str, int, list]:
    """`kernel` for the unit that bytes can be moved in, how many those are, and what else copies are told."""
    width = a.shape[1]
    x, _, stride = as_rows(op, "x", x)
    unit = 16 if unit_of((x, a), (width, stride)) == 16 else 1
    scales = [x_scale.shape[1], x_scale, *_items(x_scale), a_scale, *_items(a_scale)]
    return f"{kernel}_{unit}{EARLY}", width // unit, [x, stride // unit, a, *scales]


def _whole(op: str, kernel: str, head: list, alignment: int, inverse, m_indices, a, a_scale, x, x_scale) -> None:
    """Few choices: places and copies by one kernel, where there are few tokens several blocks each."""
    (tokens, choices), rows = inverse.shape, a.shape[0]
    name, units, moved = _moved(op, kernel, a, a_scale, x, x_scale)
    parts = max(1, min(choices, MULTIPROCESSORS // max(tokens, 1)))
    args = [*head, alignment, inverse, m_indices, rows, tokens, parts, choices, units, *moved]
    blocks = tokens * parts + -(-rows // _ROWS)
    start(op, _FAMILY, name, blocks, (_THREADS, 1), args, 4 * (3 * head[-1] + 1))


@providers.provider("ep_gather", "cuda", PROVIDER)
def ep_gather(a, topk_weights, inv_perm, *, out=None):
    """oracle.deep_gemm_moe.ep_gather."""
    op, (tokens, choices), (rows, width) = "ep_gather", inv_perm.shape, a.shape
    (target,) = results(op, out, (a, topk_weights, inv_perm), ((tokens, width), a.dtype))
    a, _, stride = as_rows(op, "a", a)
    wide = vectors(width, (a, stride), (target, width))
    kernel = "ep_gather_f32" if wide and kind(a) == KINDS["float32"] else "ep_gather"
    args = [choices, a, rows, stride, kind(a), topk_weights, inv_perm, target]
    map_rows(op, _FAMILY, kernel, tokens, width, wide, args, most=_GATHERED, ending=EARLY)
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
    limit, alpha, beta = np.float32(0 if clamp_limit is None else clamp_limit), np.float32(alpha), np.float32(beta)
    head = [codes, int(whole_vectors(half, codes)), scale, *steps(op, scale), int(ue8m0), int(clamp_limit is not None)]
    if kind(x) == KINDS["bfloat16"] and alpha == 1 and not beta.view(np.int32):
        deep, lanes = next((each, lanes) for least, each, lanes in _DEEP if count >= least)
        threads = -(-rows // deep) * per_row
        args = [rows, per_row, x, *head, int(limit.view(np.int32)), *divider(per_row)]
        start(op, _FAMILY, f"silu_columns_bf16_{deep}{EARLY}", -(-threads // lanes), (lanes, 1), args)
    else:
        args = [rows, per_row, x, kind(x), *head, limit, alpha, beta, *divider(per_row)]
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
    x, deep = settled(x), 2 if kind(x) == KINDS["bfloat16"] and half // BLOCK % 2 == 0 else 1
    kernel = f"silu_masked_bf16_{deep}" if kind(x) == KINDS["bfloat16"] else "silu_masked_any"
    blocks = min(_RESIDENT, -(-groups // (deep * _MASKED_THREADS // 16)))
    args = [
        experts, tokens, half // BLOCK, blocks, x, kind(x), counts, codes, int(whole_vectors(half, codes)), scale,
        *_items(scale), int(ue8m0), *divider(half // BLOCK // deep),
    ]  # fmt: skip
    start(op, _FAMILY, kernel + EARLY, blocks, (_MASKED_THREADS, 1), args, 4 * (experts + 1))
