"""W4A8's weights and scales on a GPU: launchers of cuda/w4a8.cu."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers

from .codes import WORD, spread
from .launch import PROVIDER, results
from .quant_fp8 import CODES, token_codes

_FAMILY = "w4a8"
_FACTORS = np.dtype(np.float32)


@providers.provider("w4a8_quantize_scales", "cuda", PROVIDER)
def w4a8_quantize_scales(scales, *, rounding="vllm", out=None):
    """oracle.w4a8.w4a8_quantize_scales."""
    op = "w4a8_quantize_scales"
    codes, channel = results(op, out, (scales,), (scales.shape, CODES), ((*scales.shape[:-1], 1), _FACTORS))
    if codes.size:
        token_codes(op, scales, None, rounding, False, codes, channel)
        spread(op, _FAMILY, "w4a8_eighths", codes.size, [channel.size, codes, channel])
    return codes, channel


@providers.provider("convert_packed_uint4b8_to_signed_int4", "cuda", PROVIDER)
def convert_packed_uint4b8_to_signed_int4(t, *, out=None):
    """oracle.w4a8.convert_packed_uint4b8_to_signed_int4."""
    op = "convert_packed_uint4b8_to_signed_int4"
    (target,) = results(op, out, (t,), (t.shape, WORD))
    spread(op, _FAMILY, "w4a8_signed", target.size, [t, target])
    return target


def _moved(op: str, kernel: str, b, out):
    (target,) = results(op, out, (b,), (b.shape, WORD))
    spread(op, _FAMILY, kernel, target.size, [*b.shape, b, target])
    return target


@providers.provider("cutlass_encode_and_reorder_int4b", "cuda", PROVIDER)
def cutlass_encode_and_reorder_int4b(b, *, out=None):
    """oracle.w4a8.cutlass_encode_and_reorder_int4b."""
    return _moved("cutlass_encode_and_reorder_int4b", "w4a8_encode", b, out)


@providers.provider("cutlass_decode_int4b", "cuda", PROVIDER)
def cutlass_decode_int4b(b, *, out=None):
    """oracle.w4a8.cutlass_decode_int4b."""
    return _moved("cutlass_decode_int4b", "w4a8_decode", b, out)


@providers.provider("cutlass_pack_scale_fp8", "cuda", PROVIDER)
def cutlass_pack_scale_fp8(scales, *, out=None):
    """oracle.w4a8.cutlass_pack_scale_fp8."""
    op = "cutlass_pack_scale_fp8"
    (target,) = results(op, out, (scales,), ((*scales.shape, 8), CODES))
    spread(op, _FAMILY, "w4a8_tables", scales.size, [scales, target])
    return target


@providers.provider("w4a8_dequantize", "cuda", PROVIDER)
def w4a8_dequantize(q, scales, *, out=None):
    """oracle.w4a8.w4a8_dequantize."""
    op, (rows, columns) = "w4a8_dequantize", q.shape
    (target,) = results(op, out, (q, scales), ((8 * rows, columns), CODES))
    spread(op, _FAMILY, "w4a8_weights", q.size, [columns, q, scales, target])
    return target
