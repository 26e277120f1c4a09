"""Captured calls on the host: what they launch, recorded once, runs in one native call from then on.

The twin of CUDA graphs, behind the same cache (`device.graphs.GraphCache`): a recorded launch is the address of its
machine code and a block of its arguments, and everything that differs from step to step stands in arrays that stay
where they are.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextvars import Token
from typing import NamedTuple

import numpy as np

from vtlab.ops import captured
from vtlab.ops.arrays import HOST
from vtlab.ops.captured import Captured, NotCapturable
from vtlab.ops.providers import registry
from vtlab.ops.providers.steering import steered

from ..errors import DeviceError
from ..graphs import GraphCache
from .launch import Kernels, installed
from .natives import Native, natives
from .threads import threads, together

K, A = Kernels("replay"), Kernels("adapters")
_CROWDED = 31
"""The most runs without helpers before they are tried again."""
_LEAST, _MOST, _PIECES = 1 << 15, 1 << 20, 4
"""What a piece costs at least and at most, in the units of `split`, and pieces for each thread in between."""


class Launch(NamedTuple):
    """One `split` of a recorded call."""

    kernel: Native
    count: int
    cost: int
    args: tuple
    grain: int
    scratch: int


class Plan:
    """Recorded launches in the form that `kernels.replay` reads, with all arrays whose addresses stand there.

    `launches` are kept for who wants to look; `team` threads take the pieces of the large ones.
    """

    def __init__(self, launches: Sequence[Launch], team: int):
        self.launches, self.team = tuple(launches), team
        self._control, self._alone, self._crowded = np.zeros(32, np.int64), 0, 0
        self._scratch = np.empty((team, -(-max([0, *(one.scratch for one in launches)]) // 4096) * 4096), np.uint8)
        blocks = [packed(one) for one in launches]
        self._blocks = np.frombuffer(b"".join(blocks), np.uint8).copy()
        at = self._blocks.__array_interface__["data"][0]
        self._table = np.zeros((len(launches), K.ROW), np.int64)
        for row, one, block in zip(self._table, launches, blocks):
            call = natives[getattr(A, f"of_{one.kernel.letters}" + "_scratch" * (one.scratch > 0))].address
            row[:6] = call, one.kernel.address, at, one.count, *self._cut(one)
            at += len(block)

    def _cut(self, one: Launch) -> tuple[int, int]:
        """(items in a piece, pieces)"""
        pieces = max(1, min(self.team * _PIECES, one.cost // _LEAST), one.cost // _MOST) if self.team > 1 else 1
        step = -(-one.count // (pieces * one.grain)) * one.grain
        return step, -(-one.count // step)

    def run(self) -> None:
        """All launches, on what their arrays hold now.

        After a run whose helpers lost their cores to others come some without helpers, twice as many each time.
        """
        control, table, scratch = self._control, self._table, self._scratch
        control[:] = 0
        together(
            lambda _: K.lead(control, table, len(table), scratch[0]),
            lambda place: K.follow(control, table, scratch[place]),
            1 if self._alone else self.team,
        )
        if self._alone:
            self._alone -= 1
        elif control[K.LATE]:
            self._alone = self._crowded = min(2 * self._crowded + 1, _CROWDED)
        else:
            self._crowded //= 2


def packed(one: Launch) -> bytes:
    """The arguments after begin and end, 8 bytes each."""
    parts = []
    for letter, value in zip(one.kernel.letters[2:], one.args):
        if letter == "a":
            parts.append(struct.pack("=q", 0 if value is None else value.__array_interface__["data"][0]))
        elif letter == "i":
            parts.append(struct.pack("=q", int(value)))
        else:
            parts.append(struct.pack("=d" if letter == "d" else "=f4x", value))
    return b"".join(parts)


class HostRuntime:
    """What `GraphCache` asks of a machine, for calls over NumPy arrays."""

    def __init__(self):
        self._launches: list[Launch] = []
        self._token: Token | None = None

    def here(self) -> tuple:
        """What a plan depends on besides its arrays: the threads, and which providers serve."""
        return threads(), steered(), registry.generation

    def stream(self) -> int:
        return 0

    def pointer(self, array: np.ndarray) -> int:
        return array.__array_interface__["data"][0]

    def wait(self) -> None:
        """A replay is over when it returns."""

    def begin_capture(self) -> None:
        """From here on launches of this thread are recorded and not run."""
        if captured.recorder.get() is not None:
            raise DeviceError("a capture is under way: one at a time")
        self._launches = []
        self._token = captured.recorder.set(self._record)

    def _record(self, entry: Callable, count: int, cost: int, args: tuple, grain: int, scratch: int) -> None:
        plain = tuple([one.memory if isinstance(one, Captured) else one for one in args])
        self._launches.append(Launch(natives[entry], count, cost, plain, grain, scratch))

    def end_capture(self) -> Plan:
        """What was recorded, for as many threads as a call may use now."""
        captured.recorder.reset(self._token)
        launches, self._launches = self._launches, []
        return Plan(launches, threads())

    def replay(self, plan: Plan) -> None:
        plan.run()


class HostGraphs(GraphCache):
    """Plans by key and arrays. A call that cannot be captured runs as it is every time; `refused` says why, by key."""

    def __init__(self, capacity: int = 64):
        super().__init__(capacity, HostRuntime())
        self.refused: dict[Hashable, str] = {}
        self._eager: set[tuple] = set()
        _all.add(self)

    def run(self, key: Hashable, call: Callable[[], object], arrays: Sequence = ()) -> None:
        """As `GraphCache.run`; a call that looks at its numbers with NumPy is called instead of replayed."""
        where = self.runtime.here(), key
        if where in self._eager:
            call()
            return

        def guarded() -> None:
            try:
                call()
            except Exception as error:
                if captured.recorder.get() is None or isinstance(error, NotCapturable):
                    raise
                raise NotCapturable(f"{type(error).__name__}: {error}") from error

        try:
            super().run(key, guarded, arrays)
        except NotCapturable as why:
            self._eager.add(where)
            self.refused[key] = str(why)


_all: weakref.WeakSet[HostGraphs] = weakref.WeakSet()


def graphs() -> HostGraphs | None:
    """A place for plans; None where Numba, which serves what they are made of, is not there."""
    return HostGraphs() if installed(registry.device_provider_caps("cpu")) else None


def _forget() -> None:
    for one in tuple(_all):
        one._lock = threading.RLock()  # a thread that the child does not have may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
HOST.captures = graphs
