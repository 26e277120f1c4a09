"""The arithmetic's own speed: rounding, fma, ordered sums, the float32 functions, products with stored weights.

Peers: ml_dtypes' cast (which rounds float64 twice) for rounding, NumPy's float32 functions for MIRROR's, SciPy's
float64 functions for TRUTH's, one float32 BLAS product of the same weight for TRUTH.matmul. A group is one comparison.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from scipy import special

from vtlab.ops.numerics import MIRROR, TRUTH, fma_f32, round_to, sequential, strided_tree

COUNT = 1 << 22


def drawn(*shape, dtype=np.float64):
    return round_to(np.random.default_rng(0).standard_normal(shape), dtype)


def elements(benchmark, group: str, side: str, call, *arrays):
    """One comparison: seconds, and elements of the first array a second."""
    benchmark.group = group
    benchmark.name = side
    benchmark.pedantic(call, args=arrays, rounds=5, iterations=1, warmup_rounds=1)
    benchmark.extra_info["elements_per_second"] = arrays[0].size / benchmark.stats.stats.min


FORMATS = [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn]


@pytest.mark.parametrize("side", ["vtlab", "ml_dtypes"])
@pytest.mark.parametrize("dtype", FORMATS, ids=lambda t: np.dtype(t).name)
def test_round_to(benchmark, dtype, side):
    call = {"vtlab": lambda x: round_to(x, dtype), "ml_dtypes": lambda x: x.astype(dtype)}[side]
    elements(benchmark, f"float64 -> {np.dtype(dtype).name}", side, call, drawn(COUNT))


@pytest.mark.parametrize("side", ["fused", "separate"])
def test_fma(benchmark, side):
    a, b, c = (drawn(1 << 13, dtype=np.float32) for _ in range(3))
    elements(benchmark, "fma 8192", side, fma_f32 if side == "fused" else lambda a, b, c: a * b + c, a, b, c)


@pytest.mark.parametrize("side", [sequential, strided_tree(256), "numpy"], ids=str)
@pytest.mark.parametrize("rows", [1, 1024])
def test_sum(benchmark, rows, side):
    call = (lambda x: x.sum(-1)) if side == "numpy" else lambda x: MIRROR.sum(x, order=side)
    elements(benchmark, f"float32 sums of {rows}x5120", str(side), call, drawn(rows, 5120, dtype=np.float32))


SINGLE = {"exp": np.exp, "log1p": np.log1p, "tanh": np.tanh, "sigmoid": special.expit, "silu": None, "gelu_erf": None}


@pytest.mark.parametrize("side", ["vtlab", "peer"])
@pytest.mark.parametrize("name", SINGLE)
def test_mirror_functions(benchmark, name, side):
    call = getattr(MIRROR, name) if side == "vtlab" else SINGLE[name]
    if call is None:
        pytest.skip("NumPy and SciPy have no such function")
    x = np.abs(drawn(COUNT, dtype=np.float32)) if name == "log1p" else drawn(COUNT, dtype=np.float32)
    elements(benchmark, f"float32 {name}", side, call, x)


@pytest.mark.parametrize("side", ["vtlab", "scipy"])
@pytest.mark.parametrize("name", ["erf", "gelu_erf", "sigmoid"])
def test_truth_functions(benchmark, name, side):
    peers = {"erf": special.erf, "gelu_erf": lambda x: x * special.ndtr(x), "sigmoid": special.expit}
    elements(benchmark, f"float64 {name}", side, getattr(TRUTH, name) if side == "vtlab" else peers[name], drawn(COUNT))


@pytest.mark.parametrize("side", ["vtlab", "float32 blas"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("rows", [1, 64])
def test_truth_matmul(benchmark, rows, dtype, side):
    weight = drawn(65536, 640, dtype=dtype)
    x = drawn(rows, 640)
    single, wide = x.astype(np.float32), weight.astype(np.float32)
    call = (lambda w: TRUTH.matmul(x, w)) if side == "vtlab" else lambda w: single @ wide.T
    elements(benchmark, f"{rows}x640 by {np.dtype(dtype).name} [65536, 640]", side, call, weight)
    benchmark.extra_info["weight_bytes_per_second"] = weight.nbytes / benchmark.stats.stats.min


@pytest.mark.parametrize("side", ["fused", "separate"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
def test_mirror_matmul(benchmark, dtype, side):
    weight, x = drawn(4096, 640, dtype=dtype), drawn(4, 640, dtype=dtype)
    call = lambda w: MIRROR.matmul(x, w, order=strided_tree(32), fused=side == "fused")
    elements(benchmark, f"mirror 4x640 by {np.dtype(dtype).name} [4096, 640]", side, call, weight)
