"""Prompts through Kimi delta attention in chunks, gates included: 32 heads of 128, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import F32, cupy_empty, cupy_normal, ours
from .bench import Bench

H, D, SIZE = 32, 128, 64
SQUARES = 5  # K K^T, Q K^T, w, u, P v
STATES = 3  # w h, kg v, qg h


def benches() -> Iterator[Bench]:
    yield prefill("1024", (1024,))
    yield prefill("8192", (8192,))
    yield prefill("8x1024", (1024,) * 8)
    yield prefill("32x250", (250,) * 32)


def _draw(T: int) -> tuple[np.ndarray, ...]:
    """Unit rows of q and k, v, what gates are made of, and strengths."""
    rng = np.random.Generator(np.random.PCG64(0))
    q, k, v, g1 = (rng.standard_normal((T, H, D), np.float32) for _ in range(4))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    A_log, dt_bias = np.log(rng.uniform(1, 16, H)).astype(np.float32), rng.uniform(-7, -2, H * D).astype(np.float32)
    return q, k, v, g1, rng.uniform(0, 1, (T, H)).astype(np.float32), A_log, dt_bias


def _on_torch(lengths: tuple[int, ...]):
    """(q, k, v, g1), (beta, A_log, dt_bias), a state of zeros, the starts."""
    import torch

    drawn = [torch.from_numpy(x).cuda() for x in _draw(sum(lengths))]
    wide, starts = [x.to(torch.bfloat16)[None] for x in drawn[:4]], np.cumsum([0, *lengths]).astype(np.int32)
    state = torch.zeros(len(lengths), H, D, D, device="cuda")
    return wide, (drawn[4][None], *drawn[5:]), state, torch.from_numpy(starts).cuda()


def prefill(name: str, lengths: tuple[int, ...]) -> Bench:
    T, starts = sum(lengths), np.cumsum([0, *lengths]).astype(np.int32)

    def vllm():
        from vllm.third_party.flash_linear_attention.ops.kda import chunk_kda_with_fused_gate

        (q, k, v, g1), (beta, A_log, dt_bias), state, cuts = _on_torch(lengths)
        return lambda: chunk_kda_with_fused_gate(
            q, k, v, g1, beta, A_log, dt_bias, D**-0.5, state, output_final_state=True, cu_seqlens=cuts
        )

    def fla():
        import torch
        from fla.ops.kda import chunk_kda

        (q, k, v, g1), (beta, A_log, dt_bias), state, cuts = _on_torch(lengths)
        cuts, host = cuts.long(), torch.from_numpy(starts).long()

        def call():
            with torch.no_grad():
                return chunk_kda(
                    q, k, v, g1, beta, D**-0.5, state, output_final_state=True, use_gate_in_kernel=True, A_log=A_log,
                    dt_bias=dt_bias, cu_seqlens=cuts, cu_seqlens_cpu=host,
                )  # fmt: skip

        return call

    def make():
        import cupy

        from vtlab import ops

        q, k, v, g1, beta, A_log, dt_bias = map(cupy.asarray, _draw(T))
        q, k, v, g1 = map(ops.cast_bf16, (q, k, v, g1))
        state = cupy_normal(len(lengths), H, D, D, dtype=F32)
        arguments = (q, k, v, g1, beta, A_log, dt_bias, state, cupy.asarray(starts))
        return arguments, {"scale": D**-0.5}, cupy_empty(T, H, D)

    chunks = sum(-(-length // SIZE) for length in lengths)
    moved = 10 * T * H * D + 4 * T * H + 8 * len(lengths) * H * D * D
    flops = 2 * chunks * H * (SQUARES * SIZE * SIZE * D + STATES * SIZE * D * D)
    return Bench("kda_chunk_states", f"kda_chunk_prefill {name}", ours("kda_chunk_prefill", make),
                 {"vllm": vllm, "fla": fla}, moved, flops, "bfloat16 tensor cores")  # fmt: skip
