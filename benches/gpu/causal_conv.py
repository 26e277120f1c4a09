"""The short causal convolution of 10240 channels and four taps, in bfloat16: prompts, and one token a row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import cupy_empty, cupy_normal, ours, torch_normal
from .bench import Bench
from .gdn import ROWS, slots, torch_slots

C, K = 10240, 4


def benches() -> Iterator[Bench]:
    for lengths in ((1024,), (8192,), (256,) * 32):
        yield forward(lengths)
    for B in ROWS:
        yield update(B)
    yield update_spec(16, 4)
    yield short_conv(8192)


def _starts(lengths: tuple[int, ...]):
    import cupy

    return cupy.asarray(np.cumsum([0, *lengths]).astype(np.int32))


def _ones(count: int):
    import cupy

    return cupy.ones(count, cupy.int32)


def forward(lengths: tuple[int, ...]) -> Bench:
    T, N = sum(lengths), len(lengths)

    def make():
        arrays = cupy_normal(T, C), cupy_normal(C, K), cupy_normal(N + 1, C, K - 1), _starts(lengths), _ones(N)
        return (*arrays, None, slots(N)), {}, cupy_empty(T, C)

    def vllm():
        import torch
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn
        from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

        x, weight, state = torch_normal(T, C).t(), torch_normal(C, K), torch_normal(N + 1, C, K - 1)
        starts = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        nums, batch, offsets = compute_causal_conv1d_metadata(starts, device=torch.device("cuda"))
        plan = type("Plan", (), {"nums_dict": nums, "batch_ptr": batch, "token_chunk_offset_ptr": offsets})()
        fresh, where = torch.ones(N, dtype=torch.bool, device="cuda"), torch_slots(N)
        starts = starts.cuda()
        return lambda: causal_conv1d_fn(x, weight, None, state, starts, where, fresh, "silu", metadata=plan)

    name = f"causal_conv1d_fwd {N}x{lengths[0]}"
    return Bench("causal_conv", name, ours("causal_conv1d_fwd", make), {"vllm": vllm}, 4 * T * C, 12 * T * C)


def update(B: int) -> Bench:
    def make():
        arrays = cupy_normal(B, C), cupy_normal(C, K), cupy_normal(B + 1, C, K - 1)
        return (*arrays, None, slots(B)), {}, cupy_empty(B, C)

    def vllm():
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

        x, weight, state = torch_normal(B, C), torch_normal(C, K), torch_normal(B + 1, C, K - 1)
        where = torch_slots(B)
        return lambda: causal_conv1d_update(x, state, weight, None, "silu", where)

    size = 2 * C * (B * (2 + 2 * (K - 1)) + K)
    return Bench("causal_conv", f"causal_conv1d_update {B}", ours("causal_conv1d_update", make), {"vllm": vllm}, size)


def update_spec(B: int, M: int) -> Bench:
    def make():
        arrays = cupy_normal(B, M, C), cupy_normal(C, K), cupy_normal(B + 1, C, K + M - 2), _ones(B)
        return (*arrays, None, slots(B)), {}, cupy_empty(B, M, C)

    size = 2 * C * (B * (2 * M + 2 * (K + M - 2)) + K)
    op = "causal_conv1d_update_spec"
    return Bench("causal_conv", f"{op} {B}x{M}", ours(op, make), {}, size)


def short_conv(T: int, width: int = 2048) -> Bench:
    def make():
        arrays = cupy_normal(T, 3 * width), cupy_normal(width, 3), cupy_normal(1, width, 2), _starts((T,)), _ones(1)
        return arrays, {}, cupy_empty(T, width)

    return Bench("causal_conv", f"short_conv {T}", ours("short_conv", make), {}, 8 * T * width, 8 * T * width)
