"""Prompts through the gated delta rule in chunks: 16 key and 48 value heads of 128, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import F32, cupy_empty, cupy_normal, ours
from .bench import Bench

HK, HV, D, SIZE = 16, 48, 128, 64


def benches() -> Iterator[Bench]:
    yield prefill("1024", (1024,))
    yield prefill("8192", (8192,))
    yield prefill("8x1024", (1024,) * 8)
    yield prefill("32x250", (250,) * 32)


def _draw(T: int) -> tuple[np.ndarray, ...]:
    """Unit rows of q and k, v, and decays and strengths as gates make them."""
    rng = np.random.Generator(np.random.PCG64(0))
    q, k = (rng.standard_normal((T, HK, D), np.float32) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, g = rng.standard_normal((T, HV, D), np.float32), -rng.exponential(0.5, (T, HV)).astype(np.float32)
    return q, k, v, g, rng.uniform(0, 1, (T, HV)).astype(np.float32)


def prefill(name: str, lengths: tuple[int, ...]) -> Bench:
    T, starts = sum(lengths), np.cumsum([0, *lengths]).astype(np.int32)

    def fla():
        import torch
        from vllm.third_party.flash_linear_attention.ops.chunk import chunk_gated_delta_rule

        q, k, v, g, beta = (torch.from_numpy(x).cuda()[None] for x in _draw(T))
        q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
        state = torch.zeros(len(lengths), HV, D, D, device="cuda")
        cuts = torch.from_numpy(starts).cuda()
        return lambda: chunk_gated_delta_rule(
            q, k, v, g, beta, scale=D**-0.5, initial_state=state, output_final_state=True, cu_seqlens=cuts
        )

    def make():
        import cupy

        from vtlab import ops

        q, k, v, g, beta = map(cupy.asarray, _draw(T))
        q, k, v = map(ops.cast_bf16, (q, k, v))
        state = cupy_normal(len(lengths), HV, D, D, dtype=F32)
        return (q, k, v, g, beta, state, cupy.asarray(starts)), {"scale": D**-0.5}, cupy_empty(T, HV, D)

    chunks = sum(-(-length // SIZE) for length in lengths)
    squares, states = 5 * SIZE * SIZE * D, 3 * SIZE * D * D  # K K^T, w, u, q k^T, P v; w h, k v, q h
    moved = 4 * T * (HK + HV) * D + 8 * T * HV + 8 * len(lengths) * HV * D * D
    return Bench("gdn_chunk_states", f"gdn_chunk_prefill {name}", ours("gdn_chunk_prefill", make), {"fla": fla}, moved,
                 2 * chunks * HV * (squares + states), "bfloat16 tensor cores")  # fmt: skip
