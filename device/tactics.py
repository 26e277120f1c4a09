"""Ways to do one thing that depend on the GPU: within a family the first that the device supports and that accepts.

Providers (`vtlab.ops.providers`) choose between implementations of an op; tactics choose, inside of one, between
kernels for different architectures. Here the order of registration is the order of selection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from vtlab.ops.errors import ContractError

from .caps import DeviceCaps


@dataclass(frozen=True)
class ArchTactic:
    """One way. launch(arguments) does it and returns True, or False without having done anything: the next one then."""

    name: str
    family: str
    supports: Callable[[DeviceCaps], bool]
    launch: Callable[[Mapping[str, object]], bool]


@dataclass(slots=True)
class TacticStats:
    """last_selected : the last one that served; selections : calls that one served; fallbacks : calls that none did."""

    last_selected: str | None = None
    selections: int = 0
    fallbacks: int = 0


class Tactics:
    """The tactics of each family, in order of registration, for devices whose facts `caps()` gives."""

    def __init__(self, caps: Callable[[], DeviceCaps]):
        self._caps = caps
        self._families: dict[str, list[ArchTactic]] = {}
        self._stats: dict[str, TacticStats] = {}
        self._lock = threading.Lock()

    def register(self, tactic: ArchTactic) -> ArchTactic:
        """Add a tactic behind those of its family; ContractError for a name that the family has already."""
        with self._lock:
            ways = self._families.setdefault(tactic.family, [])
            if any(way.name == tactic.name for way in ways):
                raise ContractError("tactics", "name", repr(tactic.name), f"a new name in family {tactic.family}")
            ways.append(tactic)
        return tactic

    def select(self, family: str) -> ArchTactic | None:
        """The first tactic of the family that this device supports, or None."""
        return next(iter(self._supported(family)), None)

    def run(self, family: str, arguments: Mapping[str, object]) -> bool:
        """Launch the first supported tactic that accepts; False where none does and the caller's own way is left."""
        for tactic in self._supported(family):
            if tactic.launch(arguments):
                with self._lock:
                    stats = self._stats.setdefault(family, TacticStats())
                    stats.last_selected, stats.selections = tactic.name, stats.selections + 1
                return True
        with self._lock:
            self._stats.setdefault(family, TacticStats()).fallbacks += 1
        return False

    def stats(self, family: str) -> TacticStats:
        """The family's statistics, as a copy."""
        with self._lock:
            return replace(self._stats.get(family, TacticStats()))

    def _supported(self, family: str) -> list[ArchTactic]:
        ways = self._families.get(family, ())
        if not ways:
            return []
        caps = self._caps()
        return [tactic for tactic in ways if tactic.supports(caps)]
