"""Independent pieces of work over the cores of this machine; which core takes which piece changes no byte."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

_WORTH_IT = 1 << 20  # multiply-adds from which handing work to threads pays
_here = threading.local()
_pools: dict[int, ThreadPoolExecutor] = {}


def parallel(run: Callable[[object], None], pieces: Sequence, work: int) -> None:
    """run(piece) for every piece; on several threads where there is `work` enough, never threads within threads."""
    workers = min(len(pieces), cores())
    if workers < 2 or work < _WORTH_IT or getattr(_here, "inside", False):
        for piece in pieces:
            run(piece)
        return

    waiting = iter(pieces)  # shared: a thread that is free takes the next one

    def strand() -> None:
        _here.inside = True
        try:
            for piece in waiting:
                run(piece)
        finally:
            _here.inside = False

    others = [_pool(workers - 1).submit(strand) for _ in range(1, workers)]
    try:
        strand()
    finally:
        for other in others:
            other.result()


def _pool(threads: int) -> ThreadPoolExecutor:
    """The pool that is kept for this number of threads; they sleep between calls."""
    if threads not in _pools:
        _pools.setdefault(threads, ThreadPoolExecutor(threads, thread_name_prefix="vtlab"))
    return _pools[threads]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # a child has the pool, but none of its threads


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
