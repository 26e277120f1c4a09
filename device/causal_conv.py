"""The short causal convolution on a GPU: launchers of cuda/causal_conv.cu, and what causal_conv_spec shares."""

from __future__ import annotations

import math

from vtlab.ops import providers

from .early import EARLY
from .launch import KINDS, PROVIDER, VECTOR, as_rows, kind, map_rows, results, start, vectors
from .slots import check_slots, check_starts

_PRODUCTS, _SUM, _ACTIVATED = 1, 2, 4
"""Flags of cuda/conv.cuh."""
_THREADS = 64
_RUN, _BLOCKS = 8, 1056
"""The fewest tokens of a thread, and the blocks that an H200 has room for: where they run out, threads take more."""
_CHANNELS = 4 * _THREADS
_TURN, _LONGEST, _TILES = 6, {"conv": 24, "short_conv": 12}, 1980
"""A tile's tokens are turns, up to the stages of cuda/conv_tile.cuh; as many tiles as leave none of an H200 idle."""
_ROOM, _PARTS = {"conv": 1, "short_conv": 0}, {"conv": 1, "short_conv": 3}
"""Rows of a tile for what waits, and what a row has beside each other."""
_FEW, _LANES, _DOWN = 384, 64, 4
"""Rows that blocks of two channels a thread update, their threads along a row and their rows; else:"""
_ACROSS, _MOST_DOWN, _ENOUGH = 32, 2, 264
"""Threads along a row of a block, and the most rows it has: more where so many blocks remain."""
_BF16 = KINDS["bfloat16"]
_TAPS = {"conv": 4, "short_conv": 3}
"""Taps of the filters that kernels hold in registers."""


def flags_of(x, weight, silu, rounding) -> int:
    products = rounding == "vllm" and weight.dtype == x.dtype
    return _PRODUCTS * products | _SUM * (rounding == "vllm_native") | _ACTIVATED * bool(silu)


def _split(chunks: int) -> int:
    """How kernels are told what they divide their blocks' numbers by."""
    return chunks | (2**32 - 1) // chunks << 32 if chunks > 1 else 1


def _along(op, name, x, stride, weight, bias, state, state_idx, starts, fresh, flags, target):
    """Sequences of tokens: by tiles where `_TAPS` and bfloat16 allow it."""
    tokens, (width, taps) = target.shape[0], weight.shape
    if not target.size:
        return
    bias_kind, form, shared = 0 if bias is None else kind(bias), f"{name}_any", 0
    if taps == _TAPS[name] and kind(x) == _BF16 and not flags & _SUM and vectors(
        width, (x, stride), (weight, width * taps), (bias, width), (state, width * (taps - 1)), (target, width)
    ):  # fmt: skip
        across = -(-width // _CHANNELS)
        run = min(_LONGEST[name], -(-tokens * across // (_TILES * _TURN)) * _TURN)
        form = f"{name}_{taps}" + "_rounded" * bool(flags & _PRODUCTS) + EARLY
        shared = (_ROOM[name] + taps - 1 + run) * _PARTS[name] * 2 * _CHANNELS
    else:
        across = -(-width // _THREADS)
        run = max(_RUN, -(-tokens // max(1, _BLOCKS // across)))
    args = [
        _split(across), run, x, stride, kind(x), weight, kind(weight), bias, bias_kind, state, kind(state), len(state),
        state_idx, width, taps - 1, starts, len(starts) - 1, tokens, fresh, fresh.dtype.itemsize, flags, target,
    ]  # fmt: skip
    start(op, "causal_conv", form, -(-tokens // run) * across, (_THREADS, 1), args, shared)


@providers.provider("causal_conv1d_fwd", "cuda", PROVIDER)
def causal_conv1d_fwd(
    x, weight, conv_state, query_start_loc, has_initial_state, bias=None, state_idx=None, *, silu=True, rounding="vt",
    out=None,
):  # fmt: skip
    """oracle.causal_conv.causal_conv1d_fwd."""
    op = "causal_conv1d_fwd"
    inputs = (x, weight, conv_state, query_start_loc, has_initial_state, bias, state_idx)
    (target,) = results(op, out, inputs, (x.shape, x.dtype))
    check_starts(op, query_start_loc, len(x))
    check_slots(op, state_idx, len(conv_state))
    x, _, stride = as_rows(op, "x", x)
    flags = flags_of(x, weight, silu, rounding)
    where = (conv_state, state_idx, query_start_loc, has_initial_state)
    _along(op, "conv", x, stride, weight, bias, *where, flags, target)
    return target


@providers.provider("short_conv", "cuda", PROVIDER)
def short_conv(bcx, weight, conv_state, query_start_loc, has_initial_state, bias=None, *, out=None):
    """oracle.causal_conv.short_conv."""
    op, width = "short_conv", len(weight)
    inputs = (bcx, weight, conv_state, query_start_loc, has_initial_state, bias)
    (target,) = results(op, out, inputs, ((len(bcx), width), bcx.dtype))
    check_starts(op, query_start_loc, len(bcx))
    bcx, _, stride = as_rows(op, "bcx", bcx)
    where = (conv_state, None, query_start_loc, has_initial_state)
    _along(op, "short_conv", bcx, stride, weight, bias, *where, 0, target)
    return target


def update_rows(op, x, stride, weight, bias, state, state_idx, accepted, flags, target):
    """A row of one token, or of as many as `target` has."""
    rows, (width, taps) = len(target), weight.shape
    count = math.prod(target.shape[1:-1])
    bias_kind = 0 if bias is None else kind(bias)
    wide = count == 1 and accepted is None and taps == 4 and vectors(
        width, (x, stride), (weight, width * taps), (bias, width), (state, width * (taps - 1)), (target, width)
    )  # fmt: skip
    args = [
        x, stride, kind(x), weight, kind(weight), bias, bias_kind, state, kind(state), len(state), state_idx, taps - 1,
        state.shape[-1], count, accepted, flags, target,
    ]  # fmt: skip
    if not rows or not width:
        return
    brain = not flags & _SUM and all(kind(array) == _BF16 for array in (x, weight, state))
    form = "conv_rows" + ("_rounded" if flags & _PRODUCTS else "_plain") * brain
    if not wide:
        map_rows(op, "causal_conv_spec", "conv_rows", rows, width, False, args)
        return
    down = 1
    if brain and rows <= _FEW:
        each, lanes, form, down = 2, _LANES, form + EARLY, min(rows, _DOWN)
    else:
        each, lanes, form = VECTOR, _ACROSS, f"{form}_v8"
        while down < _MOST_DOWN and rows * -(-width // (VECTOR * _ACROSS)) >= 2 * down * _ENOUGH:
            down *= 2
    across, groups = -(-width // (each * lanes)), -(-rows // down)
    split = _split(groups if each == 2 else across)  # neighbouring blocks share a filter, or a row
    start(op, "causal_conv", form, across * groups, (lanes, down), [rows, width, split, *args])


@providers.provider("causal_conv1d_update", "cuda", PROVIDER)
def causal_conv1d_update(x, weight, conv_state, bias=None, state_idx=None, *, silu=True, rounding="vt", out=None):
    """oracle.causal_conv.causal_conv1d_update."""
    op = "causal_conv1d_update"
    (target,) = results(op, out, (x, weight, conv_state, bias, state_idx), (x.shape, x.dtype))
    check_slots(op, state_idx, len(conv_state))
    x, _, stride = as_rows(op, "x", x)
    update_rows(op, x, stride, weight, bias, conv_state, state_idx, None, flags_of(x, weight, silu, rounding), target)
    return target
