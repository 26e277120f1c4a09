"""Where a forward's results go: fresh memory, or memory that stays where it is, as a captured graph needs it."""

from __future__ import annotations

from vtlab.ops.arrays import HOST, Arrays


class Fresh:
    """New memory for every result: on the host by the op itself, on a device beforehand, so that no op waits."""

    def __init__(self, arrays: Arrays):
        self._arrays = arrays

    def __call__(self, name: str, shape: tuple[int, ...], dtype) -> object | None:
        return None if self._arrays is HOST else self._arrays.empty(shape, dtype)


class Kept:
    """One array for each name and form of row, `rows` long or longer; a result of fewer rows is its beginning."""

    def __init__(self, arrays: Arrays, rows: int):
        self._arrays, self._rows = arrays, rows
        self._found: dict[tuple, object] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype) -> object:
        rows = max(self._rows, shape[0])
        key = name, (rows, *shape[1:]), dtype
        if key not in self._found:
            self._found[key] = self._arrays.empty((rows, *shape[1:]), dtype)
        return self._found[key][: shape[0]]
