"""A prompt through Mamba-2 one token after the other: 64 heads of 64, states of 128, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import F32, cupy_empty, cupy_normal, ours
from .bench import Bench
from .ssd_scan import N, P, arguments_of


def benches() -> Iterator[Bench]:
    T, heads, groups = 1024, 64, 8

    def make():
        import cupy

        arguments, options = arguments_of(T, heads, groups)
        state = cupy_normal(1, heads, P, N, dtype=F32)
        return (*arguments, state, cupy.asarray(np.int32([0, T]))), options, cupy_empty(T, heads, P)

    moved, flops = 4 * T * heads * P + 4 * T * groups * N + 8 * heads * P * N, 5 * T * heads * P * N
    yield Bench("ssd_loop", f"ssd_recurrent {T} {heads}x{P}", ours("ssd_recurrent", make), {}, moved, flops)
