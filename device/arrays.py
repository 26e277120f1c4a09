"""The arrays of a GPU behind the interfaces of `vtlab.ops.arrays` and of the providers' `copy-through`."""

from __future__ import annotations

import numpy as np

from .graphs import GraphCache
from .runtime import Runtime, current


class DeviceArrays:
    """Arrays of the current device, on `queue()` or whatever stream is current."""

    device = "cuda"

    def __init__(self, runtime: Runtime | None = None):
        self._runtime = runtime or current()

    def empty(self, shape, dtype):
        return self._runtime.empty(shape, dtype)

    def zeros(self, shape, dtype):
        array = self._runtime.empty(shape, dtype)
        self._runtime.zero(array)
        return array

    def send(self, host):
        return self._runtime.send(host)

    def fetch(self, array):
        return self._runtime.read(array)

    def staging(self, size):
        return self._runtime.pinned(size)

    def upload(self, host, target):
        self._runtime.upload(host, target)

    def queue(self):
        return self._runtime.queue()

    def graphs(self):
        return GraphCache(runtime=self._runtime)

    def unified_memory(self) -> bool:
        """Never: a NumPy function cannot take these arrays, even where the GPU shares the host's memory."""
        return False

    def to_host(self, value):
        """A copy as a NumPy array; anything but an array of the device as it is."""
        there = hasattr(value, "strides") and not isinstance(value, np.generic) and type(value) is not np.ndarray
        return self._runtime.read(value) if there else value

    def to_device(self, value):
        """A NumPy array's copy on the device; anything else as it is."""
        return self._runtime.send(value) if type(value) is np.ndarray else value
