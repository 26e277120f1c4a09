"""Calls as CUDA graphs: captured once for each set of arrays, replayed from then on."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from vtlab.ops.errors import ContractError

from .runtime import Runtime, current


@dataclass(frozen=True, eq=False)
class _Entry:
    """A graph, and what it must not outlive: the call with all that it holds, and the arrays that name it."""

    graph: object
    call: Callable[[], object]
    arrays: tuple


def capture(call: Callable[[], object], runtime: Runtime | None = None) -> object:
    """A graph of what `call()` launches on the current stream; nothing of it runs.

    An error inside ends the capture, throws what was recorded away and leaves the stream as it was. Raises DeviceError
    where something allocates, scratch would have to grow or another capture is under way.
    """
    runtime = runtime or current()
    runtime.begin_capture()
    try:
        call()
    except BaseException:
        with contextlib.suppress(Exception):  # an operation that a capture forbids has ended it already
            runtime.end_capture()
        raise
    return runtime.end_capture()


class GraphCache:
    """Graphs by key, device and stream, and by address, shape, strides and dtype of the arrays that name a call.

    A graph remembers addresses, so other arrays make another graph; those of a graph are kept alive with it, so that
    no other array can take their place unnoticed. Of more than `capacity` graphs the one that was used longest ago
    goes. `captures` and `replays` count.
    """

    def __init__(self, capacity: int = 64, runtime: Runtime | None = None):
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ContractError("GraphCache", "capacity", repr(capacity), "an integer of at least 1")
        self.capacity = capacity
        self.captures = self.replays = 0
        self.runtime = runtime
        self._entries: OrderedDict[tuple, _Entry] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def run(self, key: Hashable, call: Callable[[], object], arrays: Sequence = ()) -> None:
        """Do `call()`: the first time by running it, which loads kernels and grows scratch, then by its graph.

        `arrays` are those whose replacement must not go unnoticed; None among them counts as itself. A replay runs
        the kernels again on what the arrays hold then. Errors: those of `call`, and those of `capture`, after which
        the call has run and nothing is kept.
        """
        runtime = self.runtime or current()
        name = (runtime, runtime.here(), runtime.stream(), key, *(_signature(runtime, array) for array in arrays))
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None:
                self._entries.move_to_end(name)
                self.replays += 1
                runtime.replay(entry.graph)
                return
            call()
            self._entries[name] = _Entry(capture(call, runtime), call, tuple(arrays))
            self.captures += 1
            if len(self._entries) > self.capacity:
                runtime.wait()  # it may still run
                self._entries.popitem(last=False)

    def invalidate(self, key: Hashable | None = None) -> int:
        """Throw away the graphs of `key`, or all: the call changed in what no array says. How many there were."""
        with self._lock:
            gone = [name for name in self._entries if key is None or name[3] == key]
            if gone:
                (self.runtime or current()).wait()
            for name in gone:
                del self._entries[name]
            return len(gone)


def _signature(runtime: Runtime, array) -> tuple | None:
    if array is None:
        return None
    return runtime.pointer(array), tuple(array.shape), tuple(array.strides), array.dtype
