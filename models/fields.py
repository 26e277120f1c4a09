"""Typed look-ups in what a checkpoint says of itself; every refusal names the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vtlab.ops.errors import FormatError


class Fields:
    """A mapping of fields. Every refusal is a FormatError that names the file and the field, with its prefix.

    defaults : what a field that is absent or null reads as, by name.
    """

    def __init__(self, data: Mapping, file: str | Path, prefix: str = "", defaults: Mapping | None = None):
        if not isinstance(data, Mapping):
            raise FormatError(file, None, prefix or "configuration", type(data).__name__, "an object")
        self.data, self.file, self.prefix, self.defaults = data, file, prefix, defaults or {}

    def get(self, name: str) -> object:
        value = self.data.get(self.prefix + name)
        return self.defaults.get(name) if value is None else value

    def given(self, name: str) -> bool:
        """Whether the file itself has the field."""
        return self.data.get(self.prefix + name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the file has the field, and null in it, which can mean another thing than no field."""
        return self.prefix + name in self.data and self.data[self.prefix + name] is None

    def within(self, name: str) -> Fields:
        """The fields of an object in the file, with the same defaults; its name goes before theirs."""
        value, prefix = self.get(name), f"{self.prefix}{name}."
        if not isinstance(value, Mapping):
            raise self.error(name, value, "an object")
        return Fields({prefix + key: one for key, one in value.items()}, self.file, prefix, self.defaults)

    def error(self, name: str, got: object, want: object) -> FormatError:
        return FormatError(self.file, None, self.prefix + name, "nothing" if got is None else repr(got), want)

    def integer(self, name: str, default: int | None = None) -> int:
        value = default if self.get(name) is None else self.get(name)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            raise self.error(name, value, "an integer")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = default if self.get(name) is None else self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
            raise self.error(name, value, "a finite number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.only(name, (True, False), default))

    def only(self, name: str, allowed: tuple, default: object = None) -> object:
        """The field, refused unless it is one of `allowed` (a missing one reads as `default`)."""
        value = default if self.get(name) is None else self.get(name)
        if value not in allowed:
            raise self.error(name, value, " or ".join("nothing" if one is None else repr(one) for one in allowed))
        return value
