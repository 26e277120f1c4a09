"""A row of float64 truth has the same bytes whatever stands beside it, before any rounding could hide a difference."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from vtlab.ops.numerics import SUM_BLOCK, TRUTH, threads, truth_matmul

from .compare import assert_bytes
from .scalar import draw

SHAPES = [(1, 1), (5, 7), (64, 130), (257, 33), (640, 300), (768, 127), (2048, 65)]


def operands(K, N, rows=37):
    return draw((rows, K), "float32", K), draw((N, K), "float32", N)


@pytest.mark.parametrize("K, N", SHAPES)
def test_rows_and_weights_stand_alone(K, N):
    a, b = operands(K, N)
    whole = TRUTH.matmul(a, b)
    for count in (1, 2, 3, 7, 8, 9, 16, 31):
        for start in (0, 1, 5):
            assert_bytes(TRUTH.matmul(a[start : start + count], b), whole[start : start + count])
    for start, stop in ((0, 1), (N // 2, N), (N // 3, N // 3 + 3)):
        assert_bytes(TRUTH.matmul(a, b[start:stop]), whole[:, start:stop])


@pytest.mark.parametrize("before, after", [(0, 1), (1, 0), (2, 3)])
def test_blocks_of_zeros_change_nothing(before, after):
    a, b = operands(2 * SUM_BLOCK, 70)
    pad = ((0, 0), (before * SUM_BLOCK, after * SUM_BLOCK))
    assert_bytes(TRUTH.matmul(np.pad(a, pad), np.pad(b, pad)), TRUTH.matmul(a, b))
    wide = TRUTH.load(a)
    assert_bytes(TRUTH.sum(np.pad(wide, pad)), TRUTH.sum(wide))


def test_sums_follow_no_strides():
    x = TRUTH.load(draw((9, 700), "float32", 1))
    whole = TRUTH.sum(x)
    assert_bytes(TRUTH.sum(np.asfortranarray(x)), whole)
    assert_bytes(TRUTH.sum(x.T.copy(), axis=0), whole)
    for row in range(9):
        assert_bytes(TRUTH.sum(x[row : row + 1]), whole[row : row + 1])
        assert_bytes(TRUTH.sum(x[:, row::9].T[:1], axis=1), TRUTH.sum(x[:, row::9].T, axis=1)[:1])


@pytest.mark.parametrize("cores", [1, 2, 5])
def test_threads_change_nothing(cores, monkeypatch):
    a, b = operands(640, 2000, rows=3)
    monkeypatch.setattr(threads, "cores", lambda: 1)
    alone = TRUTH.matmul(a, b)
    monkeypatch.setattr(threads, "cores", lambda: cores)
    monkeypatch.setattr(threads, "_WORTH_IT", 1)
    assert_bytes(TRUTH.matmul(a, b), alone)


def digests():
    """One digest over products of many shapes, for comparison across processes."""
    digest = hashlib.sha256()
    for K, N in SHAPES:
        digest.update(TRUTH.matmul(*operands(K, N)).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("count", ["1", "2", "4"])
def test_blas_threads_change_nothing(count):
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": count, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    code = "from vtlab.parity.test_row_invariance import digests; print(digests())"
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == digests()


def test_tiles_stay_where_blas_starts_no_threads():
    """OpenBLAS multiplies alone up to 2**18 multiply-adds; past that its threads and ours would fight for cores."""
    assert truth_matmul.ROWS * truth_matmul.COLUMNS * SUM_BLOCK <= 2**18
