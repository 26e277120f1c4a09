"""Symbols for arrays, sizes and numbers while an oracle's body is traced; what is not foreseen is refused."""

from __future__ import annotations

import numpy as np

from ..nvfp4 import pack, positive_zeros, tile
from .program import E2M1, E4M3, ELEMENT, GROUP


class NotRowwise(Exception):
    """Why a chain is no row program."""


class Count(int):
    """A size of the traced row: `times` its width, or its number of rows for times = 0."""

    times: int

    def __new__(cls, value: int, times: int):
        made = super().__new__(cls, value)
        made.times = times
        return made

    def __floordiv__(self, other):
        if self.times and self.times % other == 0:
            return Count(int(self) // other, self.times // other)
        return int(self) // other


class Number(float):
    """A number of the call."""

    name: str

    def __new__(cls, value: float, name: str):
        made = super().__new__(cls, value)
        made.name = name
        return made


class _Symbol:
    """What stands for an array: anything that is not foreseen is refused by name."""

    def __array__(self, *args, **kwargs):
        raise NotRowwise("NumPy looks at the values of an array")

    def __array_function__(self, function, types, args, kwargs):
        if function is np.where and len(args) == 3 and not kwargs and isinstance(args[0], Value):
            return args[0].tracer.stored_where(*args)
        if function is np.max and len(args) == 1 and isinstance(args[0], Value):
            return args[0].tracer.max(*args, **kwargs)
        raise NotRowwise(f"np.{function.__name__} of an array")

    def __array_ufunc__(self, function, method, *args, **kwargs):
        if function is np.isnan and isinstance(args[0], Value):
            return args[0] != args[0]
        raise NotRowwise(f"np.{function.__name__} of an array")

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Stored(_Symbol):
    """An array in a storage dtype: an operand, one half of it, or what a step has stored.

    codes: this is the array of uint8 that holds the codes of the stored `dtype`; nan: and this is the code of a NaN.
    positive: none of them is that of -0; packed: two stand in a byte; tiled: these scales stand in tiles.
    """

    def __init__(self, tracer, dtype, extent, shape, **more):
        self.tracer, self.kind, self.extent, self.shape = tracer, np.dtype(dtype), extent, shape
        self.node = self.source = self.nan = None
        self.part, self.factor, self.codes = 0, 1, False
        self.positive = self.packed = self.tiled = False
        self.__dict__.update(more)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8) if self.codes else self.kind

    def _with(self, **more) -> Stored:
        made = object.__new__(Stored)
        made.__dict__.update({**self.__dict__, **more})
        return made

    def view(self, dtype) -> Stored:
        if np.dtype(dtype) != np.uint8 or self.kind.itemsize != 1:
            raise NotRowwise(f"a view of {self.kind} as {np.dtype(dtype)}")
        return self._with(codes=True)

    def reshape(self, *shape) -> Stored:
        return self._with(shape=self.tracer.reshaped(self.extent, self.shape, shape))

    def __getitem__(self, key):
        width = self.tracer.width
        if self.source is None and self.shape[-1] == width and key == (Ellipsis, slice(None, width)):
            return self
        return half(self, key)


class Value(_Symbol):
    """Numbers in the compute dtype: node `node` of the program, seen as an array of `shape`."""

    def __init__(self, tracer, node: int, shape: tuple):
        self.tracer, self.node, self.shape = tracer, node, shape

    @property
    def extent(self) -> str:
        return self.tracer.nodes[self.node].extent

    def reshape(self, *shape) -> Value:
        return Value(self.tracer, self.node, self.tracer.reshaped(self.extent, self.shape, shape))

    def __getitem__(self, key):
        if self.extent == GROUP and key == (Ellipsis, 0):
            return Value(self.tracer, self.node, self.shape[:-1])
        raise NotRowwise(f"a part [{key}] of a computed array")

    def __gt__(self, other):
        return self.tracer.emit("gt", (self, other))

    def __lt__(self, other):
        return self.tracer.emit("lt", (self, other))

    def __ge__(self, other):
        return self.tracer.emit("ge", (self, other))

    def __le__(self, other):
        return self.tracer.emit("le", (self, other))

    def __eq__(self, other):
        return self.tracer.emit("eq", (self, other))

    def __ne__(self, other):
        return self.tracer.emit("ne", (self, other))

    __hash__ = None


class Wide(_Symbol):
    """A loaded operand of two halves: it can only be cut."""

    def __init__(self, stored: Stored):
        self.stored, self.shape = stored, stored.shape

    def __getitem__(self, key):
        return self.stored.tracer.load(half(self.stored, key))


def half(stored: Stored, key) -> Stored:
    """One of the two halves of an operand twice as wide as the row."""
    if stored.factor == 2 and isinstance(key, tuple) and len(key) == 2 and key[0] is Ellipsis:
        cut, rest = key[1], (slice(None, stored.tracer.width), slice(stored.tracer.width, None))
        if cut in rest:
            shape = (*stored.shape[:-1], stored.tracer.width)
            return stored._with(shape=shape, part=rest.index(cut), factor=1)
    raise NotRowwise(f"a part [{key}] of an array")


@positive_zeros.register
def _(codes: Stored) -> Stored:
    if not codes.codes or codes.kind.name != E2M1:
        raise NotRowwise(f"zeros of {codes.kind}")
    return codes._with(positive=True)


@pack.register
def _(codes: Stored) -> Stored:
    if codes.kind.name != E2M1 or codes.extent != ELEMENT or len(codes.shape) != 2 or not codes.positive:
        raise NotRowwise(f"codes of {codes.kind}, zeros with a sign among them, two to a byte")
    return codes._with(packed=True)


@tile.register
def _(scales: Stored) -> Stored:
    if not scales.codes or scales.kind.name != E4M3 or scales.extent != GROUP or scales.nan != 0x7F:
        raise NotRowwise(f"tiles of {scales.kind}")
    return scales._with(tiled=True)
