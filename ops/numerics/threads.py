"""Independent pieces of work over the cores of this machine; which core takes which piece changes no byte."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

_WORTH_IT = 1 << 20  # multiply-adds from which starting threads pays
_here = threading.local()


def parallel(run: Callable[[object], None], pieces: Sequence, work: int) -> None:
    """run(piece) for every piece; on several threads where there is `work` enough, never threads within threads."""
    workers = min(len(pieces), _cores())
    if workers < 2 or work < _WORTH_IT or getattr(_here, "inside", False):
        for piece in pieces:
            run(piece)
        return

    def strand(first: int) -> None:
        _here.inside = True
        for piece in pieces[first::workers]:
            run(piece)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(strand, range(workers)))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
