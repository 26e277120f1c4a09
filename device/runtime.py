"""Where kernels run: CuPy's device, unless `using` puts another runtime in its place, as the emulation does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Protocol

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

    def stream(self) -> int:
        """The current stream, as a handle."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    def read(self, array: object) -> object:
        """The array on the host; waits for the current stream."""

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
