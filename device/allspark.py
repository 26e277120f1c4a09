"""AllSpark's weights of 8 bits on a GPU, and products with them: launchers of cuda/allspark.cu."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers

from .codes import settled, spread
from .judged import judged_by_norm
from .launch import PROVIDER, kind, results, start, vectors
from .runtime import current
from .w4a16 import NAMES

_FAMILY = "allspark"
_BYTES = np.dtype(np.uint8)
_FORMS = ((1, 1, 4), (2, 1, 3), (4, 2, 3))
"""(eights of rows, 32s of columns, copies under way) of the products' kernels, as in the .cu file."""
_PARTS = 8
judged_by_norm("allspark_w8a16_gemm")


@providers.provider("allspark_repack_weight", "cuda", PROVIDER)
def allspark_repack_weight(qweight, scale, zero_point=None, *, out=None):
    """oracle.allspark.allspark_repack_weight."""
    op, (k, n) = "allspark_repack_weight", qweight.shape
    width = -(-n // 32) * 32
    beside = [each for each in (scale, zero_point) if each is not None]
    forms = ((width, k), _BYTES), *(((1, width), each.dtype) for each in beside)
    made = results(op, out, (qweight, *beside), *forms)
    packed = made[0] if made[0].size == 0 or current().pointer(made[0]) % 4 == 0 else current().empty(*forms[0])
    spread(op, _FAMILY, "allspark_pack", width * k // 4, [k, n, qweight, packed])
    if packed is not made[0]:
        made[0][...] = packed
    for each, target in zip(beside, made[1:]):
        spread(op, _FAMILY, "allspark_spread", width, [n, each, target])
    return made


@providers.provider("allspark_unpack_weight", "cuda", PROVIDER)
def allspark_unpack_weight(qweight, scale, *, n, out=None):
    """oracle.allspark.allspark_unpack_weight."""
    op, k = "allspark_unpack_weight", qweight.shape[1]
    codes, factors = results(op, out, (qweight, scale), ((k, n), _BYTES), ((1, n), scale.dtype))
    spread(op, _FAMILY, "allspark_unpack", k * n, [k, n, qweight, codes])
    spread(op, _FAMILY, "allspark_gather", n, [scale, factors])
    return codes, factors


@providers.provider("allspark_w8a16_gemm", "cuda", PROVIDER)
def allspark_w8a16_gemm(a, b_qweight, b_scales, *, n, out=None):
    """oracle.allspark.allspark_w8a16_gemm, within its norm."""
    op, (rows, depth), padded = "allspark_w8a16_gemm", a.shape, b_qweight.shape[0]
    (target,) = results(op, out, (a, b_qweight, b_scales), ((rows, n), a.dtype))
    if not target.size:
        return target
    eights, wide, stages = next((form for form in _FORMS if rows <= 8 * form[0]), _FORMS[-1])
    high, across, teams = 8 * eights, 32 * wide, _PARTS
    stage, sums = high * 128 + wide * 2048, high * (across + 4) * 4
    while teams > 1 and sums + teams * stages * stage > current().shared_memory():
        teams //= 2
    args = [
        rows, n, padded, depth, settled(a), settled(b_qweight), settled(b_scales), target,
        int(vectors(n, (target, n))),
    ]  # fmt: skip
    grid = -(-rows // high) * -(-padded // across)
    name = f"allspark_{NAMES[kind(a)]}_{eights}"
    start(op, _FAMILY, name, grid, (32 * teams, 1), args, sums + teams * stages * stage)
    return target
