"""FP8 quantisers on a GPU: launchers of cuda/quant_fp8.cu."""

from __future__ import annotations

import math

import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .early import EARLY
from .launch import (
    KINDS,
    MULTIPROCESSORS,
    PROVIDER,
    VECTOR,
    as_rows,
    kind,
    map_rows,
    on_hopper,
    results,
    start,
    vectors,
)
from .runtime import current
from .scratch import scratch

RULES = {"vt": 0, "vllm": 1, "vllm_native": 2}
"""Variants as the kernels number them (fp8_scales.cuh)."""
NAN_CODES = {"vt": 0x7F, "vllm": 0x7E, "vllm_native": 0x7F}
GROUP_NAN_CODES = NAN_CODES | {"vllm": 0xFE}
CODES, SCALES = np.dtype(np.uint8), np.dtype(np.float32)
TEAM = 256
"""Threads of a block that has a row to itself, VECTOR neighbours each at a time."""
LONGEST = 4 * TEAM * VECTOR
"""Elements of a row that stays in registers."""
ROW_BLOCK = 128
"""Threads of a block of narrow rows, as the kernels know."""
FEW_ROWS = 264
"""Two rows a multiprocessor of an H200: up to here nothing but early loads hides latency."""
FEW_VECTORS, FEW_BLOCK = 1 << 16, 64
"""Under this a vector a thread, in small blocks, so that all multiprocessors share them; else several, sent for at
once."""
_STATIC_DEPTH, _TOKEN_DEPTH, _GROUP_DEPTH, _MOST_MAXIMA = 2, 4, 4, 528
_UE8M0, _FLOORED = 1, 2
_LETTERS = {KINDS["bfloat16"]: "bf16", KINDS["float16"]: "f16"}
"""What kernels that keep a tensor call its elements."""
_KEPT_TEAM, _FEW, _MANY, _STEP, _STAGES = 512, 4, 18, 2, 14
"""Threads of a block that keeps its share of a tensor; the vectors that each has in registers, of a small tensor and
of another; those of a step, and the steps in shared memory, as kept_tensor.cuh knows."""


def whole_vectors(width: int, codes, *arrays_and_strides) -> bool:
    """`vectors`, and codes that may be stored eight at a time."""
    return vectors(width, *arrays_and_strides) and (not codes.size or current().pointer(codes) % VECTOR == 0)


def start_rows(
    op: str, family: str, kernel: str, rows: int, width: int, args: list, form: str, team: int, ending: str = ""
) -> None:
    """Launch ``<kernel>_rows`` for rows of up to 256 elements, else ``<kernel>_<form>``, `team` threads a row.

    ending: of the name.
    """
    lanes = -(-width // VECTOR)
    if lanes <= 32:
        shift = (lanes - 1).bit_length()
        start(op, family, f"{kernel}_rows{ending}", -(-(rows << shift) // ROW_BLOCK), (ROW_BLOCK, 1), [*args, shift])
    else:
        start(op, family, f"{kernel}_{form}{ending}", rows, (min(team, -(-lanes // 32) * 32), 1), args)


def flat(array, rows: int, stride: int) -> tuple[int, int, int]:
    """(rows, width, stride), one row where rows follow each other."""
    width = array.shape[-1]
    return (1, rows * width, rows * width) if rows <= 1 or stride == width else (rows, width, stride)


@providers.provider("quant_fp8_static", "cuda", PROVIDER)
def quant_fp8_static(x, scale, *, rounding="vt", out=None):
    """oracle.quant_fp8.quant_fp8_static."""
    op = "quant_fp8_static"
    (target,) = results(op, out, (x, scale), (x.shape, CODES))
    static_codes(op, x, scale, NAN_CODES[rounding], target)
    return target


def static_codes(op, x, scale, nan, target) -> None:
    """Fill `target` with the codes of x under a static scale."""
    x, rows, stride = as_rows(op, "x", x)
    wide = whole_vectors(x.shape[-1], target, (x, stride))
    rows, width, stride = flat(x, rows, stride)
    kernel, ending = ("static_bf16", EARLY) if wide and kind(x) == KINDS["bfloat16"] else ("static", "")
    args = [x, stride, kind(x), scale, target, nan]
    map_rows(op, "quant_fp8", kernel, rows, width, wide, args, _STATIC_DEPTH, ending=ending)


@providers.provider("dynamic_scaled_fp8_quant", "cuda", PROVIDER)
def dynamic_scaled_fp8_quant(x, *, rounding="vt", out=None):
    """oracle.quant_fp8.dynamic_scaled_fp8_quant.

    A launch whose blocks wait for each other's maxima with their elements at hand; where these have not 16 bits, side
    by side, a launch for the maxima of blocks, and one for the codes.
    """
    op = "dynamic_scaled_fp8_quant"
    target, scale = results(op, out, (x,), (x.shape, CODES), ((1,), SCALES))
    x, rows, stride = as_rows(op, "x", x)
    wide = whole_vectors(x.shape[-1], target, (x, stride))
    rows, width, stride = flat(x, rows, stride)
    letters = _LETTERS.get(kind(x))
    if wide and rows == 1 and letters and (share := _share(width // VECTOR)) is not None:
        kernel, turns, shares, shared = share
        meeting = scratch.take("quant_fp8 meeting", 4 * (2 * MULTIPROCESSORS + 1), zero=True)
        args = [width // VECTOR, turns, shares, x, meeting, RULES[rounding], scale, target, NAN_CODES[rounding]]
        start(op, "quant_fp8", f"{kernel}_{letters}{EARLY}", shares, (_KEPT_TEAM, 1), args, shared)
        return target, scale
    step = VECTOR if wide else 1
    suffix = f"_v{step}"
    blocks = max(1, min(_MOST_MAXIMA, -(-rows * (width // step) // TEAM)))
    maxima = scratch.take("quant_fp8 maxima", 4 * blocks)
    head = [rows, width, x, stride, kind(x), maxima, blocks, RULES[rounding]]
    start(op, "quant_fp8", "tensor_maximum" + suffix, blocks, (TEAM, 1), head)
    start(op, "quant_fp8", "tensor_codes" + suffix, blocks, (TEAM, 1), [*head, scale, target, NAN_CODES[rounding]])
    return target, scale


def _share(count: int) -> tuple[str, int, int, int] | None:
    """How blocks share `count` vectors that they keep: (kernel, vectors a thread, blocks, bytes of shared memory)."""
    if not count or not on_hopper():
        return None
    shares = min(MULTIPROCESSORS, -(-count // (_KEPT_TEAM * _FEW)))
    turns = -(-count // (_KEPT_TEAM * shares))
    shares = -(-count // (_KEPT_TEAM * turns))
    if turns <= _FEW:
        return "tensor_few", turns, shares, 0
    steps = min(_STAGES, -(-max(0, turns - _MANY) // _STEP))
    return "tensor_many", turns, shares, steps * _STEP * _KEPT_TEAM * 16


@providers.provider("dynamic_per_token_scaled_fp8_quant", "cuda", PROVIDER)
def dynamic_per_token_scaled_fp8_quant(x, *, scale_ub=None, rounding="vt", out=None):
    """oracle.quant_fp8.dynamic_per_token_scaled_fp8_quant."""
    op = "dynamic_per_token_scaled_fp8_quant"
    target, scale = results(op, out, (x, scale_ub), (x.shape, CODES), ((*x.shape[:-1], 1), SCALES))
    token_codes(op, x, scale_ub, rounding, False, target, scale)
    return target, scale


def token_codes(op, x, scale_ub, rounding, int8, target, scale) -> None:
    """Fill `target` and `scale` with the codes of x and a scale a row."""
    x, rows, stride = as_rows(op, "x", x)
    width = x.shape[-1]
    wide = whole_vectors(width, target, (x, stride))
    args = [rows, width, x, stride, kind(x), scale_ub, target, scale, RULES[rounding], NAN_CODES[rounding], int(int8)]
    lanes = -(-width // VECTOR)
    if not wide or not 0 < width <= LONGEST or kind(x) != KINDS["bfloat16"]:
        start(op, "quant_fp8", f"token_v{VECTOR if wide else 1}", rows, (TEAM, 1), args)
    else:
        threads = lanes if rows <= FEW_ROWS else -(-lanes // _TOKEN_DEPTH)
        start_rows(op, "quant_fp8", "token_bf16", rows, width, args, "block", -(-threads // 32) * 32, EARLY)


def with_scales(op, out, inputs, forms, shape, column_major, more=()):
    """(results without the group scales, the group scales): forms[0] the codes, `more` what follows the scales.

    Fresh column-major scales [..., M, G] lie as [..., G, M]; given ones may lie either way.
    """
    if out is None or not isinstance(out, tuple) or len(out) != 2 + len(more):
        if out is not None:
            raise ContractError(op, "out", f"{len(out) if isinstance(out, tuple) else 1} arrays", f"{2 + len(more)}")
        swapped = column_major and len(shape) > 1
        stored = (*shape[:-2], shape[-1], shape[-2]) if swapped else shape
        codes, scale, *rest = results(op, None, inputs, forms, (stored, SCALES), *more)
        return (codes, *rest), (scale.swapaxes(-1, -2) if swapped else scale)
    scale = out[1]
    turned = scale.shape == tuple(shape) and scale.ndim > 1 and not scale.flags.c_contiguous
    if turned:
        stored = scale.swapaxes(-1, -2)
        results(op, (out[0], stored, *out[2:]), inputs, forms, (stored.shape, SCALES), *more)
    else:
        results(op, out, inputs, forms, (shape, SCALES), *more)
    return (out[0], *out[2:]), scale


def steps(op, scale) -> tuple[int, int]:
    """(between rows, between groups) of scales [..., M, G] in elements, for all rows in a row.

    Several matrices of column-major scales have no single step between their rows.
    """
    item = scale.dtype.itemsize
    if scale.flags.c_contiguous or scale.ndim == 1:
        return scale.shape[-1], 1
    if scale.ndim > 2 and math.prod(scale.shape[:-2]) > 1:
        raise ContractError(op, "column_major", f"{scale.ndim} axes on a GPU", "a matrix of scales")
    return scale.strides[-2] // item, scale.strides[-1] // item


@providers.provider("per_token_group_quant_fp8", "cuda", PROVIDER)
def per_token_group_quant_fp8(
    x, *, group_size=128, eps=1e-10, ue8m0=False, column_major=False, rounding="vt", out=None
):
    """oracle.quant_fp8.per_token_group_quant_fp8."""
    op = "per_token_group_quant_fp8"
    shape = (*x.shape[:-1], -(-x.shape[-1] // group_size))
    (target,), scale = with_scales(op, out, (x,), (x.shape, CODES), shape, column_major)
    nan = GROUP_NAN_CODES[rounding]
    group_codes(op, x, group_size, None, eps, rounding, nan, _UE8M0 * ue8m0, target, scale)
    return target, scale


def group_codes(op, x, group_size, scale_ub, eps, rounding, nan, flags, target, scale) -> None:
    """Fill `target` and `scale` with the codes of x and a scale a group."""
    x, rows, stride = as_rows(op, "x", x)
    width = x.shape[-1]
    if not rows or not width:
        return
    row_step, group_step = steps(op, scale)
    group_size = min(group_size, width)
    args = [
        rows, width, x, stride, kind(x), group_size, scale_ub, target, scale, row_step, group_step, np.float32(eps),
        RULES[rounding], nan, flags,
    ]  # fmt: skip
    count = rows * width // VECTOR
    whole = width % group_size == 0 and stride == width and count < 2**31
    if whole and fits_lanes(group_size) and whole_vectors(width, target, (x, stride)):
        bf16, many = kind(x) == KINDS["bfloat16"], count >= FEW_VECTORS
        args += [lane_shift(group_size), *divider(width // group_size)]
        if bf16 and many and group_size >= _GROUP_DEPTH * VECTOR:
            start(op, "quant_fp8", "group_bf16_deep", -(-count // (TEAM * _GROUP_DEPTH)), (TEAM, 1), args)
        else:
            block = TEAM if many else FEW_BLOCK
            start(op, "quant_fp8", "group_bf16_v8" if bf16 else "group_v8", -(-count // block), (block, 1), args)
    else:
        start_warps(op, "quant_fp8", "group_any", rows, width, group_size, args)


def divider(number: int) -> tuple[int, int]:
    """What the kernels' `whole_quotient` divides numbers under 2**31 by `number` with: a factor and a shift."""
    shift = 31 + (number - 1).bit_length()
    return (1 << shift) // number + 1, shift


def lane_shift(group_size: int) -> int:
    """log2 of the lanes that hold a group, see `fits_lanes`."""
    return (group_size // VECTOR).bit_length() - 1


def start_warps(op: str, family: str, kernel: str, rows: int, width: int, group_size: int, args: list) -> None:
    """Launch `kernel`, a warp a group; it counts groups and what a row holds in 32 bits."""
    count = rows * -(-width // group_size)
    if max(count, width + group_size) >= 2**32:
        raise ContractError(op, "group_size", f"{count} groups of {group_size}", "groups and rows under 2**32")
    start(op, family, kernel, -(-count // 8), (TEAM, 1), args)


def fits_lanes(group_size: int) -> bool:
    """Whether a group is 1, 2, 4 ... 32 lanes' vectors."""
    return group_size in (8, 16, 32, 64, 128, 256)


def floored_codes(op, x, group_size, scale_ub, rounding, target, scale) -> None:
    """`group_codes` with the least scale of the fused ops instead of eps."""
    group_codes(op, x, group_size, scale_ub, 1.0, rounding, NAN_CODES[rounding], _FLOORED, target, scale)
