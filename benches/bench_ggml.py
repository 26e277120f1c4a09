"""GGML blocks at the shapes of Gemma-3-270m and SmolLM2-135M: quantisers, a projection, the head, a lookup."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle
from vtlab.oracle.ggml import random_blocks

from .peer import SIDES, compare, normal

PRODUCTS = [("Q4_1", 1, 576, 1536), ("Q5_0", 1, 640, 2048), ("Q8_0", 1, 640, 16384), ("Q4_K", 64, 2048, 640),
            ("Q6_K", 64, 2048, 640)]  # fmt: skip


def blocks(kind, rows, length):
    return random_blocks(np.random.Generator(np.random.PCG64(0)), kind, rows, length)


@pytest.mark.parametrize("kind, M, K, N", PRODUCTS)
@pytest.mark.parametrize("side", SIDES)
def test_matmul_bt_quant(benchmark, side, kind, M, K, N):
    """The peer multiplies the dequantised weights in float64."""
    x, b = normal(M, K, dtype=np.float32), blocks(kind, N, K)
    rows = oracle.embedding_quant(b, np.arange(N), quant_type=kind)
    ours = lambda a, rows: oracle.matmul_bt_quant(a, b, quant_type=kind)
    compare(benchmark, side, f"matmul_bt_quant {kind} {M}x{N}x{K}", ours,
            lambda a, rows: (a.double() @ rows.double().T).to(a.dtype), x, rows)  # fmt: skip


@pytest.mark.parametrize("op", ["quantize_row_q8_0", "quantize_row_q8_1", "quantize_row_q8_k"])
def test_quantize_row(benchmark, op):
    compare(benchmark, "oracle", f"{op} 64x2048", getattr(oracle, op), None, normal(64, 2048, dtype=np.float32))


def test_vec_dot(benchmark):
    w = blocks("Q4_K", 256, 2048)
    a = oracle.quantize_row_q8_k(normal(256, 2048, dtype=np.float32))
    compare(benchmark, "oracle", "vec_dot Q4_K 256x2048", lambda w, a: oracle.vec_dot(w, a, quant_type="Q4_K"), None,
            w, a)  # fmt: skip


def test_embedding_quant(benchmark):
    table, ids = blocks("Q8_0", 4096, 640), np.arange(256, dtype=np.int32)
    run = lambda table, ids: oracle.embedding_quant(table, ids, quant_type="Q8_0")
    compare(benchmark, "oracle", "embedding_quant Q8_0 256x640", run, None, table, ids)


def test_repack_q8_0x4(benchmark):
    compare(benchmark, "oracle", "repack_q8_0x4 4096x640", oracle.repack_q8_0x4, None, blocks("Q8_0", 4096, 640))
