"""Grow-only scratch memory, one block for each stream and purpose, safe under graph capture."""

from __future__ import annotations

import itertools
import math
import threading

import numpy as np

from .errors import DeviceError
from .runtime import Runtime, current

_APART = 256


class Scratch:
    """Blocks by (device, stream, slot): two streams never share one.

    A captured graph remembers addresses: a block that was handed out during a capture is kept for ever when it
    is outgrown, others are let go.
    """

    def __init__(self):
        self._blocks: dict[tuple, object] = {}
        self._captured: set[tuple] = set()
        self._retired: list[object] = []
        self._lock = threading.Lock()

    def take(self, slot: str, size: int, runtime: Runtime | None = None, *, zero: bool = False):
        """A uint8 array of at least `size` bytes with undefined contents, valid until the slot's next `take`.

        zero : a block is zero when it is made: for kernels that leave it so.

        Raises DeviceError where a capture is under way and the block would have to grow: call once before capturing.
        """
        runtime = runtime or current()
        key = (runtime, runtime.here(), runtime.stream(), slot)
        capturing = runtime.capturing()
        with self._lock:
            block = self._blocks.get(key)
            if block is None or block.size < size:
                if capturing:
                    raise DeviceError(f"scratch {slot!r} needs {size} bytes: call the op once before the capture")
                if key in self._captured:
                    self._retired.append(block)
                    self._captured.discard(key)
                shape = (max(size, 256),)
                block = runtime.send(np.zeros(shape, np.uint8)) if zero else runtime.empty(shape, np.uint8)
                self._blocks[key] = block
            if capturing:
                self._captured.add(key)
            return block

    def array(self, slot: str, shape: tuple[int, ...], dtype):
        """The slot's memory as an array, with undefined contents."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return self.take(slot, size)[:size].view(dtype).reshape(shape)

    def parts(self, slot: str, *sizes: int) -> list[int]:
        """Addresses of so many bytes each in the slot's memory, at multiples of 256 from its start."""
        offsets = list(itertools.accumulate((-(-size // _APART) * _APART for size in sizes), initial=0))
        base = current().pointer(self.take(slot, offsets[-1]))
        return [base + offset for offset in offsets[:-1]]


scratch = Scratch()
