"""A position in the header that never leaves the file: every read is checked before it happens."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import numpy as np

from vtlab.ops.errors import FormatError

from . import limits

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


def shown(name: str) -> str:
    """`name` quoted for an error message, cut where a hostile one would fill the screen."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


class Cursor:
    """Little-endian reads from `buffer`, in order.

    `strings_left` and `arrays_left` are what remains of the file's budgets for items of arrays.
    """

    def __init__(self, buffer: mmap.mmap | bytes, file: str | Path):
        self.buffer, self.file = buffer, file
        self.position = 0
        self.limit = min(len(buffer), limits.HEADER_BYTES)
        self.strings_left, self.arrays_left = limits.ARRAY_STRINGS, limits.NESTED_ARRAYS

    def error(self, field: str, got: object, want: object, at: int | None = None) -> FormatError:
        return FormatError(self.file, self.position if at is None else at, field, got, want)

    def require(self, nbytes: int, field: str) -> None:
        """Refuse unless `nbytes` more bytes lie before the end of the file and of the header cap."""
        if nbytes > self.limit - self.position:
            if self.limit < len(self.buffer):
                raise self.error(field, f"{nbytes} bytes", f"a header of at most {limits.HEADER_BYTES} bytes")
            raise self.error(field, f"{self.limit - self.position} bytes before the end of the file", f"{nbytes} bytes")

    def number(self, form: struct.Struct, field: str) -> int | float:
        self.require(form.size, field)
        (value,) = form.unpack_from(self.buffer, self.position)
        self.position += form.size
        return value

    def u32(self, field: str) -> int:
        return self.number(U32, field)

    def u64(self, field: str) -> int:
        return self.number(U64, field)

    def string(self, field: str, most: int) -> str:
        start = self.position
        length = self.u64(f"{field}.len")
        if length > most:
            raise self.error(f"{field}.len", length, f"at most {most} bytes", start)
        self.require(length, f"{field}.string")
        raw = self.buffer[self.position : self.position + length]
        text = self._decode(raw, field, self.position)
        self.position += length
        return text

    def name(self, field: str, most: int) -> str:
        """A string that names something: not empty, and without NUL, which would end it early in C."""
        start = self.position
        text = self.string(field, most)
        if not text or "\0" in text:
            raise self.error(field, shown(text), "a name that is not empty and has no NUL", start)
        return text

    def numbers(self, dtype: np.dtype, count: int, field: str) -> np.ndarray:
        """`count` numbers, copied, so that metadata does not hold the file open."""
        self.require(count * dtype.itemsize, field)
        array = np.frombuffer(self.buffer, dtype, count, self.position).copy()
        self.position += array.nbytes
        return array

    def strings(self, count: int, field: str) -> list[str]:
        """`count` strings, within the budget of the file."""
        self.strings_left -= count
        if self.strings_left < 0:
            raise self.error(f"{field}.len", count, f"at most {limits.ARRAY_STRINGS} in the file", self.position - 8)
        return self._unpack_strings(count, f"{field}.array")

    def _unpack_strings(self, count: int, field: str) -> list[str]:
        """Strings in a loop without calls: a vocabulary has hundreds of thousands."""
        buffer, position, limit, most = self.buffer, self.position, self.limit, limits.STRING_BYTES
        unpack, texts = U64.unpack_from, []
        try:
            for index in range(count):
                start = position + 8
                if start > limit:
                    self.position = position
                    self.require(8, f"{field}[{index}].len")
                (length,) = unpack(buffer, position)
                position = start + length
                if length > most:
                    raise self.error(f"{field}[{index}].len", length, f"at most {most} bytes", start - 8)
                if position > limit:
                    self.position = start
                    self.require(length, f"{field}[{index}].string")
                texts.append(buffer[start:position].decode())
        except UnicodeDecodeError:
            self._decode(buffer[start:position], f"{field}[{index}]", start)
        self.position = position
        return texts

    def _decode(self, raw: bytes, field: str, at: int) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as problem:
            got = f"byte {raw[problem.start]:#04x}"
            raise self.error(f"{field}.string", got, "UTF-8", at + problem.start) from None
