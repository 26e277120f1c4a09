"""Sums, scalings, casts and the embedding gather at a hidden size of 5120."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

TOKENS = [1, 1024]
H = 5120


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_add(benchmark, side, T):
    def peer(a, b):
        return (a.double() + b.double()).to(a.dtype)

    compare(benchmark, side, f"add {T}x{H} bf16", oracle.add, peer, normal(T, H), normal(T, H, seed=1))


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_mul_scalar(benchmark, side, T):
    def ours(x):
        return oracle.mul_scalar(x, 71.5)

    compare(benchmark, side, f"mul_scalar {T}x{H} bf16", ours, lambda x: (x.double() * 71.5).to(x.dtype), normal(T, H))


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_mul_col_vec_f32(benchmark, side, T):
    def peer(x, col):
        return (x.double() * col.double()).to(x.dtype)

    arrays = normal(T, H, dtype=np.float32), normal(H, dtype=np.float32, seed=1)
    compare(benchmark, side, f"mul_col_vec_f32 {T}x{H}", oracle.mul_col_vec_f32, peer, *arrays)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_cast_bf16(benchmark, side, T):
    compare(benchmark, side, f"cast_bf16 {T}x{H}", oracle.cast_bf16, lambda x: x.double().bfloat16(),
            normal(T, H, dtype=np.float32))  # fmt: skip


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_cast_f32(benchmark, side, T):
    compare(benchmark, side, f"cast_f32 {T}x{H}", oracle.cast_f32, lambda x: x.double().float(), normal(T, H))


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_embedding(benchmark, side, T):
    def peer(ids, table):
        import torch

        return torch.nn.functional.embedding(ids, table)

    ids = np.random.Generator(np.random.PCG64(2)).integers(0, 16384, T)
    compare(benchmark, side, f"embedding {T}x{H} bf16", lambda ids, table: oracle.embedding(table, ids), peer,
            ids, normal(16384, H))  # fmt: skip
