"""The machine code of kernels that are loaded, behind what Python calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

_TYPES = re.compile("E((?:5Array|[xfd])+)$")


class Native(NamedTuple):
    """A kernel: the letters of its arguments, as in `compiling.Kernel`, and its address."""

    letters: str
    address: int


natives: dict[Callable, Native] = {}
"""Of every kernel that is loaded, by its entry."""


def letters_of(symbol: str) -> str:
    """The letters of a kernel from its name in an object, which Numba ends with the types; "" where it does not."""
    found = _TYPES.search(symbol)
    return found[1].replace("5Array", "a").replace("x", "i") if found else ""
