"""What this chip can do, measured: the roofline that benches of the same run are held against."""

from __future__ import annotations

from .measure import copy_time, cupy_time, torch_time, warm

_COPIED = 1 << 31
"""Bytes read and written."""

_FMA = r"""
extern "C" __global__ void chains(float* out, int turns) {
    float a[8], x = threadIdx.x * 1e-3f;
    for (int i = 0; i < 8; ++i) a[i] = x + i;
    for (int t = 0; t < turns; ++t)
        for (int i = 0; i < 8; ++i) a[i] = fmaf(a[i], 0.999f, x);
    for (int i = 1; i < 8; ++i) a[0] += a[i];
    if (a[0] == 12345.0f) out[0] = a[0];
}
"""


def copy_bandwidth() -> float:
    """GB/s of a copy of 1 GiB by a kernel, read and written bytes counted."""
    return _COPIED / copy_time(_COPIED, 3) / 1e3


def float32_rate() -> float:
    """TFLOP/s of independent float32 fused multiply-adds in registers."""
    import cupy

    kernel = cupy.RawKernel(_FMA, "chains")
    out, turns, blocks, threads = cupy.zeros(1, cupy.float32), 4096, 132 * 16, 256
    time = warm(cupy_time, lambda: kernel((blocks,), (threads,), (out, cupy.int32(turns))), 3)
    return 2 * 8 * turns * blocks * threads / time / 1e6


def tensor_rate() -> float:
    """TFLOP/s of a bfloat16 matrix product of 8192 x 8192 x 8192 in PyTorch."""
    import torch

    a, b, out = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return 2 * 8192**3 / warm(torch_time, lambda: torch.mm(a, b, out=out), 3) / 1e6


def measure() -> dict[str, float]:
    """The ceilings by name: "GB/s", and TFLOP/s by `Bench.unit`."""
    return {"GB/s": copy_bandwidth(), "float32": float32_rate(), "bfloat16 tensor cores": tensor_rate()}
