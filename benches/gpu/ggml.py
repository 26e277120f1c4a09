"""Activations to GGML blocks, and rows of a table in blocks, at the sizes of 8B models."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vtlab.ops.blocks import quant_traits, row_size_bytes
from vtlab.oracle.ggml import random_blocks

from .arrays import cupy_empty, cupy_normal, ours
from .bench import Bench

WIDTH, VOCABULARY = 4096, 32768


def benches() -> Iterator[Bench]:
    for rows in (1, 8192):
        for name in ("q8_0", "q8_1", "q8_k"):
            yield quantiser(name, rows)
    for kind in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ2_XXS"):
        yield lookup(kind, 8192)


def cupy_blocks(kind: str, rows: int, length: int):
    """Rows of blocks: 64 of them again and again."""
    import cupy

    some = cupy.asarray(random_blocks(np.random.default_rng(0), kind, min(rows, 64), length))
    return cupy.ascontiguousarray(cupy.tile(some, (-(-rows // 64), 1))[:rows])


def quantiser(name: str, rows: int) -> Bench:
    traits = quant_traits(name.upper())
    coded = rows * row_size_bytes(name.upper(), WIDTH)

    def make():
        return (
            (cupy_normal(rows, WIDTH),),
            {},
            cupy_empty(rows, WIDTH // traits.elements * traits.nbytes, dtype="uint8"),
        )

    return Bench("ggml", f"{name} {rows}x{WIDTH}", ours(f"quantize_row_{name}", make), {}, 2 * rows * WIDTH + coded)


def lookup(kind: str, tokens: int) -> Bench:
    def make():
        import cupy

        ids = cupy.random.default_rng(0).integers(0, VOCABULARY, tokens).astype(np.int32)
        given = {"quant_type": kind, "out_dtype": "bfloat16"}
        return (cupy_blocks(kind, VOCABULARY, WIDTH), ids), given, cupy_empty(tokens, WIDTH)

    moved = tokens * (row_size_bytes(kind, WIDTH) + 2 * WIDTH)
    return Bench("ggml", f"{kind} lookup {tokens}x{WIDTH}", ours("embedding_quant", make), {}, moved)
