"""Host arrays in name only: what a call that is being captured sees instead of NumPy's.

A captured call is run once without its kernels, to learn which they are. Whatever else it did with the numbers of a
step would be done that once and never again, so nothing but a kernel may look at them: reading, writing or computing
with a `Captured` is an error at the line that tries. Arrays that are constants of the call stay NumPy's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar

import numpy as np

recorder: ContextVar[Callable | None] = ContextVar("vtlab.captured", default=None)
"""Who takes the launches of this thread or task instead of a kernel; None outside of a capture."""


class NotCapturable(RuntimeError):
    """A call that does something else with the numbers of a step than starting kernels."""


class Captured:
    """An array's form and memory. Views of it are `Captured`; its numbers are for kernels, which take `memory`."""

    __slots__ = ("memory",)
    __array_ufunc__ = None

    def __init__(self, memory: np.ndarray):
        self.memory = memory

    shape = property(lambda self: self.memory.shape)
    strides = property(lambda self: self.memory.strides)
    dtype = property(lambda self: self.memory.dtype)
    flags = property(lambda self: self.memory.flags)
    size = property(lambda self: self.memory.size)
    ndim = property(lambda self: self.memory.ndim)
    nbytes = property(lambda self: self.memory.nbytes)

    def __len__(self) -> int:
        return len(self.memory)

    def reshape(self, *shape) -> Captured:
        return self._view("reshaped into a copy", self.memory.reshape(*shape))

    def view(self, dtype) -> Captured:
        return Captured(self.memory.view(dtype))

    def __getitem__(self, index) -> Captured:
        return self._view("read by the host", self.memory[index])

    def _view(self, what: str, found) -> Captured:
        if not isinstance(found, np.ndarray) or not (np.may_share_memory(found, self.memory) or not found.size):
            raise NotCapturable(f"{self!r} is {what}")
        return Captured(found)

    def _refuse(self, *_, **__):
        raise NotCapturable(f"{self!r} is taken for an array of NumPy's")

    __array__ = __array_function__ = __setitem__ = __iter__ = __bool__ = __int__ = __float__ = __index__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"captured {self.dtype} {list(self.shape)}"


def seen(value):
    """What the call that is being captured may see of an array, or of a dataclass of them; outside, `value` itself."""
    if recorder.get() is None:
        return value
    if isinstance(value, np.ndarray):
        return Captured(value)
    found = {name: seen(part) for name, part in vars(value).items() if isinstance(part, np.ndarray)}
    return dataclasses.replace(value, **found)


def empty(shape, dtype):
    """Memory for a result: NumPy's, or in a capture what only kernels may look into."""
    return seen(np.empty(shape, dtype))


__all__ = ["Captured", "NotCapturable", "empty", "recorder", "seen"]
