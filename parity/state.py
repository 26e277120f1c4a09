"""The honest state of every row: read off the op table, the goldens and the records, never typed by hand."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from vtlab.ops.rows import ROWS, Row
from vtlab.ops.table import Op, table

from .chain_cases import generated_chains
from .device_record import device_claims, device_states
from .goldens import list_op_goldens

RECORDS = Path(__file__).parent / "records"
_ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class RowState:
    """What exists of one row.

    oracle: "proven" (every promised op is there, and its record says that all checks passed on this source),
    "partial" (the same for some of the promised ops), "changed" (an op's source is newer than its record),
    "unproven" (ops without a record) or "absent". device: "verified" by
    the name of each GPU whose record holds all ops of the row, "built" for each arch all of them compile for;
    "partial" where some ops have no kernel; empty where none has one. A row of the CPU's kernels, whose ops are those
    of another row, is verified by "cpu" where its record is proven, and has no part in that row's goldens and GPUs; a
    row of a GPU's kernels of such ops shares both.
    """

    row: Row
    ops: tuple[str, ...]
    oracle: str
    checks: int
    mutations: int
    goldens: dict[str, int] = field(default_factory=dict)
    device: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict:
        return {
            "row": self.row.id, "title": self.row.title, "families": list(self.row.families), "ops": list(self.ops),
            "missing_ops": [name for name in self.row.promised if name not in self.ops], "oracle": self.oracle,
            "checks": self.checks, "mutations": self.mutations, "goldens": self.goldens, "device": self.device,
        }  # fmt: skip


def matrix() -> list[RowState]:
    """The state of all 45 rows, in the order of their ids."""
    record = oracle_record()
    goldens, claims = golden_counts(), device_claims()
    return [_row_state(ROWS[id], record, goldens, claims) for id in sorted(ROWS)]


def _row_state(row: Row, record: dict, goldens: dict[str, dict[str, int]], claims: list[tuple]) -> RowState:
    ops = {name: found for name, found in table().items() if found.contract.row == row.id}
    shared = tuple(name for name in row.shared if name in table())
    if not row.machinery:  # the shared ops' own checks and records are the row's too
        ops |= {name: table()[name] for name in shared}
    entries = {name: record.get(name) for name in ops}
    if row.machinery:
        entries = {row.machinery: record.get(row.machinery)}
        states = {_entry_state(entries[row.machinery], machinery_digest(row.machinery))}
    else:
        states = {_entry_state(entries[name], source_digest(found)) for name, found in ops.items()}
    oracle = next((state for state in ("failed", "changed", "unproven") if state in states), "absent")
    if states == {"proven"}:
        oracle = "proven" if set(row.promised) <= {*ops, *shared} else "partial"
    builds: dict[str, int] = {}
    for name in ops:
        for build, count in goldens.get(name, {}).items():
            builds[build] = builds.get(build, 0) + count
    counted = [entry for entry in entries.values() if entry]
    if shared and row.machinery:  # their kernels are the CPU tier's, which the machinery's tests run
        device = {"cpu": "verified"} if oracle == "proven" else {}
    else:
        device = device_states(claims, tuple(ops), generated_chains() if row.machinery == "test_fusion" else ())
    return RowState(
        row,
        tuple(dict.fromkeys((*ops, *shared))),
        oracle,
        sum(e["checks"] for e in counted),
        sum(e["mutations"] for e in counted),
        builds,
        device,
    )


def _entry_state(entry: dict | None, digest: str) -> str:
    if entry is None:
        return "unproven"
    if entry["digest"] != digest:
        return "changed"
    return "proven" if entry["failed"] == 0 else "failed"


def golden_counts() -> dict[str, dict[str, int]]:
    """Number of op-level golden cases by op and build."""
    counts: dict[str, dict[str, int]] = {}
    for entry in list_op_goldens():
        for op, number in entry.ops.items():
            counts.setdefault(op, {})[entry.build] = number + counts.get(op, {}).get(entry.build, 0)
    return counts


def oracle_record() -> dict[str, dict]:
    """The committed record of the last full gate: per op digest, checks, failures and mutations killed."""
    path = RECORDS / "oracle.json"
    return json.loads(path.read_text())["ops"] if path.exists() else {}


def source_digest(found: Op) -> str:
    """Digest of what defines an op: its oracle module, the oracle modules that one imports, and the arithmetic."""
    return _digest((*sorted(_with_imports(found.contract.family)), *_sources("ops/numerics/*.py")))


@cache
def _with_imports(module: str) -> frozenset[str]:
    """The file of an oracle module, and of all that it imports from beside it."""
    file = f"oracle/{module}.py"
    text = (_ROOT / file).read_text()
    beside = re.findall(r"^from \.(\w+) import", text, re.MULTILINE)
    for names in re.findall(r"^from \. import ([\w, ]+?)(?: as \w+)?$", text, re.MULTILINE):
        beside += [name.strip() for name in names.split(",")]
    return frozenset({file}).union(*(_with_imports(name) for name in beside))


def machinery_digest(test: str) -> str:
    """Digest of a mechanism row: its modules, in ops/ or beside the device's families."""
    name = test.removeprefix("test_")
    return _digest(tuple(f"device/{module}.py" for module in _DEVICE.get(name, ())) or _sources(f"ops/{name}/*.py"))


_DEVICE = {
    "dispatch": (
        "aot", "arch", "arrays", "backend", "build", "caps", "compiler", "cupy_backend", "cupy_runtime", "graphs",
        "intersect", "loader", "runtime", "scratch", "source", "tactics",
    ),
    "cpu_matmul": (
        "cpu/compiling", "cpu/images", "cpu/launch", "cpu/matmul", "cpu/threads", "cpu/tier", "cpu/kernels/lanes",
        "cpu/kernels/matmul", "cpu/kernels/memory", "cpu/kernels/panels", "cpu/kernels/storage", "cpu/kernels/vectors",
    ),
}  # fmt: skip


@cache
def _sources(pattern: str) -> tuple[str, ...]:
    return tuple(sorted(str(path.relative_to(_ROOT)) for path in _ROOT.glob(pattern)))


@cache
def _digest(files: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.encode() + b"\0" + (_ROOT / file).read_bytes())
    return digest.hexdigest()[:16]
