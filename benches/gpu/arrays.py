"""Random operands for CuPy and torch, and calls of our ops with everything preallocated. Used on a GPU only."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


def cupy_normal(*shape: int, dtype=BF16, seed: int = 0):
    """Unit normal data in CuPy."""
    import cupy

    from vtlab import ops

    values = cupy.random.default_rng(seed).standard_normal(shape, dtype=cupy.float32)
    return ops.cast_bf16(values) if dtype == BF16 else values.astype(dtype)


def cupy_words(*shape: int):
    """Words of random bits in CuPy."""
    import cupy

    return cupy.random.randint(-(2**31), 2**31 - 1, shape, dtype=np.int32)


def torch_words(*shape: int):
    """The same in torch."""
    import torch

    return torch.randint(-(2**31), 2**31 - 1, shape, device="cuda", dtype=torch.int32)


def cupy_empty(*shape: int, dtype=BF16):
    """Room for a result in CuPy."""
    import cupy

    return cupy.empty(shape, dtype)


def torch_normal(*shape: int, dtype: str = "bfloat16"):
    """Unit normal data in torch."""
    import torch

    return torch.randn(shape, device="cuda", dtype=torch.float32).to(getattr(torch, dtype))


def torch_empty(*shape: int, dtype: str = "bfloat16"):
    """Room for a result in torch."""
    import torch

    return torch.empty(shape, device="cuda", dtype=getattr(torch, dtype))


def ours(op: str, make: Callable[[], tuple[tuple, dict, object]]) -> Callable:
    """A bench's call of ``ops.<op>``: `make` gives (arguments, keywords, what to write to), on the device."""

    def prepare():
        from vtlab import ops

        args, options, out = make()
        function = getattr(ops, op)
        return lambda: function(*args, **options, out=out)

    return prepare


def vllm_ops():
    """vLLM's custom ops, ``torch.ops._C``; ImportError where vLLM is not installed."""
    import torch
    import vllm._custom_ops  # noqa: F401  (registers them)

    return torch.ops._C
