"""Fuzz the file readers: a mutated file is read or refused with FormatError, nothing else, in little time and memory.

python -m vtlab.parity.fuzz_files --mutations 100000
"""

from __future__ import annotations

import faulthandler
import re
import resource
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vtlab.gguf.dequant import TYPES, dequantize
from vtlab.gguf.reader import read_gguf
from vtlab.models.safetensors import DTYPES, read_safetensors
from vtlab.ops.blocks import LAYOUTS
from vtlab.ops.errors import FormatError

from . import broken_gguf, broken_safetensors
from .mutate_files import mutate

MOST_SECONDS, MOST_BYTES = 2.0, 256 << 20
_NAMES = re.compile(r"""\[\d+\]|\[['"].*['"]\]|^['"].*['"]""", re.DOTALL)  # of a field: refusals count by kind


def use_gguf(path: Path) -> None:
    """Open, and do with every tensor what a model would: touch each of its bytes, decode it if that can be done."""
    with read_gguf(path) as file:
        for tensor in file.tensors.values():
            tensor.data.tobytes()
            if tensor.type in TYPES:
                dequantize(tensor)


def use_safetensors(path: Path) -> None:
    """Open, and touch every byte."""
    with read_safetensors(path) as file:
        for array in file.values():
            array.tobytes()


def gguf_corpus() -> list[bytes]:
    """The odd but sound files of the tests, and one with every metadata type and every block type."""
    g = broken_gguf
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, g.BOOL: 1, 10: 8, 11: 8, 12: 8}
    pairs = [g.ARCH, *(g.pair(f"n{kind}", kind, b"\1" * size) for kind, size in sizes.items())]
    pairs += [g.pair(f"a{kind}", g.ARRAY, g.array(kind, 3, b"\1" * 3 * size)) for kind, size in sizes.items()]
    tokens = b"".join(map(g.text, ("<s>", "", "ä", "▁the")))
    pairs.append(g.pair("tokens", g.ARRAY, g.array(g.STRING, 4, tokens)))
    infos, data, random = [], b"", Random(1)
    for layout in LAYOUTS.values():
        infos.append(g.info(f"blk.{layout.name}", [layout.elements, 2], layout.id, len(data)))
        data += random.randbytes(2 * layout.nbytes)
        data += bytes(-len(data) % 32)
    return [*g.SOUND.values(), g.container(pairs, infos, data)]


def safetensors_corpus() -> list[bytes]:
    """One tensor, none, one of each dtype, and a scalar and an empty tensor with metadata."""
    s, header, end = broken_safetensors, {}, 0
    for name, dtype in DTYPES.items():
        header[f"model.{name}"] = s.entry(name, [2, 3], end, end + 6 * dtype.itemsize)
        end += 6 * dtype.itemsize
    small = {"__metadata__": {"format": "pt"}, "s": s.entry("F32", [], 0, 4), "e": s.entry("I64", [0, 7], 4, 4)}
    return [
        s.container({"x": s.X}, bytes(4)),
        s.container({}),
        s.container(header, b"\1" * end),
        s.container(small, bytes(4)),
    ]


READERS = {"gguf": (use_gguf, gguf_corpus), "safetensors": (use_safetensors, safetensors_corpus)}


@dataclass
class Tally:
    """What became of the mutations; `findings` must stay empty."""

    read: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    slowest: float = 0.0
    largest: int = 0

    def add(self, number: int, use: Callable[[Path], None], path: Path) -> None:
        """Run `use` on `path` under the guards; `number` names the mutation in a finding."""
        tracemalloc.reset_peak()
        before, start = tracemalloc.get_traced_memory()[0], time.perf_counter()
        try:
            use(path)
            self.read += 1
        except FormatError as refusal:
            self.refused[_NAMES.sub("", refusal.field)] += 1
        except Exception as crash:
            self.findings.append(f"mutation {number}: {type(crash).__name__}: {crash}")
        seconds, nbytes = time.perf_counter() - start, tracemalloc.get_traced_memory()[1] - before
        if seconds > MOST_SECONDS:
            self.findings.append(f"mutation {number}: {seconds:.1f} s")
        if nbytes > MOST_BYTES:
            self.findings.append(f"mutation {number}: {nbytes >> 20} MiB")
        self.slowest, self.largest = max(self.slowest, seconds), max(self.largest, nbytes)


def fuzz(use: Callable[[Path], None], corpus: list[bytes], numbers: Iterable[int], folder: Path) -> Tally:
    """Mutation n of `corpus` through `use`, for every n of `numbers`; the same n is always the same file."""
    tally, path = Tally(), folder / "mutated"
    for content in corpus:
        path.write_bytes(content)
        use(path)
    tracemalloc.start()
    try:
        for number in numbers:
            path.write_bytes(mutate(Random(number), corpus))
            tally.add(number, use, path)
    finally:
        tracemalloc.stop()
    return tally


def main(
    mutations: Annotated[int, typer.Option(help="Mutations for each reader.")] = 100_000,
    first: Annotated[int, typer.Option(help="Number of the first: a finding is repeated with its number here.")] = 0,
    reader: Annotated[list[str], typer.Option(help="gguf, safetensors.")] = list(READERS),  # noqa: B006
) -> None:
    """Fuzz the readers; the exit status is 1 if anything but FormatError came out, or one took too much."""
    console, table = (
        Console(),
        Table("reader", "mutations", "read", "refused", "findings", "slowest", "most memory", "RSS"),
    )
    findings = []
    for name in reader:
        use, corpus = READERS[name]
        numbers = track(range(first, first + mutations), description=name, console=console)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        faulthandler.dump_traceback_later(60 + mutations // 50, exit=True)  # a reader that never returns shows where
        with tempfile.TemporaryDirectory() as folder:
            tally = fuzz(use, corpus(), numbers, Path(folder))
        faulthandler.cancel_dump_traceback_later()
        resident = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) << 10
        findings += tally.findings + [f"{name}: resident memory grew by {resident >> 20} MiB"] * (resident > MOST_BYTES)
        counts = map(str, (mutations, tally.read, tally.refused.total(), len(tally.findings)))
        sizes = f"{tally.largest / 1e6:.2f} MB", f"+{resident / 1e6:.1f} MB"
        table.add_row(name, *counts, f"{tally.slowest:.3f} s", *sizes)
        console.print("refused by field:", ", ".join(f"{key} {n}" for key, n in tally.refused.most_common()))
    console.print(table)
    for finding in findings:
        console.print(finding, style="red")
    raise typer.Exit(bool(findings))


if __name__ == "__main__":
    typer.run(main)
