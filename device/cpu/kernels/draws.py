"""The Gumbel arg-max over logits: Philox4x32-10 on lanes, then two logarithms."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic
from numba.core.typing.templates import signature

from ..compiling import device, kernel
from .lanes import F32, I32, I64, V, float32x16, lane, lanes_below, places_from, splat, spread, spread_int, where
from .logits import best_lane
from .memory import get_f32, get_i32, get_i64, load, set_at
from .transcendental import log, log1p

INF = np.float32(np.inf)
STEP = np.float32(4.6566127342e-10)


def _philox(builder, seed, offset: V) -> V:
    """Word 0 of Philox4x32-10 with key `seed`, an LLVM int64, and counters `offset`, lanes of int64."""
    low = 0xFFFFFFFF
    key = splat(builder, seed)
    k0, k1 = key & low, key.shifted_down(32)
    c0, c1 = offset & low, offset.shifted_down(32)
    c2 = c3 = c0 ^ c0
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = b.shifted_down(32) ^ (c1 ^ k0), b & low, a.shifted_down(32) ^ (c3 ^ k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0


@intrinsic
def first_word(typing, seed, offset):
    """Word 0 of Philox for one seed and one offset."""

    def generate(context, builder, sig, args):
        return _philox(builder, args[0], splat(builder, args[1])).lane(0)

    return signature(types.int64, types.int64, types.int64), generate


@intrinsic
def uniforms(typing, seed, start):
    """Float32 uniforms of word 0 at offsets start ... start + 15: the word as int32, folded, times 2^-31, nearly."""

    def generate(context, builder, sig, args):
        places = V(builder, ir.Constant(ir.VectorType(I64, 16), [I64(i) for i in range(16)]))
        word = _philox(builder, args[0], places + splat(builder, args[1])).to(I32)
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
