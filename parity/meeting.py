"""A kernel whose two items meet: what makes a race between a launch and the next one happen every time."""

from __future__ import annotations

import numpy as np

from vtlab.device.cpu.compiling import kernel
from vtlab.device.cpu.kernels.memory import address, set_at
from vtlab.device.cpu.kernels.replay import load_acquire, take, ticks

LONG, MOMENT = 1 << 24, 1 << 15  # in ticks: when a thread gives up that the other comes; longer than a small launch


@kernel("iiaa")
def meeting(begin, end, arrived, out):
    """Who comes first waits for the other and is done; who comes second dawdles, then writes what `out` shall be."""
    for _ in range(begin, end):
        first, since = take(address(arrived), 0) == 0, ticks()
        if first:
            while load_acquire(address(arrived), 0) < 2 and ticks() - since < LONG:
                pass
        else:
            while ticks() - since < MOMENT:
                pass
            set_at(np.int64(1), address(out), 0)
