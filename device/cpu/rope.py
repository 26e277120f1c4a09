"""Rotary embedding from a table of cosines and sines, alone and with the paged write behind it."""

from __future__ import annotations

import numpy as np

from vtlab.ops import rotary

from .kv_cache import write_pages
from .launch import KINDS, Kernels, contiguous, delivered, provider, results
from .threads import split

K, A = Kernels("rope"), Kernels("angles")
_FLOAT32 = np.dtype(np.float32)


def _steps(x) -> tuple[int, int, int]:
    """(elements between tokens, between heads, heads) of [T, H, D]."""
    item = x.dtype.itemsize
    return x.strides[0] // item, x.strides[1] // item, x.shape[1]


@provider("rope_from_cache")
def rope_from_cache(
    q, k, positions, cos_sin_cache, *, is_neox=True, mrope_section=None, mrope_interleaved=False, rope_dim_offset=0,
    inverse=False, rounding="vt", out=None,
):  # fmt: skip
    """oracle.rope.rope_from_cache."""
    tensors = (q,) if k is None else (q, k)
    made = results("rope_from_cache", out, *((x.shape, x.dtype) for x in tensors))
    tokens, _, width = q.shape
    positions = contiguous(positions)
    kind, table_kind = KINDS[q.dtype], KINDS[cos_sin_cache.dtype]
    point = 0
    if rounding == "vllm_native" and cos_sin_cache.dtype != _FLOAT32:
        point = kind
    section = None if positions.ndim == 1 else np.array(mrope_section, np.int64)
    keys = (None, 0, 0, 0, None) if k is None else (k, *_steps(k), made[1])
    split(
        K.rope, tokens, (made[0].size + made[-1].size) * 8, q, *_steps(q), made[0], *keys, kind, cos_sin_cache,
        table_kind, cos_sin_cache.shape[1] // 2, positions, positions.dtype.itemsize == 8, tokens, section,
        bool(mrope_interleaved), width, rope_dim_offset, bool(inverse), point, bool(is_neox) + 2 * (rounding == "vllm"),
        scratch=4 * cos_sin_cache.shape[1] + 64,
    )  # fmt: skip
    return delivered(out, made)


@provider("rope_and_cache")
def rope_and_cache(q, k, v, positions, cos_sin_cache, key_cache, value_cache, slot_mapping, *, is_neox=True, out=None):
    """oracle.rope_fused.rope_and_cache."""
    made = rope_from_cache(q, k, positions, cos_sin_cache, is_neox=is_neox, out=out)
    write_pages(made[1], v, key_cache, value_cache, slot_mapping)
    return made


def _table(positions, base, rotary_dim, llama3, target) -> None:
    """[cos | sin] of each position's angles into float32 `target`."""
    inverse, positions = rotary.token_frequencies(base, rotary_dim, llama3), contiguous(positions)
    half, wide = rotary_dim // 2, positions.dtype.itemsize == 8
    split(A.rows, len(positions), target.size * 64, positions, wide, inverse, half, target)


@provider("rope_cos_sin_cache")
def rope_cos_sin_cache(positions, *, base, rotary_dim, llama3=None, out=None):
    """oracle.rope.rope_cos_sin_cache."""
    made = results("rope_cos_sin_cache", out, ((len(positions), rotary_dim), _FLOAT32))
    _table(positions, base, rotary_dim, llama3, made[0])
    return delivered(out, made)


@provider("rope_neox")
def rope_neox(q, k, positions, *, base, rotary_dim, llama3=None, out=None):
    """oracle.rope.rope_neox: a table of one row for each token, then the rotation."""
    table = np.empty((len(positions), rotary_dim), np.float32)
    _table(positions, base, rotary_dim, llama3, table)
    return rope_from_cache(q, k, np.arange(len(positions)), table, out=out)
