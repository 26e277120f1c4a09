"""Conducts `vtlab gate`: progress while it runs, tables or JSON at the end, the record when asked for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import date

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vtlab.ops.errors import ContractError
from vtlab.ops.rows import ROWS
from vtlab.ops.table import table

from .gate import OpVerdict, run_ops, select_ops
from .gate_tokens import TokenVerdict, run_tokens, select_tokens
from .harness import MUTATIONS
from .state import RECORDS, machinery_digest, source_digest


def run_gate(
    rows: tuple[str, ...], models: tuple[str, ...], *, record: bool, as_json: bool, device: str = "cpu"
) -> int:
    """Run the chosen part of the gate and return the exit status: 0 green, 1 red, 130 interrupted.

    device : where the models run; the ops of the oracle are the CPU's.
    """
    if record and (rows or models or device != "cpu"):
        raise ContractError("gate", "record", "a part of the gate", "a full run, without --row, --model or --device")
    ops = select_ops(rows) if rows or not models else []
    goldens = select_tokens(models) if models or not rows else []
    console = Console(stderr=True)
    verdicts: list[OpVerdict] = []
    streams: list[TokenVerdict] = []
    status = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        try:
            task = progress.add_task("ops", total=len(ops))
            for verdict in run_ops(ops):
                verdicts.append(verdict)
                progress.update(task, advance=1, description=f"ops: {verdict.op}")
            task = progress.add_task("tokens", total=len(goldens))
            say = lambda text: progress.update(task, description=f"tokens: {text}")
            for verdict in run_tokens(goldens, say, device):
                streams.append(verdict)
                progress.advance(task)
        except KeyboardInterrupt:
            status = 130
    red = any(v.failures for v in verdicts) or any(v.kind == "diverged" for v in streams)
    status = status or int(red)
    _report(verdicts, streams, status, as_json)
    if record and status != 130:
        write_record(verdicts)
    return status


def _report(verdicts: list[OpVerdict], streams: list[TokenVerdict], status: int, as_json: bool) -> None:
    if as_json:
        found = {"status": status, "ops": [vars(v) for v in verdicts], "tokens": [v.as_dict() for v in streams]}
        json.dump(found, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    from .screen import gate_table, position_table, show, token_table

    if verdicts:
        show(gate_table(verdicts))
    if streams:
        show(token_table(streams))
    if (places := position_table(streams)) is not None:
        show(places)
    for v in verdicts:
        for name, fault in v.failures.items():
            show(f"[bold red]{v.op}[/] {name}\n{fault}")
    show(
        "interrupted: the tables above are what was done"
        if status == 130
        else "gate: " + ("red" if status else "green")
    )


def write_record(verdicts: list[OpVerdict]) -> None:
    """Write parity/records/oracle.json: per op its source digest, checks, failures and mutations."""
    ops = {
        v.op: {
            "digest": source_digest(table()[v.op]), "checks": v.checks, "failed": len(v.failures),
            "known_misses": len(v.known), "mutations": len(MUTATIONS.get(v.op, {})), "date": date.today().isoformat(),
        }
        for v in sorted(verdicts, key=lambda v: v.op)
    }  # fmt: skip
    for row in ROWS.values():
        if row.machinery:
            ops[row.machinery] = machinery_entry(row.machinery)
    RECORDS.mkdir(exist_ok=True)
    path = RECORDS / "oracle.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"ops": ops}, indent=1, sort_keys=True) + "\n")
    partial.replace(path)


def machinery_entry(test: str) -> dict:
    """Run a mechanism row's own test modules and turn their counts into a record entry."""
    modules = sorted(str(path) for path in RECORDS.parent.glob(f"{test}*.py"))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *modules]
    summary = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", summary)}
    return {
        "digest": machinery_digest(test), "checks": counts.get("passed", 0), "known_misses": 0, "mutations": 0,
        "failed": counts.get("failed", 0) + counts.get("error", 0), "date": date.today().isoformat(),
    }  # fmt: skip
