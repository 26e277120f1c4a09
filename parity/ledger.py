"""The ledger of known misses: each names an issue, and one that starts to pass fails until it is struck off."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LEDGER = Path(__file__).parent / "ledger.json"


@dataclass(frozen=True)
class Miss:
    """A check that is known to fail: op, the check's name as the gate prints it, the issue, the reason."""

    op: str
    check: str
    issue: int
    reason: str

    def __post_init__(self):
        if not (self.op and self.check and self.reason.strip()) or self.issue < 1:
            raise ValueError(f"a known miss needs an op, a check, an issue and a reason: {self}")


@dataclass(frozen=True)
class Ledger:
    """All known misses."""

    misses: tuple[Miss, ...]

    def find(self, op: str, check: str) -> Miss | None:
        return next((miss for miss in self.misses if miss.op == op and miss.check == check), None)


@cache
def load_ledger(path: Path = LEDGER) -> Ledger:
    """Read the ledger; ValueError for an entry without an issue or reason, or listed twice."""
    misses = tuple(Miss(**entry) for entry in json.loads(path.read_text()))
    if len({(miss.op, miss.check) for miss in misses}) != len(misses):
        raise ValueError(f"{path}: a known miss is listed twice")
    return Ledger(misses)
