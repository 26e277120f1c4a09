"""Where kernels run: CuPy's device, unless `using` puts another runtime in its place, as the emulation does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Protocol

import numpy as np

_chosen: ContextVar[Runtime | None] = ContextVar("vtlab.device.runtime", default=None)
_default: Runtime | None = None


class Runtime(Protocol):
    """What launchers ask of the machine. Pointers and streams are plain integers."""

    def empty(self, shape: tuple[int, ...], dtype) -> object:
        """A fresh C-contiguous array."""

    def pointer(self, array: object) -> int:
        """The address of the array's first element."""

    def place(self, array: object) -> object:
        """The device the array lives on; all arrays of a call must share it, and it must be `here()`."""

    def here(self) -> object:
        """The current device."""

    def shared_memory(self) -> int:
        """Bytes of shared memory that a block of the current device may have."""

    def capability(self) -> tuple[int, int]:
        """(major, minor) compute capability of the current device."""

    def stream(self) -> int:
        """The current stream, as a handle."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    def read(self, array: object) -> object:
        """The array on the host; waits for the current stream."""

    def send(self, host: np.ndarray) -> object:
        """A copy of a host array on the current device, in order with the current stream."""

    def pinned(self, size: int) -> np.ndarray:
        """`size` bytes of host memory that the device reads by itself."""

    def upload(self, host: np.ndarray, target: object) -> None:
        """Copy pinned bytes into an array of as many on the current stream; does not wait."""

    def zero(self, array: object) -> None:
        """Set the bytes of a contiguous array to zero on the current stream."""

    def wait(self) -> None:
        """Return when the current stream has done all its work."""

    def queue(self) -> contextlib.AbstractContextManager:
        """Inside, the current stream is one of this device's that can be captured; the same one every time."""

    def begin_capture(self) -> None:
        """From here to `end_capture`, launches on the current stream are recorded and not run; nothing may allocate.

        Raises DeviceError where a capture is under way already or the stream cannot be captured.
        """

    def end_capture(self) -> object:
        """What was recorded, as a graph; DeviceError without a `begin_capture`."""

    def replay(self, graph: object) -> None:
        """Run what a graph recorded, on the current stream."""

    def tensor_map(self, address: int, width: int, rows: int, stride: int, high: int) -> np.void:
        """What the copy engine is told of a matrix of bytes, as `tensor_maps.tensor_map` has it: 128 bytes by value."""

    def launch(self, family: str, kernel: str, grid: int, block: tuple[int, int], shared: int, args: Sequence) -> None:
        """Start the kernel on the current stream. Integers are passed as 64 bits, NumPy scalars as they are."""


def current() -> Runtime:
    """The runtime in force; DeviceError that says what is missing where there is none."""
    global _default
    if (chosen := _chosen.get()) is not None:
        return chosen
    if _default is None:
        from .cupy_runtime import CupyRuntime

        _default = CupyRuntime()
    return _default


@contextlib.contextmanager
def using(runtime: Runtime) -> Iterator[None]:
    """Launch through `runtime` inside, in this thread or task."""
    token = _chosen.set(runtime)
    try:
        yield
    finally:
        _chosen.reset(token)
