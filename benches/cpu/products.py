"""Products of weights in GGML blocks, kernel against kernel: vtlab's and ggml's on the same bytes, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vtlab.device.cpu import ggml, threads
from vtlab.oracle.ggml import random_blocks

from .ggml_peer import Peer

SHAPES = (
    ("SmolLM2 qkv", "Q4_1", 576, 960), ("SmolLM2 gate and up", "Q4_1", 576, 3072), ("SmolLM2 down", "Q4_1", 1536, 576),
    ("SmolLM2 head", "Q8_0", 576, 49152), ("Gemma 3 q", "Q5_0", 640, 1024), ("Gemma 3 gate and up", "Q5_0", 640, 4096),
    ("Gemma 3 o", "Q4_K", 1024, 640), ("Gemma 3 down", "Q4_K", 2048, 640), ("Gemma 3 down", "Q6_K", 2048, 640),
    ("Gemma 3 head", "Q8_0", 640, 262144),
)  # fmt: skip
_HEAD = 16384  # rows from which a matrix is a head: one token at a time


@dataclass(frozen=True)
class Product:
    """The best seconds of both, for `rows` rows of activations; `theirs` is None without ggml."""

    what: str
    quant_type: str
    rows: int
    depth: int
    columns: int
    nbytes: int
    ours: float
    theirs: float | None

    def cells(self) -> tuple[str, ...]:
        shape = f"{self.rows} x {self.columns} x {self.depth}"
        theirs = ("", "") if self.theirs is None else (f"{self.theirs * 1e6:.0f}", f"{self.theirs / self.ours:.2f}")
        rate = self.rows * self.depth * self.columns / self.ours / 1e9
        return (self.what, self.quant_type, shape, f"{self.ours * 1e6:.0f}", *theirs,
                f"{self.nbytes / self.ours / 1e9:.1f}", f"{rate:.0f}")  # fmt: skip


def products(count: int, library: Path | None, seconds: float = 2.0) -> Iterator[Product]:
    """Every shape with one row of activations, and with 256 where it is no head, on `count` threads."""
    peer, rng = None if library is None else Peer(library), np.random.Generator(np.random.PCG64(0))
    with threads.using(count):
        for what, kind, depth, columns in SHAPES:
            b = random_blocks(rng, kind, min(columns, 4096), depth)
            b = np.tile(b, (-(-columns // len(b)), 1))[:columns].copy()
            for rows in (1,) if columns >= _HEAD else (1, 256):
                x = rng.standard_normal((rows, depth)).astype(np.float32)
                ours, theirs = _timed(x, b, kind, count, peer, seconds)
                yield Product(what, kind, rows, depth, columns, b.nbytes, ours, theirs)


def _timed(x, b, kind: str, count: int, peer: Peer | None, seconds: float) -> tuple[float, float | None]:
    out = np.empty((len(x), len(b)), np.float32)
    calls = [lambda: ggml.matmul_bt_quant(x, b, quant_type=kind, out=out)]
    calls[0]()
    if peer is not None:
        run, theirs = peer.product(x, b, kind)
        if np.abs(theirs - out).max() > 0.01 * np.abs(out).max():
            raise ArithmeticError(f"{kind}: ggml's product is another")
        calls.append(lambda: run(count))
    best = [float("inf")] * len(calls)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - start)
    if peer is not None:
        run.free()
    return best[0], best[1] if peer is not None else None
