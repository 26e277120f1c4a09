"""The Gumbel arg-max over logits: Philox4x32-10 on lanes, then two logarithms."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic
from numba.core.typing.templates import signature

from ..compiling import device, kernel
from .lanes import float32x16, float64x16, lane, lanes_below, places_from, spread, spread_int, where
from .logits import best_lane
from .memory import get_f32, get_f64, get_i32, get_i64, load, put, scratch, set_at
from .transcendental import log, log1p
from .vectors import F32, F64, I32, I64, V, splat

INF = np.float32(np.inf)
STEP = np.float32(4.6566127342e-10)
LEAST = 2.0**-1022


def _philox(builder, seed, offset: V) -> tuple[V, V]:
    """Words 0 and 1 of Philox4x32-10 with key `seed`, an LLVM int64, and counters `offset`, lanes of int64."""
    low = 0xFFFFFFFF
    key = splat(builder, seed)
    k0, k1 = key & low, key.shifted_down(32)
    c0, c1 = offset & low, offset.shifted_down(32)
    c2 = c3 = c0 ^ c0
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = b.shifted_down(32) ^ (c1 ^ k0), b & low, a.shifted_down(32) ^ (c3 ^ k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1


@intrinsic
def first_word(typing, seed, offset):
    """Word 0 of Philox for one seed and one offset."""

    def generate(context, builder, sig, args):
        return _philox(builder, args[0], splat(builder, args[1]))[0].lane(0)

    return signature(types.int64, types.int64, types.int64), generate


@intrinsic
def uniforms(typing, seed, start):
    """Float32 uniforms of word 0 at offsets start ... start + 15: the word as int32, folded, times 2^-31, nearly."""

    def generate(context, builder, sig, args):
        places = V(builder, ir.Constant(ir.VectorType(I64, 16), [I64(i) for i in range(16)]))
        word = _philox(builder, args[0], places + splat(builder, args[1]))[0].to(I32)
        return (((word < 0).where(word ^ -1, word)).to(F32) * float(STEP)).value

    return signature(float32x16, types.int64, types.int64), generate


@device
def _noise(seed, start):
    """Standard Gumbel noise: -log(-log1p(-u))."""
    u = uniforms(seed, start)
    u = where(u >= STEP, u, STEP)
    return -log(-log1p(-u))


@kernel("iiaaaaaaii")
def gumbel(begin, end, x, requests, temperatures, seeds, positions, ids, width, divided):
    """argmax of x / t + noise for each row; of x alone where t is 0 or the row is padding."""
    for row in range(begin, end):
        first, request = row * width, np.int64(get_i32(requests, row))
        t = np.float32(0) if request < 0 else get_f32(temperatures, request)
        random = t != np.float32(0)
        seed = first_word(get_i64(seeds, max(request, np.int64(0))), get_i64(positions, row))
        best, places, start = spread(-INF), spread_int(0), np.float32(0)
        for i in range(0, width, 16):
            left = width - i
            value = load(x, first + i, left, 0)
            if random:
                if divided:
                    value = value / t
                value = value + _noise(seed, i)
            if i == 0:
                start = lane(value, 0)
            if left < 16:
                value = where(lanes_below(left), value, -INF)
            wins = value > best
            best, places = where(wins, value, best), where(wins, places_from(i), places)
        set_at(np.int64(0) if start != start else best_lane(best, places), ids, row)


@intrinsic
def uniforms64(typing, seed, start):
    """Float64 uniforms of words 1 and 0 at offsets start ... start + 15, over 2^64."""

    def generate(context, builder, sig, args):
        places = V(builder, ir.Constant(ir.VectorType(I64, 16), [I64(i) for i in range(16)]))
        first, second = _philox(builder, args[0], places + splat(builder, args[1]))
        both = ((second << 32) | first).value
        return (V(builder, builder.uitofp(both, ir.VectorType(F64, 16))) * 2.0**-64).value

    return signature(float64x16, types.int64, types.int64), generate


@kernel("iiaaaaaaii")
def gumbel64(begin, end, x, requests, temperatures, seeds, positions, ids, width, divided):
    """`gumbel` with noise and sums in float64: -log(-log(u))."""
    buffer = scratch(32)
    for row in range(begin, end):
        first, request = row * width, np.int64(get_i32(requests, row))
        t = np.float32(0) if request < 0 else get_f32(temperatures, request)
        random = t != np.float32(0)
        seed = first_word(get_i64(seeds, max(request, np.int64(0))), get_i64(positions, row))
        best, place = -math.inf, np.int64(0)
        for i in range(width):
            if random and i % 16 == 0:
                put(uniforms64(seed, i), buffer, 0)
            value = get_f32(x, first + i)
            score = np.float64(value)
            if random:
                if divided:
                    score = np.float64(value / t)
                score += -math.log(-math.log(max(get_f64(buffer, i % 16), LEAST)))
            if i == 0 and score != score:
                break
            if score > best:
                best, place = score, i
        set_at(place, ids, row)
