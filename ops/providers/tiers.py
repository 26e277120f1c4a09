"""What may serve an op that a device lacks: the CPU's function, on shared memory or through explicit copies.

`vt-cpu-ref` calls the CPU's function on the device's own arrays, which is right on unified memory only: on a
discrete device it would follow pointers that mean nothing on the host. `copy-through` copies there and back, and
is never on unless it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np


class Backend(Protocol):
    """What the registry asks of a device's array library; the copies are needed for `copy-through` alone."""

    def unified_memory(self) -> bool:
        """Whether the host may read and write the device's arrays in place."""

    def to_host(self, value: object) -> object:
        """A device array as a NumPy copy; anything else as it is."""

    def to_device(self, value: object) -> object:
        """A NumPy array as a device copy; anything else as it is."""


def copy_through(backend: Backend, serve: Callable[[dict], object]) -> Callable:
    """result = to_device(serve(to_host(arguments))); tuples, lists and dicts are entered.

    An array that `serve` wrote to (a cache, a state) is written back to the device array it came from, and a
    result that is such an array is returned as the device array itself.
    """

    def run(**kwargs):
        moved: list[tuple[object, np.ndarray, bytes]] = []

        def fetch(value):
            host = backend.to_host(value)
            if isinstance(host, np.ndarray):
                moved.append((value, host, host.tobytes()))
            return host

        result = serve(_each(fetch, kwargs))
        for value, host, before in moved:
            if host is not value and host.tobytes() != before:
                value[...] = backend.to_device(host)
        origin = {id(host): value for value, host, _ in moved}
        return _each(lambda value: origin[id(value)] if id(value) in origin else backend.to_device(value), result)

    return run


def _each(function: Callable, tree: object) -> object:
    if isinstance(tree, dict):
        return {key: _each(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        items = [_each(function, value) for value in tree]
        return tuple(items) if isinstance(tree, tuple) else items
    return function(tree)
