"""One token a row of Kimi delta attention, and its gates: 32 heads of 128, bfloat16, states float32."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_normal
from .bench import Bench
from .gdn import ROWS, slots, torch_slots

H, D, HIDDEN = 32, 128, 2304


def benches() -> Iterator[Bench]:
    for B in ROWS:
        yield decode(B)
    for T in (1, 64, 8192):
        yield decay_gate(T)
        yield low_rank_decay(T)


def decode(B: int) -> Bench:
    def make():
        q, k, v = (cupy_normal(B, H, D, seed=seed) for seed in range(3))
        g, beta = -abs(cupy_normal(B, H, D, dtype=F32)), abs(cupy_normal(B, H, dtype=F32)) / 4
        state = cupy_normal(B + 1, H, D, D, dtype=F32)
        return (q, k, v, g, beta, state, slots(B)), {"scale": D**-0.5}, cupy_empty(B, H, D)

    def fla():
        import torch
        from vllm.third_party.flash_linear_attention.ops.kda import fused_recurrent_kda

        q, k, v = (torch_normal(1, B, H, D) for _ in range(3))
        g, beta = -torch_normal(1, B, H, D, dtype="float32").abs(), torch_normal(1, B, H, dtype="float32").sigmoid()
        state, where = torch_normal(B + 1, H, D, D, dtype="float32"), torch_slots(B)
        cu = torch.arange(B + 1, dtype=torch.int32, device="cuda")
        return lambda: fused_recurrent_kda(q, k, v, g, beta, D**-0.5, state, cu_seqlens=cu, ssm_state_indices=where)

    size = 8 * B * H * D * D + 12 * B * H * D
    return Bench("kda", f"kda_decode {B}", ours("kda_decode", make), {"fla": fla}, size, 7 * B * H * D * D)


def decay_gate(T: int) -> Bench:
    def make():
        weights = cupy_normal(H, dtype=F32), cupy_normal(H * D, dtype=F32)
        return (cupy_normal(T, H, D), *weights), {}, cupy_empty(T, H, D, dtype=F32)

    def fla():
        from vllm.third_party.flash_linear_attention.ops.kda import fused_kda_gate

        g1, A_log, bias = torch_normal(T, H * D), torch_normal(H, dtype="float32"), torch_normal(H * D, dtype="float32")
        return lambda: fused_kda_gate(g1, A_log, D, g_bias=bias)

    return Bench("kda", f"kda_decay_gate {T}", ours("kda_decay_gate", make), {"fla": fla}, 6 * T * H * D, 5 * T * H * D)


def low_rank_decay(T: int) -> Bench:
    def make():
        return (
            (cupy_normal(T, HIDDEN), cupy_normal(D, HIDDEN), cupy_normal(H * D, D)),
            {"rounding": "vllm"},
            cupy_empty(T, H * D),
        )

    def torch():
        import torch

        x, f_a, f_b = torch_normal(T, HIDDEN), torch_normal(D, HIDDEN), torch_normal(H * D, D)
        linear = torch.nn.functional.linear
        return lambda: linear(linear(x, f_a), f_b)

    size, flops = 2 * (T * (HIDDEN + H * D) + D * (HIDDEN + H * D)), 2 * T * D * (HIDDEN + H * D)
    return Bench("kda", f"kda_low_rank_decay {T}", ours("kda_low_rank_decay", make), {"torch": torch}, size, flops)
