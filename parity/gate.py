"""`vtlab gate`: every check of every op, then the token streams, over whatever this machine has."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

from vtlab.ops.errors import ContractError
from vtlab.ops.rows import ROWS
from vtlab.ops.table import table

from . import harness
from .generic import generic_checks
from .ledger import Ledger, load_ledger


@dataclass
class OpVerdict:
    """What the gate found of one op: how many checks ran, which failed and why, which known misses stand."""

    op: str
    row: str
    checks: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    known: list[str] = field(default_factory=list)
    seconds: float = 0.0


def select_ops(rows: tuple[str, ...]) -> list[str]:
    """Ops of the chosen rows (all where none is chosen); ContractError for an unknown row."""
    wanted = set()
    for name in rows:
        full = name if name.startswith("KERNEL-") else f"KERNEL-{name}"
        if full not in ROWS:
            raise ContractError("gate", "row", name, "one of " + ", ".join(sorted(ROWS)))
        wanted.add(full)
    return [name for name, op in table().items() if not wanted or op.contract.row in wanted]


def run_ops(ops: list[str]) -> Iterator[OpVerdict]:
    """Verdicts as they come, one process per core; nothing is printed here."""
    harness.load_checks()
    if len(ops) < 2 or (os.cpu_count() or 1) < 2:
        yield from map(judge, ops)
        return
    with multiprocessing.Pool(initializer=_leave_interrupts_to_the_parent) as pool:  # leaving it ends the workers
        yield from pool.imap_unordered(judge, ops)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def judge(op: str) -> OpVerdict:
    """Run the generic checks and the family's own checks of one op."""
    harness.load_checks()
    ledger, found, start = load_ledger(), table()[op], time.perf_counter()
    verdict = OpVerdict(op, found.contract.row)
    runs = list(generic_checks(found))
    runs += [run for check in harness.CHECKS.get(op, {}).values() for run in check.runs()]
    for name, run in runs:
        verdict.checks += 1
        _run(verdict, ledger, name, run)
    verdict.seconds = time.perf_counter() - start
    return verdict


def _run(verdict: OpVerdict, ledger: Ledger, name: str, run) -> None:
    entry = ledger.find(verdict.op, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run()
    except Exception as error:
        if entry is not None:
            verdict.known.append(f"{name} (issue {entry.issue})")
        else:
            verdict.failures[name] = (
                f"{type(error).__name__}: {error}" if str(error) else traceback.format_exc(limit=-2)
            )
        return
    if entry is not None:
        verdict.failures[name] = (
            f"passes, but the ledger holds it as a known miss of issue {entry.issue}: strike it off"
        )
