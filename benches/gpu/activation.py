"""Gated activations at the intermediate width, and the soft cap over a vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_empty, torch_normal, vllm_ops
from .bench import INTERMEDIATE, TOKENS, VOCABULARY, Bench

_VLLM_NAMES = {"silu_and_mul": "silu_and_mul", "gelu_and_mul": "gelu_tanh_and_mul"}
_FLOPS = {"silu_and_mul": 5, "gelu_and_mul": 10}


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        for op in _VLLM_NAMES:
            for rounding in ("vt", "vllm"):
                yield gated(op, rounding, T)
        if T <= 256:
            yield soft_cap(T)


def gated(op: str, rounding: str, T: int, D: int = INTERMEDIATE) -> Bench:
    def torch():
        from torch.nn import functional as F

        x = torch_normal(T, 2 * D)
        act = F.silu if op == "silu_and_mul" else lambda g: F.gelu(g, approximate="tanh")
        return lambda: act(x[:, :D]) * x[:, D:]

    def vllm():
        call, x, out = getattr(vllm_ops(), _VLLM_NAMES[op]), torch_normal(T, 2 * D), torch_empty(T, D)
        return lambda: call(out, x)

    make = ours(op, lambda: ((cupy_normal(T, 2 * D),), {"rounding": rounding}, cupy_empty(T, D)))
    peers = {"torch": torch, "vllm": vllm}
    return Bench("activation", f"{op} {rounding} {T}x{D}", make, peers, 6 * T * D, _FLOPS[op] * T * D)


def soft_cap(T: int, V: int = VOCABULARY) -> Bench:
    def torch():
        x = torch_normal(T, V, dtype="float32")
        return lambda: 30 * (x / 30).tanh()

    make = ours("soft_cap", lambda: ((cupy_normal(T, V, dtype=F32), 30.0), {}, cupy_empty(T, V, dtype=F32)))
    return Bench("activation", f"soft_cap f32 {T}x{V}", make, {"torch": torch}, 8 * T * V, 8 * T * V)
