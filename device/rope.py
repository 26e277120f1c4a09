"""Rotary embedding on a GPU: launchers of cuda/rope.cu.

A position outside of the cache is only known on the device. Without `out` a call waits for the device to look and
raises ContractError before anything is written; with `out` it must not wait, so that it can be captured: the rotated
lanes of such a token become NaN. `rope_build_cache` takes no tensor and stays on the host: send its table over once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vtlab.ops import providers, rotary

from .errors import DeviceError
from .launch import KINDS, PROVIDER, kind, results, start
from .rope_posts import (
    AXES,
    FUSED,
    GPTJ,
    INTERLEAVED,
    INVERSE,
    heads_of,
    posts,
    refuse_bad_positions,
    takes_vectors,
    variant,
    wide_ids,
)
from .runtime import current

_FLOAT32 = np.dtype(np.float32)
_THREADS = 256
_SHARED = 48 << 10  # bytes that a block gets without opting in
_frequencies: dict[tuple, object] = {}


def _inverse_frequencies(base: float, rotary_dim: int, llama3: Mapping | None):
    """The float64 frequencies on the current device; made on the host at the first call and kept.

    Raises DeviceError where that first call is being captured.
    """
    runtime = current()
    scaling = None if llama3 is None else tuple(sorted((key, float(llama3[key])) for key in rotary.LLAMA3))
    key = (runtime, runtime.here(), float(base), rotary_dim, scaling)
    found = _frequencies.get(key)
    if found is None:
        if runtime.capturing():
            raise DeviceError("rope's frequencies are not on the device yet: call the op once before the capture")
        found = runtime.send(rotary.token_frequencies(base, rotary_dim, llama3))
        runtime.wait()  # whatever stream asks next finds them there
        _frequencies[key] = found
    return found


def _operands(q, k, written: tuple) -> tuple[list, list]:
    """(the heads of q and k, what the kernels take for them and for their results)."""
    found = [heads_of(q)] + ([] if k is None else [heads_of(k)])
    args = [*found[0].args, written[0], q.shape[1]]
    args += [0, 0, 0, 0, 0] if k is None else [*found[1].args, written[1], k.shape[1]]
    return found, args


def _forms(q, k) -> list:
    return [(q.shape, q.dtype)] + ([] if k is None else [(k.shape, k.dtype)])


@providers.provider("rope_from_cache", "cuda", PROVIDER)
def rope_from_cache(
    q, k, positions, cos_sin_cache, *, is_neox=True, mrope_section=None, mrope_interleaved=False,
    rope_dim_offset=0, inverse=False, rounding="vt", out=None,
):  # fmt: skip
    """oracle.rope.rope_from_cache."""
    op, (tokens, _, width), (rows, rotary_dim) = "rope_from_cache", q.shape, cos_sin_cache.shape
    written = results(op, out, (q, k, positions, cos_sin_cache), *_forms(q, k))
    if out is None:
        refuse_bad_positions(op, "rope", positions, rows)
    half = rotary_dim // 2
    flags = GPTJ * (not is_neox) + INVERSE * bool(inverse) + FUSED * (rounding == "vllm")
    bounds = [0, 0]
    if positions.ndim == 2:
        flags += AXES + INTERLEAVED * bool(mrope_interleaved)
        time, height, across = (int(count) for count in mrope_section)
        bounds = [3 * height, 3 * across] if mrope_interleaved else [time, time + height]
    unrounded = rounding != "vllm_native" or cos_sin_cache.dtype == _FLOAT32
    product = KINDS["float32"] if unrounded else kind(q)
    found, args = _operands(q, k, written)
    wide = takes_vectors(half, width, rope_dim_offset, cos_sin_cache, found, list(written))
    name, most = variant(wide, q.dtype, flags, product)
    heads = sum(array.shape[1] for array in written)
    grid, block, lanes = posts(tokens, heads, width, half, wide, most)
    args = [
        tokens, *lanes, *args, width, half, rope_dim_offset, kind(q), flags, product, positions, wide_ids(positions),
        cos_sin_cache, kind(cos_sin_cache), rows, *bounds,
    ]  # fmt: skip
    start(op, "rope", f"rope_cached_{name}", grid, block, args)
    return written[0] if k is None else written


@providers.provider("rope_neox", "cuda", PROVIDER)
def rope_neox(q, k, positions, *, base, rotary_dim, llama3=None, out=None):
    """oracle.rope.rope_neox; declines heads whose angles outgrow a block's shared memory."""
    op, (tokens, _, width), half = "rope_neox", q.shape, rotary_dim // 2
    if 8 * half > _SHARED:
        return NotImplemented
    written = results(op, out, (q, k, positions), *_forms(q, k))
    if out is None:
        refuse_bad_positions(op, "rope", positions, None)
    found, args = _operands(q, k, written)
    wide = takes_vectors(half, width, 0, None, found, list(written))
    name, most = variant(wide, q.dtype, 0, KINDS["float32"])
    grid, block, lanes = posts(tokens, q.shape[1] + k.shape[1], width, half, wide, most)
    args = [
        tokens, *lanes, *args, width, half, 0, kind(q), 0, KINDS["float32"], positions, wide_ids(positions),
        _inverse_frequencies(base, rotary_dim, llama3),
    ]  # fmt: skip
    start(op, "rope", f"rope_angles_{name}", grid, block, args, block[1] // lanes[0] * 8 * half)
    return written


@providers.provider("rope_cos_sin_cache", "cuda", PROVIDER)
def rope_cos_sin_cache(positions, *, base, rotary_dim, llama3=None, out=None):
    """oracle.rope.rope_cos_sin_cache."""
    op, tokens, half = "rope_cos_sin_cache", len(positions), rotary_dim // 2
    (target,) = results(op, out, (positions,), ((tokens, rotary_dim), _FLOAT32))
    if out is None:
        refuse_bad_positions(op, "rope", positions, None)
    args = [tokens, half, positions, wide_ids(positions), _inverse_frequencies(base, rotary_dim, llama3), target]
    start(op, "rope", "cos_sin_rows", -(-tokens * half // _THREADS), (_THREADS, 1), args)
    return target
