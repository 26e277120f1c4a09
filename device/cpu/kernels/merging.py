"""Two partial results of attention, merged by their log-sums."""

from __future__ import annotations

import numpy as np

from ..compiling import device, kernel
from .lanes import lane, spread
from .memory import get_f32, load, set_at, store
from .transcendental import exp, log

INF = np.float32(np.inf)


@device
def _lowered(lse):
    """FlashAttention-2's +inf of an empty row as -inf."""
    return -INF if lse == INF else lse


@kernel("iiaiiaaiiaaaiiiiii")
def merge(
    begin, end, prefix, p_token, p_head, p_lse, suffix, s_token, s_head, s_lse, out, lse, kind, heads, tokens, width,
    merged, zeros,
):  # fmt: skip
    """Rows begin ... end = (token, head); tokens from `merged` on have no prefix. `zeros`: what an empty row gives."""
    for row in range(begin, end):
        t, h = row // heads, row % heads
        a, b = t * p_token + h * p_head, t * s_token + h * s_head
        at = h * tokens + t
        first, second = _lowered(get_f32(p_lse, at)), _lowered(get_f32(s_lse, at))
        top = first if first >= second or first != first else second
        none = top == -INF
        base = np.float32(0) if none else top
        p, s = lane(exp(spread(first - base)), 0), lane(exp(spread(second - base)), 0)
        total = p + s
        under = np.float32(1) if none else total
        p, s = p / under, s / under
        for i in range(0, width, 16):
            left = width - i
            value = load(suffix, b + i, left, kind)
            if t < merged:
                before = load(prefix, a + i, left, kind)
                value = before * p + value * s
                if none:
                    value = spread(np.float32(0)) if zeros else before
            store(value, out, row * width + i, left, kind)
        result = get_f32(s_lse, at)
        if t < merged:
            result = -INF if none else lane(log(spread(total)), 0) + base
        set_at(result, lse, at)
