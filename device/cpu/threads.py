"""Pieces of one kernel's work over the cores of this process; which thread takes which piece changes no byte.

The kernels release the interpreter's lock. `VTLAB_THREADS` sets the number of threads; it is that of the cores which
the process may use otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from vtlab.ops.captured import recorder
from vtlab.ops.errors import ContractError
from vtlab.ops.numerics.threads import cores

_PIECES, _SMALL = 4, 1 << 23  # pieces for each thread, so that none waits long for another; half of them below
_busy = threading.Lock()
_workers: list[_Worker] = []
_count = 0


def threads() -> int:
    """How many threads a call may use."""
    global _count
    if not _count:
        text = os.environ.get("VTLAB_THREADS", "")
        if text and not (text.isdigit() and int(text)):
            raise ContractError("", "VTLAB_THREADS", repr(text), "a positive number")
        _count = int(text or cores())
    return _count


@contextlib.contextmanager
def using(count: int) -> Iterator[None]:
    """Run with another number of threads."""
    global _count
    before, _count = threads(), count
    try:
        yield
    finally:
        _count = before


class _Worker:
    """A thread that sleeps until it is handed something to run."""

    def __init__(self):
        self.start, self.done = threading.Lock(), threading.Lock()
        self.start.acquire()
        self.done.acquire()
        self.job: Callable[[], None] | None = None
        self.error: BaseException | None = None
        threading.Thread(target=self._loop, name="vtlab-cpu", daemon=True).start()

    def _loop(self) -> None:
        while True:
            self.start.acquire()
            try:
                self.job()
            except BaseException as error:
                self.error = error
            self.done.release()

    def wait(self) -> None:
        self.done.acquire()
        error, self.error = self.error, None
        if error is not None:
            raise error


class _Scratch(threading.local):
    """Memory that a thread uses again and again: fresh pages cost more than many a kernel."""

    held = np.empty(0, np.uint8)

    def of(self, size: int) -> np.ndarray:
        if len(self.held) < size:
            self.held = np.empty(size, np.uint8)
        return self.held


_scratch = _Scratch()


def _run(kernel: Callable, begin: int, end: int, args: tuple, scratch: int) -> None:
    if scratch:
        kernel(begin, end, *args, _scratch.of(scratch))
    else:
        kernel(begin, end, *args)


def split(kernel: Callable, count: int, cost: int, *args, grain: int = 1, scratch: int = 0) -> None:
    """kernel(begin, end, *args) over items 0 ... count, in pieces of whole `grain`s where `cost` is worth it.

    cost : work of all items, in float32 operations or bytes; below _WORTH_IT one thread takes all.
    scratch : bytes of memory that the kernel gets as one more argument, each thread its own, of unspecified content.
    In a capture the launch is recorded, and nothing runs.
    """
    if count <= 0:
        return
    if (record := recorder.get()) is not None:
        record(kernel, count, cost, args, grain, scratch)
        return
    if cost < _WORTH_IT or count <= grain or threads() < 2:
        _run(kernel, 0, count, args, scratch)
        return
    team = threads()
    pieces = team * (_PIECES if cost > _SMALL else _PIECES // 2)
    step = -(-count // (pieces * grain)) * grain
    starts = itertools.count(0, step)

    def job(_: int) -> None:
        for begin in starts:  # shared: a thread that is free takes the next piece
            if begin >= count:
                return
            _run(kernel, begin, min(begin + step, count), args, scratch)

    together(job, job, min(team, -(-count // step)))


def together(lead: Callable[[int], None], follow: Callable[[int], None], team: int) -> None:
    """lead(0) here while other threads do follow(1) ... follow(team - 1), unless others have the threads."""
    if team < 2 or not _busy.acquire(blocking=False):
        lead(0)
        return
    try:
        while len(_workers) < team - 1:
            _workers.append(_Worker())
        workers = _workers[: team - 1]
        for place, worker in enumerate(workers, 1):
            worker.job = partial(follow, place)
            worker.start.release()
        try:
            lead(0)
        finally:
            for worker in workers:
                worker.wait()
    finally:
        _busy.release()


_WORTH_IT = 1 << 19


def _forget() -> None:
    global _busy
    _workers.clear()  # a child has none of the parent's threads
    _busy = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
