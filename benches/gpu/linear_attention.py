"""One token a row of lightning attention: 64 heads of 128, bfloat16, states float32."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_normal
from .bench import Bench
from .gdn import ROWS, slots, torch_slots

H, D = 64, 128


def benches() -> Iterator[Bench]:
    for B in ROWS:
        yield decode(B)


def decode(B: int) -> Bench:
    def make():
        q, k, v = (cupy_normal(B, H, D, seed=seed) for seed in range(3))
        state = cupy_normal(B + 1, H, D, D, dtype=F32)
        return (q, k, v, state, abs(cupy_normal(H, dtype=F32)), slots(B)), {}, cupy_empty(B, H * D)

    def vllm():
        from vllm.model_executor.layers.lightning_attn import linear_decode_forward_triton

        q, k, v = (torch_normal(B, H, 1, D) for _ in range(3))
        state, slope = torch_normal(B + 1, H, D, D, dtype="float32"), torch_normal(H, dtype="float32").abs()
        where = torch_slots(B)
        return lambda: linear_decode_forward_triton(q, k, v, state, slope, where)

    size, call = 8 * B * H * D * D + 8 * B * H * D, ours("linear_attention_decode", make)
    return Bench("linear_attention", f"linear_attention_decode {B}", call, {"vllm": vllm}, size, 4 * B * H * D * D)
