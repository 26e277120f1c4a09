"""What a quantised linear has in its files: names, shapes, dtypes, and values that mean something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vtlab.ops.errors import FormatError
from vtlab.ops.numerics import round_to

FLOATS = ("float32", "bfloat16", "float16")
WORDS, BYTES, E4M3 = ("int32",), ("uint8",), ("float8_e4m3fn",)
_NO_NUMBER = 0x7F


@dataclass(frozen=True)
class Stored:
    """A tensor of a linear. A shape of () is one number, which files also write as [1]."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    optional: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape == self.shape or (self.shape == () and shape == (1,))

    def __str__(self) -> str:
        return f"shape {self.shape}" if self.shape else "one number"


@dataclass(frozen=True)
class Site:
    """A linear of a model: its name in the file, and W's shape [rows, columns]. Refusals name all of it."""

    file: str | Path
    module: str
    rows: int
    columns: int

    def error(self, suffix: str, got: object, want: object, file: str | Path | None = None) -> FormatError:
        name = f"{self.module}.{suffix}" if suffix else self.module
        return FormatError(file or self.file, None, name, got, want)

    def divides(self, suffix: str, what: str, size: int, value: int) -> None:
        """Refuse a size that `value` is no multiple of."""
        if size < 1 or value % size:
            raise self.error(suffix, f"{what} {value}", f"a multiple of {size}")


@dataclass(frozen=True, eq=False)
class Part:
    """A linear's tensors by what follows its name; each is checked for shape and dtype before one is read."""

    site: Site
    tensors: Mapping[str, np.ndarray]
    files: Mapping[str, str | Path]

    @property
    def rows(self) -> int:
        return self.site.rows

    @property
    def columns(self) -> int:
        return self.site.columns

    def error(self, suffix: str, got: object, want: object) -> FormatError:
        return self.site.error(suffix, got, want, self.files.get(suffix))

    def get(self, suffix: str) -> np.ndarray | None:
        return self.tensors.get(suffix)

    def scales(self, suffix: str, dtype: str | np.dtype = np.float32) -> np.ndarray:
        """Positive finite numbers, rounded once to `dtype`; refused where one is none, or is none there."""
        data = np.asarray(self.tensors[suffix])
        kept = data.astype(np.float32) if data.dtype != np.float32 else data
        kept = kept if np.dtype(dtype) == np.float32 else round_to(kept.astype(np.float64), dtype)
        wide = kept.astype(np.float32)
        wrong = ~(np.isfinite(wide) & (wide > 0))
        if wrong.any():
            raise self.error(suffix, f"a scale of {data.reshape(-1)[wrong.reshape(-1)][0]}", "positive finite scales")
        return np.ascontiguousarray(kept)

    def scale(self, suffix: str) -> np.ndarray:
        """One positive finite number, float32 [1]."""
        return self.scales(suffix).reshape(1)

    def codes(self, suffix: str) -> np.ndarray:
        """The bytes of e4m3 numbers; refused where one is a NaN."""
        data = np.ascontiguousarray(self.tensors[suffix]).view(np.uint8)
        if (data & 0x7F == _NO_NUMBER).any():
            raise self.error(suffix, "a NaN", "numbers")
        return data

    def block_scales(self, suffix: str) -> np.ndarray:
        """The bytes of e4m3 scales, of which a block of zeros has 0; refused where one is a NaN or below zero."""
        data = self.codes(suffix)
        if (data > 0x80).any():
            raise self.error(suffix, "a scale below zero", "scales from 0 on")
        return data & np.uint8(0x7F)
