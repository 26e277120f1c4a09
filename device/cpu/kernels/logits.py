"""Rows of logits: temperature, penalties, masks, softmax and its logarithm, min-p, the arg-max."""

from __future__ import annotations

import numpy as np

from ..compiling import device, kernel
from .fixed_point import INF, as_float, peak, weigh
from .lanes import lane, lanes_below, places_from, spread, spread_int, where
from .memory import address, counts, flags, get_f32, load, set_at, store
from .transcendental import log

PROBS, LOGPROBS, MIN_P = 0, 1, 2
NAN = np.float32(np.nan)


@kernel("iiaaiai")
def softmax(begin, end, x, out, width, least, what):
    """Probabilities of rows, their logarithms, or the logits of which none is below least[row] of the largest."""
    for row in range(begin, end):
        first = row * width
        top = peak(x, first, width)
        sound = abs(top) < INF
        if what == LOGPROBS:
            top = top + np.float32(0)
        total = as_float(weigh(x, first, width, top, address(out), what != LOGPROBS)) if sound else NAN
        logarithm = lane(log(spread(total)), 0) if what == LOGPROBS else total
        bound = get_f32(least, row) * (np.float32(1) / total) if what == MIN_P else total
        for i in range(0, width, 16):
            left = width - i
            if what == LOGPROBS:
                shifted = (load(x, first + i, left, 0) + np.float32(0)) - top
                store(shifted - logarithm, out, first + i, left, 0)
            else:
                share = load(out, first + i, left, 0) / total
                if what == MIN_P:
                    share = where(share < bound, -INF, load(x, first + i, left, 0))
                store(share, out, first + i, left, 0)


@kernel("iiaaaii")
def temperature(begin, end, x, out, t, width, all_random):
    """x / t, with t = 1 where t < 1e-5 unless all rows are random."""
    for row in range(begin, end):
        divisor = get_f32(t, row)
        if not all_random and divisor < np.float32(1e-5):
            divisor = np.float32(1)
        for i in range(0, width, 16):
            at, left = row * width + i, width - i
            store(load(x, at, left, 0) / divisor, out, at, left, 0)


@kernel("iiaaaaaaaai")
def penalties(begin, end, x, out, prompt, numbers, output, frequency, presence, repetition, width):
    """x' = (x > 0 ? x / rep : x * rep where seen) - freq * count - pres * output."""
    for row in range(begin, end):
        f, p, r = get_f32(frequency, row), get_f32(presence, row), get_f32(repetition, row)
        for i in range(0, width, 16):
            at, left = row * width + i, width - i
            value, made = load(x, at, left, 0), flags(output, at, left)
            scaled = where(value > np.float32(0), value / r, value * r)
            value = where(flags(prompt, at, left) | made, scaled, value)
            value = value - counts(numbers, at, left) * f
            value = value - where(made, spread(p), p * np.float32(0))
            store(value, out, at, left, 0)


@kernel("iiaaai")
def masked(begin, end, x, out, mask, width):
    """-inf where the mask is not 0."""
    for row in range(begin, end):
        for i in range(0, width, 16):
            at, left = row * width + i, width - i
            store(where(flags(mask, at, left), -INF, load(x, at, left, 0)), out, at, left, 0)


@device
def best_lane(best, places):
    """The place of the largest lane, of equals the first."""
    value, place = lane(best, 0), lane(places, 0)
    for i in range(1, 16):
        other, at = lane(best, i), lane(places, i)
        if other > value or (other == value and at < place):
            value, place = other, at
    return np.int64(place)


@kernel("iiaai")
def argmax(begin, end, x, ids, width):
    """The first largest of each row; NaN never wins, but in column 0."""
    for row in range(begin, end):
        first = row * width
        best, places = spread(-INF), spread_int(0)
        for i in range(0, width, 16):
            left = width - i
            value = load(x, first + i, left, 0)
            if left < 16:
                value = where(lanes_below(left), value, -INF)
            wins = value > best
            best, places = where(wins, value, best), where(wins, places_from(i), places)
        start = get_f32(x, first)
        set_at(np.int64(0) if start != start else best_lane(best, places), ids, row)
