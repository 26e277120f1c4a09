"""One token a row of Mamba: Mamba-2's 128 heads of 64 by 128, and Mamba-1's 8192 channels by 16; states float32."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_empty, torch_normal
from .bench import Bench
from .gdn import ROWS, slots, torch_slots


def benches() -> Iterator[Bench]:
    for B in ROWS:
        yield update(B, 128, 64, 128, 8)
    yield update(64, 128, 64, 128, 8, tied=False)
    for B in ROWS:
        yield update(B, 1, 8192, 16, 1, tied=False)


def update(B: int, H: int, P: int, N: int, G: int, tied: bool = True) -> Bench:
    """tied: one A a head, as Mamba-2 has it."""

    def make():
        import cupy

        numbers = -abs(cupy_normal(*((H, 1, 1) if tied else (H, P, N)), dtype=F32))
        A, (D, bias) = cupy.broadcast_to(numbers, (H, P, N)), (cupy_normal(H, P, dtype=F32) for _ in range(2))
        state, x, dt = cupy_normal(B + 1, H, P, N, dtype=F32), cupy_normal(B, H, P), cupy_normal(B, H, P)
        arguments = (state, x, dt, A, cupy_normal(B, G, N), cupy_normal(B, G, N), D, None, bias, slots(B))
        return arguments, {"dt_softplus": True}, cupy_empty(B, H, P)

    def vllm():
        from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

        state, x, out = torch_normal(B + 1, H, P, N, dtype="float32"), torch_normal(B, H, P), torch_empty(B, H, P)
        dt = torch_normal(B, H, 1).expand(-1, -1, P) if tied else torch_normal(B, H, P)
        shape = (H, 1, 1) if tied else (H, P, N)
        A = -torch_normal(*shape, dtype="float32").abs().expand(H, P, N)
        D, bias = (torch_normal(*shape[:2], dtype="float32").expand(H, P) for _ in range(2))
        B_, C, where = torch_normal(B, G, N), torch_normal(B, G, N), torch_slots(B)
        return lambda: selective_state_update(state, x, dt, A, B_, C, D, bias, None, True, where, out=out)

    size = 8 * B * H * P * N + 6 * B * H * P + (0 if tied else 4 * H * P * N)
    name = f"selective_state_update {B} {H}x{P}x{N}" + " any A" * (not tied and N == 128)
    call = ours("selective_state_update", make)
    return Bench("ssm", name, call, {"vllm": vllm}, size, 5 * B * H * P * N)
