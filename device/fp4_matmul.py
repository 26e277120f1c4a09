"""Products of NVFP4 and of MXFP4 on a GPU: launchers of cuda/fp4_matmul.cu.

A value under its block's scale has at most six significant bits, so that bfloat16 tensor cores multiply exactly what
the contracts do; they sum in an order of their own. What ends in float32 would show that order, and K that are no
multiples of 32 fit no copy: those are summed in the mirror's order, once codes are unpacked to memory, by `matmul_bt`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops import providers
from vtlab.ops.dtypes import dtype

from .fp4 import dequantize_nvfp4
from .fp4_product import aligned_rows, in_rows, on_tensor_cores, product
from .fp4_tiles import loads, tiled_product, turned
from .judged import judged_by_norm
from .launch import PROVIDER, VECTOR, kind, results, start
from .matmul import matmul_bt
from .scratch import scratch

_BFLOAT16, _FLOAT32, _FAMILY = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), "fp4_matmul"
_GROUP = {"nvfp4": 16, "mxfp4": 32}
_BLOCK = 256


def _wanted(arguments) -> np.dtype:
    return arguments["x"].dtype if arguments["out_dtype"] is None else dtype(arguments["out_dtype"])


def _weights_alone(x, wanted) -> bool:
    return x.dtype == _BFLOAT16 and on_tensor_cores(x.shape[1], wanted)


judged_by_norm("cutlass_scaled_fp4_mm", lambda call: on_tensor_cores(2 * call["a"].shape[1], dtype(call["out_dtype"])))
judged_by_norm("matmul_mxf4_bf16_tn", lambda call: on_tensor_cores(2 * call["a"].shape[1], _BFLOAT16))
for _op in ("matmul_nvfp4", "matmul_mxfp4"):
    judged_by_norm(_op, lambda call: _weights_alone(call["x"], _wanted(call)))


def _expanded(op: str, form: str, slot: str, codes, scales, tiled: bool, turned: bool = False):
    """bfloat16 values [rows, K] in scratch, exact; turned: in the order that `tiled_product` takes them in."""
    rows, depth = codes.shape[0], 2 * codes.shape[1]
    held = scratch.array(slot, (rows, depth), _BFLOAT16)
    count = rows * depth // VECTOR
    args = [count, depth // _GROUP[form], codes, scales, int(tiled), held, int(turned)]
    start(op, _FAMILY, f"{form}_values", -(-count // _BLOCK), (_BLOCK, 1), args)
    return held


def _weights(op: str, kernel: str, form: str, depth: int, codes, scales, tiled: bool, factor):
    return in_rows(op, kernel, codes, scales, _GROUP[form], tiled, factor, loads(depth))


def _product(op: str, x, weights, out) -> None:
    """out = x by the weights on tensor cores."""
    x = aligned_rows(x)
    if loads(x.shape[1]):
        tiled_product(op, _FAMILY, turned(op, _FAMILY, x), weights, out)
    else:
        product(op, _FAMILY, x, weights, out)


def _both(op: str, form: str, a, b, scale_a, scale_b, alpha, tiled: bool, wanted, out):
    """alpha * sum_k a * b of codes in rows [M, K / 2] and [N, K / 2]."""
    inputs = a, b, scale_a, scale_b, alpha
    (target,) = results(op, out, inputs, ((a.shape[0], b.shape[0]), wanted))
    if not target.size:
        return target
    depth = 2 * a.shape[1]
    on_cores = on_tensor_cores(depth, wanted)
    tiles = on_cores and loads(depth)
    left = _expanded(op, form, "fp4 left", a, scale_a, tiled, tiles)
    if on_cores:
        weights = _weights(op, form, form, depth, b, scale_b, tiled, alpha)
        (tiled_product if tiles else product)(op, _FAMILY, left, weights, target)
        return target
    right = _expanded(op, form, "fp4 right", b, scale_b, tiled)
    sums = scratch.array("fp4 sums", target.shape, _FLOAT32)
    matmul_bt(left, right, out_dtype=_FLOAT32, out=sums)
    args = [target.size, sums, alpha, target, kind(target)]
    start(op, _FAMILY, "fp4_scaled", -(-target.size // _BLOCK), (_BLOCK, 1), args)
    return target


@providers.provider("cutlass_scaled_fp4_mm", "cuda", PROVIDER)
def cutlass_scaled_fp4_mm(
    a, b, block_scale_a, block_scale_b, alpha, *, out_dtype=_BFLOAT16, is_sf_swizzled_layout=True, out=None
):
    """oracle.fp4_matmul.cutlass_scaled_fp4_mm."""
    op, wanted = "cutlass_scaled_fp4_mm", dtype(out_dtype)
    return _both(op, "nvfp4", a, b, block_scale_a, block_scale_b, alpha, is_sf_swizzled_layout, wanted, out)


@providers.provider("matmul_mxf4_bf16_tn", "cuda", PROVIDER)
def matmul_mxf4_bf16_tn(a, b, a_sf, b_sf, alpha, *, is_sf_swizzled_layout=True, out=None):
    """oracle.mxfp4.matmul_mxf4_bf16_tn."""
    return _both("matmul_mxf4_bf16_tn", "mxfp4", a, b, a_sf, b_sf, alpha, is_sf_swizzled_layout, _BFLOAT16, out)


@providers.provider("matmul_nvfp4", "cuda", PROVIDER)
def matmul_nvfp4(x, b, block_scale_b, global_scale, *, out_dtype=None, is_sf_swizzled_layout=True, out=None):
    """oracle.fp4_matmul.matmul_nvfp4."""
    op, wanted = "matmul_nvfp4", x.dtype if out_dtype is None else dtype(out_dtype)
    (target,) = results(op, out, (x, b, block_scale_b, global_scale), ((x.shape[0], b.shape[0]), wanted))
    if not target.size:
        return target
    if _weights_alone(x, wanted):
        layout = is_sf_swizzled_layout
        weights = _weights(op, "nvfp4_rounded", "nvfp4", x.shape[1], b, block_scale_b, layout, global_scale)
        _product(op, x, weights, target)
        return target
    held = scratch.array("fp4 right", (b.shape[0], x.shape[1]), _BFLOAT16)
    dequantize_nvfp4(b, block_scale_b, global_scale, is_sf_swizzled_layout=is_sf_swizzled_layout, out=held)
    return matmul_bt(x, held, out_dtype=wanted, out=target)


@providers.provider("matmul_mxfp4", "cuda", PROVIDER)
def matmul_mxfp4(x, b, b_sf, *, out_dtype=None, is_sf_swizzled_layout=True, out=None):
    """oracle.mxfp4.matmul_mxfp4."""
    op, wanted = "matmul_mxfp4", x.dtype if out_dtype is None else dtype(out_dtype)
    (target,) = results(op, out, (x, b, b_sf), ((x.shape[0], b.shape[0]), wanted))
    if not target.size:
        return target
    if _weights_alone(x, wanted):
        weights = _weights(op, "mxfp4", "mxfp4", x.shape[1], b, b_sf, is_sf_swizzled_layout, None)
        _product(op, x, weights, target)
        return target
    held = _expanded(op, "mxfp4", "fp4 right", b, b_sf, is_sf_swizzled_layout)
    return matmul_bt(x, held, out_dtype=wanted, out=target)
