"""The arrays of a GPU behind the interface of `vtlab.ops.arrays`."""

from __future__ import annotations

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
