"""For which of the wanted architectures a feature's code is built, given those that the feature lists.

Upstream: vLLM's cmake/utils.cmake, cuda_archs_loose_intersection. Names are CMake's: ``9.0``, ``9.0a`` (one chip
generation), ``12.0f`` (one family), ``8.0+PTX``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from vtlab.ops.errors import ContractError

_DOTTED = re.compile(r"(\d+)\.(\d)([af]?)")
_PLAIN = re.compile(r"(\d+)(\d)([af]?)")
_PTX = "+PTX"


@dataclass(frozen=True)
class Entry:
    """One name of an architecture, e.g. ``12.1a``."""

    name: str

    @cached_property
    def version(self) -> tuple[int, int]:
        major, minor, _ = _parts(self.name)
        return int(major), int(minor)

    @cached_property
    def suffix(self) -> str:
        return _parts(self.name)[2]

    @property
    def base(self) -> str:
        """Its name without a suffix."""
        return "{}.{}".format(*self.version)


def arch_intersect(src: Iterable[str], tgt: Iterable[str]) -> list[str]:
    """The entries of `src`, or of `tgt` where they say more, to build for the targets `tgt`.

    src may hold ``+PTX`` entries, which serve every later architecture. Results come in the order of vLLM's function:
    specific ones first, then for each target left the greatest plain entry of its major version that is not above it.
    Errors: ContractError for a name that is none.
    """
    src = list(src)
    carried = _unique(name.removesuffix(_PTX) for name in src if name.endswith(_PTX))
    plain = _unique([*(name for name in src if not name.endswith(_PTX)), *carried])
    wanted = _unique(tgt)
    left, found = list(wanted), []
    for entry in [Entry(name) for name in plain if Entry(name).suffix]:
        plain.remove(entry.name)
        if (match := _specific(entry, wanted, left)) is not None:
            taken, result = match
            if taken in left:
                left.remove(taken)
            found.append(result)
    for target in [Entry(name) for name in left if Entry(name).suffix]:
        if target.base in plain:
            plain.remove(target.base)
            left.remove(target.name)
            found.append(target.name)
    ascending = sorted(map(Entry, plain), key=lambda entry: entry.version)
    for target in map(Entry, left):
        below = [entry for entry in ascending if entry.version <= target.version]
        fits = [entry for entry in below if entry.version[0] == target.version[0] or entry.name in carried]
        found += [entry.name for entry in fits[-1:]]
    return [name + _PTX * (name in carried) for name in _unique(found)]


def _specific(entry: Entry, wanted: Sequence[str], left: Sequence[str]) -> tuple[str, str] | None:
    """(target served, what to build) for a feature's entry with a suffix, or None where no target asks for it."""
    if entry.base in wanted:
        return entry.base, entry.name
    for suffix in "af":
        if entry.base + suffix in left:
            return entry.base + suffix, entry.base + suffix
    if entry.suffix == "f":
        family = [name for name in left if Entry(name).version[0] == entry.version[0]]
        if family:
            return family[0], family[0]
    return None


def enabled_for(feature: Iterable[str], targets: Sequence[str]) -> list[str]:
    """The targets that a feature is built for, as they were asked for: those of the intersection that are in `targets`.

    Both in NVCC's form, ``121a``: a feature of 12.1a alone is not enabled by a target 121.
    """
    found = arch_intersect(map(dotted, feature), map(dotted, targets))
    return [name for name in map(undotted, found) if name in targets]


def dotted(name: str) -> str:
    """``121a`` -> ``12.1a``: the last digit is the minor version."""
    return _convert(name, _PLAIN, "{}.{}{}", "121a")


def undotted(name: str) -> str:
    """``12.1a`` -> ``121a``."""
    return _convert(name, _DOTTED, "{}{}{}", "12.1a")


def _convert(name: str, form: re.Pattern, text: str, example: str) -> str:
    stem = name.removesuffix(_PTX)
    found = form.fullmatch(stem)
    if found is None:
        raise ContractError("arch", "name", repr(name), f"an architecture such as {example}")
    return text.format(*found.groups()) + name[len(stem) :]


def _parts(name: str) -> tuple[str, str, str]:
    found = _DOTTED.fullmatch(name)
    if found is None:
        raise ContractError("arch_intersect", "name", repr(name), "an architecture such as 12.1a")
    return found.groups()


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
