"""The peer of the oracle benches: the same computation in float64 PyTorch, where torch happens to be importable."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

HAVE_TORCH = importlib.util.find_spec("torch") is not None
SIDES = ["oracle", pytest.param("torch float64", marks=pytest.mark.skipif(not HAVE_TORCH, reason="torch is not there"))]


def tensor(array: np.ndarray):
    """The array as a torch tensor of the same storage dtype, on the same memory."""
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def compare(benchmark, side: str, group: str, oracle: Callable, torch: Callable, *arrays: np.ndarray) -> None:
    """Time `oracle(*arrays)` or `torch(*tensors)` under one group, so that the table sets the two side by side."""
    benchmark.group = group
    call, args = (oracle, arrays) if side == "oracle" else (torch, tuple(map(tensor, arrays)))
    call(*args)
    benchmark.pedantic(call, args, rounds=9, iterations=1 if arrays[0].size > 1 << 16 else 20)


def normal(*shape: int, dtype=ml_dtypes.bfloat16, seed: int = 0) -> np.ndarray:
    """Unit normal data."""
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(shape, np.float32).astype(dtype)
