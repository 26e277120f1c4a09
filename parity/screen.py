"""What the command line shows: the matrix, a contract's page, the gate's verdicts; all of it made from data."""

from __future__ import annotations

import inspect
import re

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from vtlab.ops.contract import describe
from vtlab.ops.table import Op

_STYLES = {
    "proven": "green", "verified": "green", "strict": "green", "passed": "green", "built": "cyan", "near-tie": "yellow",
    "partial": "yellow", "changed": "yellow", "unproven": "yellow", "absent": "dim", "not here": "dim",
    "failed": "bold red", "diverged": "bold red",
}  # fmt: skip


console = Console()


def show(renderable) -> None:
    """Print to the terminal; plain text when it is none."""
    console.print(renderable)


def styled(state: str) -> Text:
    """A state word in its colour."""
    return Text(state, style=_STYLES.get(state, ""))


def _table(title: str, *headings: tuple[str, str]) -> Table:
    """An airy table; a heading comes with its alignment, "left" or "right"; only prose wraps."""
    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    for heading, justify in headings:
        table.add_column(heading, justify=justify, no_wrap=heading not in ("what it is", "is"), overflow="fold")
    return table


def matrix_table(states, width: int) -> Table:
    """The kernel matrix: a line a row; checks, mutations and what a row is about only where the terminal has room."""
    headings = [("row", "left"), ("ops", "right"), ("oracle", "left"), ("goldens", "left"), ("device", "left")]
    headings += [("checks", "right")] * (width >= 90) + [("mutations", "right"), ("what it is", "left")] * (
        width >= 120
    )
    table = _table("Kernel matrix", *headings)
    for state in states:
        promised = len(state.row.promised)
        ops = f"{len(state.ops)}/{promised}" if promised else str(len(state.ops) or "")
        goldens = " ".join(f"{count} {build}" for build, count in sorted(state.goldens.items()))
        device = _device(state.device, width)
        cells = [
            state.row.id.removeprefix("KERNEL-"), ops, styled(state.oracle), goldens or styled("absent"),
            device or styled("absent"), str(state.checks or ""), str(state.mutations or ""), state.row.title,
        ]  # fmt: skip
        table.add_row(*cells[: len(headings)])
    return table


def _device(states: dict[str, str], width: int) -> str | Text:
    """GPUs by name, the architectures of one state as a number; only the best state where the terminal is narrow."""
    if width < 120:
        return styled(min(states.values(), key=["verified", "built", "partial"].index)) if states else ""
    archs = [what for name, what in states.items() if name.startswith("sm_")]
    texts = [f"{name.removeprefix('NVIDIA ')} {what}" for name, what in states.items() if not name.startswith("sm_")]
    return ", ".join([*texts, *(f"{archs.count(what)} archs {what}" for what in dict.fromkeys(archs))])


def build_table(builds) -> Table:
    """Compiled kernels: a line a target."""
    table = _table("Builds", ("arch", "left"), ("kernels", "right"), ("most registers", "right"),
                   ("spilled bytes", "right"), ("cubins", "right"), ("compiler", "left"))  # fmt: skip
    for target in dict.fromkeys(build.entry["target"] for build in builds):
        own = [build for build in builds if build.entry["target"] == target]
        usages = [usage for build in own for usage in build.entry["kernels"].values()]
        table.add_row(
            target, str(len(usages)), str(max(usage["registers"] for usage in usages)),
            str(sum(usage["spills"] for usage in usages)), f"{sum(len(build.image) for build in own) / 1024:.0f} KiB",
            ", ".join(sorted({build.entry["compiler"] for build in own})),
        )  # fmt: skip
    return table


def contract_page(found: Op) -> Group:
    """One op's contract, as `vtlab explain` prints it."""
    contract = found.contract
    arguments = _table("", ("argument", "left"), ("is", "left"))
    defaults = {name: p.default for name, p in found.shown_signature.parameters.items() if p.default is not p.empty}
    for name, spec in contract.args.items():
        arguments.add_row(name, describe(spec) + (f"; by default {defaults[name]}" if name in defaults else ""))
    for name, spec in contract.returns.items():
        arguments.add_row(f"-> {name}", describe(spec))
    facts = Table.grid(padding=(0, 2))
    for label, value in (
        ("row", contract.row), ("order", contract.order), ("parity", f"{contract.parity} {contract.parity.why}"),
        ("mirror to truth", _bound(contract.mirror)), ("NaN", contract.nan), ("ties", contract.ties),
        ("log-sum-exp base", contract.lse_base), ("layout", contract.layout), ("updates", ", ".join(contract.mutates)),
        ("upstream", contract.upstream),
    ):  # fmt: skip
        if value:
            facts.add_row(Text(label, style="bold"), Text(str(value)))
    for device, arithmetic in contract.mirrors.items():
        facts.add_row(Text(f"mirror ({device})", style="bold"), Text(str(arithmetic)))
    for name, points in contract.rounding.items():
        facts.add_row(Text(f"rounds ({name})", style="bold"), Text("\n".join(points)))
    refusals = [(check.__doc__ or check.__name__).strip() for check in contract.requires]
    if refusals:
        facts.add_row(Text("refuses", style="bold"), Text("\n".join(refusals)))
    title = Text(f"{contract.name}{found.shown_signature}", style="bold cyan")
    summary, _, rest = (inspect.getdoc(found.body) or "").partition("\n")
    body = re.sub(r"\n(?!\n|[A-Z][\w ]*: )(?<!\n\n)", " ", rest.strip())  # as wide as the terminal, a paragraph a label
    return Group(title, Markdown(summary), *([Text(f"\n{body}")] if body else []), arguments, facts)


def _bound(bound) -> str:
    text = f"at most ({bound.roundings}) float32 roundings" if bound.roundings != "0" else "exact"
    return text + (f" + {bound.ulps} storage ulp" if bound.ulps else "") + (f": {bound.why}" if bound.why else "")


def gate_table(verdicts) -> Table:
    """Rows of the gate: ops, checks, failures, known misses."""
    table = _table("Ops", ("row", "left"), ("ops", "right"), ("checks", "right"), ("failed", "right"),
                   ("known misses", "right"), ("seconds", "right"), ("verdict", "left"))  # fmt: skip
    rows: dict[str, list] = {}
    for verdict in verdicts:
        rows.setdefault(verdict.row, []).append(verdict)
    for row, found in sorted(rows.items()):
        failed = sum(len(v.failures) for v in found)
        table.add_row(
            row, str(len(found)), str(sum(v.checks for v in found)), str(failed), str(sum(len(v.known) for v in found)),
            f"{sum(v.seconds for v in found):.1f}", styled("failed" if failed else "passed"),
        )  # fmt: skip
    return table


def token_table(verdicts) -> Table:
    """Token streams: a line a golden."""
    headings = [("golden", "left"), ("tokens", "right"), ("near-ties", "right"), ("max |Δ|", "right")]
    headings += [("seconds", "right"), ("verdict", "left")]
    table = _table("Token streams against vLLM, Δ of log-probabilities", *headings)
    for v in verdicts:
        table.add_row(*v.cells(), styled(v.kind))
    return table


def bisect_table(name: str, distances) -> Table:
    """Hidden states: a line a state, those that are off in red."""
    table = _table(f"{name}: hidden states against transformers", ("state", "left"), ("rel-L2", "right"))
    for found in distances:
        table.add_row(found.state, f"{found.rel_l2:.1e}", style="bold red" if found.wrong else None)
    return table


def position_table(verdicts) -> Table | None:
    """Every place where our choice is another token than vLLM's; None where there is none."""
    table = _table("Other choices than vLLM's, on vLLM's own prefix", ("golden", "left"), ("prompt", "right"),
                   ("token", "right"), ("ours", "right"), ("vLLM's", "right"), ("nats apart", "right"),
                   ("allowed", "right"))  # fmt: skip
    for v in verdicts:
        for at in v.verdict.positions:
            table.add_row(v.golden, str(at.prompt), str(at.step), str(at.ours), str(at.vllm), f"{at.gap:.4f}",
                          f"{at.allowed:.4f}")  # fmt: skip
    return table if table.row_count else None
