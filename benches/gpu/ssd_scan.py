"""Prompts through Mamba-2 in chunks of 256: 64 and 80 heads of 64, states of 128, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from .arrays import F32, cupy_empty, ours
from .bench import Bench

P, N, SIZE = 64, 128, 256


def benches() -> Iterator[Bench]:
    for heads, groups in ((64, 1), (80, 8)):
        for name, lengths in (("1024", (1024,)), ("8192", (8192,))):
            yield prefill(name, lengths, heads, groups)
    yield prefill("8x1024", (1024,) * 8, 64, 8)
    yield prefill("32x250", (250,) * 32, 64, 8)


def _draw(T: int, heads: int, groups: int) -> dict[str, np.ndarray]:
    """x, B and C, time steps as softplus takes them, A as Mamba-2 begins with it."""
    rng = np.random.Generator(np.random.PCG64(0))
    shapes = {"x": (T, heads, P), "dt": (T, heads), "B": (T, groups, N), "C": (T, groups, N)}
    parts = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    A, D = -rng.uniform(1, 16, heads).astype(np.float32), rng.standard_normal(heads, np.float32)
    return parts | {"A": A, "D": D, "dt_bias": rng.uniform(-7, -2, heads).astype(np.float32)}


def arguments_of(T: int, heads: int, groups: int):
    """What our ops take of `_draw`, on the device."""
    import cupy

    from vtlab import ops

    drawn = {name: cupy.asarray(part) for name, part in _draw(T, heads, groups).items()}
    x, dt, B, C = (ops.cast_bf16(drawn[name]) for name in ("x", "dt", "B", "C"))
    return (x, dt, drawn["A"], B, C), {"D": drawn["D"], "dt_bias": drawn["dt_bias"], "dt_softplus": True}


def prefill(name: str, lengths: tuple[int, ...], heads: int, groups: int) -> Bench:
    T, starts = sum(lengths), np.cumsum([0, *lengths]).astype(np.int32)

    def vllm(state_dtype: str):
        import torch
        from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen as scan

        from vtlab.oracle.ssd import chunk_plan

        drawn = {name: torch.from_numpy(part).cuda() for name, part in _draw(T, heads, groups).items()}
        x, dt, B, C = (drawn[name].to(torch.bfloat16) for name in ("x", "dt", "B", "C"))
        marks = torch.from_numpy(starts).cuda()
        cuts, last, owner = (torch.from_numpy(part).cuda() for part in chunk_plan(starts, SIZE))
        out = torch.empty_like(x)
        kind = getattr(torch, state_dtype)
        state = torch.zeros(len(lengths), heads, P, N, device="cuda", dtype=kind)
        return lambda: scan(
            x, dt, drawn["A"], B, C, SIZE, marks, cuts, last, owner, out, D=drawn["D"], dt_bias=drawn["dt_bias"],
            initial_states=state, dt_softplus=True, state_dtype=kind,
        )  # fmt: skip

    def make():
        import cupy

        arguments, options = arguments_of(T, heads, groups)
        state = cupy.zeros((len(lengths), heads, P, N), F32)
        out = cupy_empty(T, heads, P), cupy_empty(len(lengths), heads, P, N, dtype=F32)
        marks = cupy.asarray(starts)
        return (*arguments, marks), {**options, "initial_states": state, "chunk_size": SIZE}, out

    chunks = [min(SIZE, length - begin) for length in lengths for begin in range(0, length, SIZE)]
    pairs = sum(size * (size + 1) // 2 for size in chunks)
    moved = 4 * T * heads * P + 2 * T * heads + 4 * T * groups * N + 8 * len(lengths) * heads * P * N
    flops = 2 * (2 * T * heads * P * N + pairs * (heads * P + groups * N))
    title = f"ssd_chunk_prefill {name} {heads}x{P} {groups} group{'s' * (groups > 1)}"
    peers = {"vllm": partial(vllm, "float32"), "vllm, bf16 states": partial(vllm, "bfloat16")}
    return Bench("ssd_scan", title, ours("ssd_chunk_prefill", make), peers, moved, flops, "bfloat16 tensor cores")
