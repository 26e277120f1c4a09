"""Where arrays live: what code over `ops` needs of a device's array library beyond the ops themselves.

``arrays.on("cuda")`` gives the arrays of the current GPU; ops run where their arrays are. NumPy's are here, a device
tier registers its own.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from .capabilities import Device
from .dispatch import bring_in
from .errors import ContractError


class Graphs(Protocol):
    """Calls kept as graphs, which replay without a host between their kernels."""

    def run(self, key: Hashable, call: Callable[[], object], arrays: Sequence) -> None:
        """Do `call()`: run and capture it the first time, replay it for the same key and the same `arrays`. Where a
        call cannot be captured, `refused`, if there is one, says why by key, and it is run every time.

        Everything that `call` reads or writes must stay where it is, and its ops must be given `out`.
        """


class Arrays(Protocol):
    """One device's arrays."""

    device: str

    def empty(self, shape: tuple[int, ...], dtype) -> object:
        """A C-contiguous array with undefined contents, 16-byte aligned."""

    def zeros(self, shape: tuple[int, ...], dtype) -> object:
        """A C-contiguous array of zeros."""

    def send(self, host: np.ndarray) -> object:
        """The host array's values there."""

    def fetch(self, array: object) -> np.ndarray:
        """The array's values on the host, once everything that was started has written them."""

    def staging(self, size: int) -> np.ndarray:
        """`size` host bytes that `upload` reads without a copy; change them only after a `fetch`."""

    def upload(self, host: np.ndarray, target: object) -> None:
        """target = host, a staging array of the same size in bytes; the host does not wait."""

    def queue(self) -> AbstractContextManager:
        """Inside, work is started on a queue of these arrays' own, which a graph can be captured from."""

    def graphs(self) -> Graphs | None:
        """A place for graphs, which go when it goes; None where nothing can be captured."""


class HostArrays:
    """NumPy: nothing is sent. captures : makes the tier's place for captured calls, None without such a tier."""

    device = "cpu"
    captures: Callable[[], Graphs | None] | None = None

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    def zeros(self, shape, dtype):
        """Large ones in memory that the system maps: a page is there from its first write on. NumPy's may be recycled
        by the C library, which then writes zeros to all of it."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size < _MAPPED:
            return np.zeros(shape, kind)
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        return np.frombuffer(mmap.mmap(-1, size, **private), kind).reshape(shape)

    def send(self, host):
        return host

    def fetch(self, array):
        return array

    def staging(self, size):
        return np.empty(size, np.uint8)

    def upload(self, host, target):
        target[...] = host

    def queue(self):
        return contextlib.nullcontext()

    def graphs(self):
        bring_in(self.device)
        return None if self.captures is None else self.captures()


_MAPPED = 1 << 16  # bytes
HOST = HostArrays()
_LIBRARIES: dict[str, Callable[[], Arrays]] = {"cpu": lambda: HOST}


def register(device: str, library: Callable[[], Arrays]) -> None:
    """Name the array library of `device`; called at the first `on`, when the device must be there."""
    _LIBRARIES[Device(device)] = library


def on(device: str) -> Arrays:
    """The arrays of `device`.

    Errors: ContractError for a device that no tier serves; that tier's own error where the device is not there.
    """
    bring_in(device)
    if device not in _LIBRARIES:
        raise ContractError("arrays", "device", repr(device), "one of " + ", ".join(_LIBRARIES))
    return _LIBRARIES[device]()


def of(device: str | Arrays) -> Arrays:
    """`on(device)` for a name; arrays as they are."""
    return on(device) if isinstance(device, str) else device
