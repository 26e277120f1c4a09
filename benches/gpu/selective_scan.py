"""Mamba-1's scan of a prompt: 8192 channels with states of 16, in bfloat16, gated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_empty, torch_normal, vllm_ops
from .bench import Bench

DIM, N = 8192, 16


def benches() -> Iterator[Bench]:
    for T in (128, 2048):
        yield scan(T)


def scan(T: int) -> Bench:
    def make():
        import cupy

        A, starts = -abs(cupy_normal(DIM, N, dtype=F32)), cupy.asarray(np.int32([0, T]))
        wide = [cupy_normal(DIM, T, seed=seed) for seed in range(3)]
        D, bias = (cupy_normal(DIM, dtype=F32, seed=seed) for seed in range(2))
        groups = [cupy_normal(1, N, T, seed=seed) for seed in range(2)]
        arguments = (*wide[:2], A, *groups, cupy_normal(1, DIM, N, dtype=F32), starts, D, wide[2], bias)
        return arguments, {"delta_softplus": True}, cupy_empty(DIM, T)

    def vllm():
        import torch

        call = vllm_ops().selective_scan_fwd
        u, delta, z = (torch_normal(DIM, T) for _ in range(3))
        A, D, bias = -torch_normal(DIM, N, dtype="float32").abs(), torch_normal(DIM, dtype="float32"), None
        B, C, state = torch_normal(1, N, T), torch_normal(1, N, T), torch_empty(1, DIM, N, dtype="float32")
        starts = torch.tensor([0, T], dtype=torch.int32, device="cuda")
        return lambda: call(u, delta, A, B, C, D, z, bias, True, starts, None, None, state, -1, 1024, *[None] * 5)

    moved, flops = 8 * DIM * T + 8 * DIM * N + 4 * N * T, 6 * DIM * N * T
    return Bench("selective_scan", f"selective_scan {T} {DIM}x{N}", ours("selective_scan", make), {"vllm": vllm},
                 moved, flops)  # fmt: skip
