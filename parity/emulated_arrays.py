"""A GPU's arrays without a GPU: NumPy memory that ops take for CuPy's, on the emulated runtime, graphs included."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from vtlab.device import DeviceError, runtime
from vtlab.device.arrays import DeviceArrays

from .emulation import EmulatedRuntime


class Array(np.ndarray):
    """Host memory that `ops` dispatches to the CUDA tier."""

    def copy(self, order="C"):
        """New memory of the device, which a capture does not give."""
        fresh = runtime.current().empty(self.shape, self.dtype)
        fresh[...] = self
        return fresh


Array.__module__ = "cupy.emulated"


class RecordingRuntime(EmulatedRuntime):
    """The emulated runtime with arrays of a device's type. What is launched during a capture runs at the replay."""

    def __init__(self):
        super().__init__()
        self._recorded: list[Callable[[], None]] = []
        self.waited = self.uploads = self.reads = self.sends = 0

    def empty(self, shape, dtype):
        if self.in_capture:
            raise DeviceError("memory asked for during a capture")
        array = super().empty(shape, dtype).view(Array)
        array.view(np.uint8)[...] = 0xA5  # as little a zero as anything
        return array

    def do(self, work: Callable[[], None]) -> None:
        """Work for the current stream."""
        if self.in_capture:
            self._recorded.append(work)
        else:
            work()

    def launch(self, *launch) -> None:
        self.do(lambda: super(RecordingRuntime, self).launch(*launch))

    def send(self, host):
        self.sends += 1
        array = self.empty(host.shape, host.dtype)
        array[...] = host
        return array

    def pinned(self, size):
        return super().empty((size,), np.uint8)

    def upload(self, host, target) -> None:
        self.uploads += 1
        self.do(lambda: np.copyto(target, host))

    def zero(self, array) -> None:
        self.do(lambda: array.view(np.uint8).fill(0))

    def read(self, array):
        if self.in_capture:
            raise DeviceError("a host read during a capture")
        self.reads += 1
        return super().read(array)

    def wait(self) -> None:
        self.waited += 1

    def queue(self):
        return runtime.using(self)

    def begin_capture(self) -> None:
        if self.in_capture:
            raise DeviceError("a capture is under way")
        self.in_capture, self._recorded = True, []

    def end_capture(self):
        if not self.in_capture:
            raise DeviceError("no capture is under way")
        self.in_capture = False
        return self._recorded

    def replay(self, graph) -> None:
        for work in graph:
            self.do(work)


@contextlib.contextmanager
def emulated_arrays():
    """Arrays of an emulated GPU, whose runtime is in force inside."""
    machine = RecordingRuntime()
    with runtime.using(machine):
        yield DeviceArrays(machine), machine
