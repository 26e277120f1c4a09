"""Who the benches set side by side: the oracle, the CPU tier, and the same computation in float64 PyTorch, where torch
happens to be importable."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest

from vtlab import ops
from vtlab.ops.table import Op

HAVE_TORCH = importlib.util.find_spec("torch") is not None
_TORCH = pytest.param("torch float64", marks=pytest.mark.skipif(not HAVE_TORCH, reason="torch is not there"))
SIDES = ["oracle", "cpu tier", _TORCH]


def tensor(array: np.ndarray):
    """The array as a torch tensor of the same storage dtype, on the same memory."""
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def compare(benchmark, side: str, group: str, oracle: Callable, torch: Callable, *arrays: np.ndarray) -> None:
    """Time `oracle(*arrays)` or `torch(*tensors)` under one group, so that the table sets the two side by side."""
    benchmark.group = group
    call, args = (torch, tuple(map(tensor, arrays))) if side.startswith("torch") else (oracle, arrays)
    with served_by_the_tier() if side == "cpu tier" else contextlib.nullcontext():
        call(*args)
        benchmark.pedantic(call, args, rounds=9, iterations=1 if arrays[0].size > 1 << 16 else 20)


@contextlib.contextmanager
def served_by_the_tier() -> Iterator[None]:
    """Calls of the oracle's ops go through `vtlab.ops` to the best provider of a CPU."""
    before = Op.__call__
    Op.__call__ = lambda self, *args, **kwargs: getattr(ops, self.contract.name)(*args, **kwargs)
    try:
        yield
    finally:
        Op.__call__ = before


def normal(*shape: int, dtype=ml_dtypes.bfloat16, seed: int = 0) -> np.ndarray:
    """Unit normal data."""
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(shape, np.float32).astype(dtype)
