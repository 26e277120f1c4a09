"""What is wrong with indices that only the device knows, found before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .launch import start
from .runtime import current
from .scratch import scratch

_NONE = 2**63 - 1
_THREADS = 256


def first_fault(op: str, family: str, kernel: str, count: int, args: Sequence) -> int | None:
    """The lowest number that `kernel`, a thread for each of `count`, notes; None where it notes none.

    The call waits for the device. In a capture it must not: None, and the kernels leave out what does not fit.
    """
    runtime = current()
    if not count or runtime.capturing():
        return None
    lowest = scratch.array("faults", (1,), np.int64)
    start(op, "elementwise", "set_i64", 1, (1, 1), [lowest, _NONE])
    start(op, family, kernel, -(-count // _THREADS), (_THREADS, 1), [count, *args, lowest])
    found = int(runtime.read(lowest)[0])
    return None if found == _NONE else found
