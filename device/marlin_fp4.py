"""FP4 weights in Marlin's tiles on a GPU, and what prepares scales and codes: launchers of cuda/marlin_fp4.cu."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers

from . import marlin_hopper, w4a16
from .codes import settled, spread
from .fp4_product import Weights, aligned_rows, product
from .judged import judged_by_norm
from .launch import MULTIPROCESSORS, PROVIDER, VECTOR, kind, on_hopper, results, start, vectors
from .marlin_stream import Streamed
from .runtime import current
from .scratch import scratch

_FAMILY = "marlin_fp4"
_BYTES, _SHORTS, _FLOATS = np.dtype(np.uint8), np.dtype(np.int16), np.dtype(np.float32)
_EXPONENT = {"bfloat16": 119, "float16": 7}
_TEAM = 256


def _steps(arguments) -> int:
    return marlin_hopper.longest_chain(arguments["input"].shape[1])


judged_by_norm("apply_fp4_marlin_linear", steps=_steps)


@providers.provider("apply_fp4_marlin_linear", "cuda", PROVIDER)
def apply_fp4_marlin_linear(input, weight, weight_scale, weight_global_scale=None, bias=None, *, out=None):
    """oracle.marlin_fp4.apply_fp4_marlin_linear, within its norm."""
    op, shape = "apply_fp4_marlin_linear", (input.shape[0], weight_scale.shape[1])
    (target,) = results(op, out, (input, weight, weight_scale, weight_global_scale, bias), (shape, input.dtype))
    form, group = ("nvfp4", 16) if weight_global_scale is not None else ("mxfp4", 32)
    kernel = f"marlin_{form}_{'f16' if input.dtype == np.float16 else 'bf16'}"
    words, scales = settled(weight), settled(weight_scale)
    rows = aligned_rows(input)
    if target.size and on_hopper():
        tile = w4a16.CHUNK * w4a16.COLUMNS // 2 + w4a16.CHUNK * w4a16.COLUMNS // group
        tiles = Streamed(kernel, tile, words, scales, factors=weight_global_scale, bias=bias)
        marlin_hopper.product(op, _FAMILY, rows, tiles, target)
        return target
    weights = Weights(kernel, words, scales, group, factor=weight_global_scale, bias=bias)
    product(op, _FAMILY, rows, weights, target)
    return target


def _largest(op: str, scales, half: bool):
    """(The largest scale of each part, 0 where none is above it, float32 in scratch; how many parts)."""
    parts = max(1, min(-(-scales.size // (_TEAM * VECTOR)), 2 * MULTIPROCESSORS))
    largest = scratch.array("marlin largest", (parts,), _FLOATS)
    args = [scales.size, parts, scales, kind(scales), int(half), int(vectors(VECTOR, (scales, VECTOR))), largest]
    start(op, _FAMILY, "marlin_fp4_largest", parts, (_TEAM, 1), args)
    return largest, parts


@providers.provider("nvfp4_marlin_process_scales", "cuda", PROVIDER)
def nvfp4_marlin_process_scales(marlin_scales, *, scale_factor=None, a_dtype="bfloat16", out=None):
    """oracle.marlin_fp4.nvfp4_marlin_process_scales."""
    op = "nvfp4_marlin_process_scales"
    target, factor = results(op, out, (marlin_scales,), (marlin_scales.shape, _BYTES), ((1,), _FLOATS))
    lift = scale_factor is None and np.dtype(a_dtype) != np.float16
    largest, parts = _largest(op, marlin_scales, True) if lift else (None, 0)
    given = np.float32(1 if scale_factor is None else scale_factor)
    args = [target.size, marlin_scales, kind(marlin_scales), int(lift), largest, parts, given, target, factor]
    wide = vectors(VECTOR, (marlin_scales, VECTOR)) and (not target.size or current().pointer(target) % VECTOR == 0)
    blocks = max(1, -(-target.size // (_TEAM * VECTOR)))
    start(op, _FAMILY, "marlin_nvfp4_scales", blocks, (_TEAM, 1), [*args, int(wide)])
    return target, factor


@providers.provider("nvfp4_marlin_process_global_scale", "cuda", PROVIDER)
def nvfp4_marlin_process_global_scale(global_scale, *, a_dtype="bfloat16", out=None):
    """oracle.marlin_fp4.nvfp4_marlin_process_global_scale."""
    op = "nvfp4_marlin_process_global_scale"
    (target,) = results(op, out, (global_scale,), (global_scale.shape, _FLOATS))
    exponent = _EXPONENT[np.dtype(a_dtype).name]
    spread(op, _FAMILY, "marlin_nvfp4_global", target.size, [global_scale, exponent, target])
    return target


@providers.provider("mxfp4_marlin_process_scales", "cuda", PROVIDER)
def mxfp4_marlin_process_scales(marlin_scales, *, fp8_activations=False, out=None):
    """oracle.marlin_fp4.mxfp4_marlin_process_scales."""
    op = "mxfp4_marlin_process_scales"
    (target,) = results(op, out, (marlin_scales,), (marlin_scales.shape, _BYTES))
    spread(op, _FAMILY, "marlin_mxfp4_scales", target.size, [marlin_scales, int(fp8_activations), target])
    return target


@providers.provider("marlin_int4_fp8_preprocess", "cuda", PROVIDER)
def marlin_int4_fp8_preprocess(qweight, qzeros=None, *, out=None):
    """oracle.marlin_matmul.marlin_int4_fp8_preprocess."""
    op, (rows, across) = "marlin_int4_fp8_preprocess", qweight.shape
    (target,) = results(op, out, (qweight, qzeros), (qweight.shape, qweight.dtype))
    group = max(1, rows) if qzeros is None else rows // qzeros.shape[0]
    spread(op, _FAMILY, "marlin_int4_codes", target.size, [across, group, qweight, qzeros, target])
    return target


@providers.provider("marlin_act_int8_process_scales", "cuda", PROVIDER)
def marlin_act_int8_process_scales(s, *, out=None):
    """oracle.marlin_matmul.marlin_act_int8_process_scales."""
    op = "marlin_act_int8_process_scales"
    target, factor = results(op, out, (s,), (s.shape, _SHORTS), ((1,), _FLOATS))
    spread(op, _FAMILY, "marlin_int8_scales", target.size, [s, kind(s), *_largest(op, s, False), target, factor])
    return target, factor
