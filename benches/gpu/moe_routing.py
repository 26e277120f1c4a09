"""Routes of tokens, and sums of what experts gave: Qwen3 30B-A3B's 128 experts, Qwen3.5's 256, DeepSeek's groups."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_empty, torch_normal, vllm_ops
from .bench import Bench

TOKENS = (1, 16, 64, 256, 2048, 8192)
CHOICES, HIDDEN = 8, 2048
GROUPS, KEPT, FACTOR = 8, 4, 2.5


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield route(T, 128)
        yield route(T, 256)
        yield route(T, 512)
        yield grouped(T, 256)
        yield summed(T)


def vllm_moe():
    """vLLM's ops for experts; AttributeError for those that its build lacks."""
    import torch

    vllm_ops()
    return torch.ops._moe_C


def _routes(T: int):
    return cupy_empty(T, CHOICES, dtype=F32), cupy_empty(T, CHOICES, dtype="int32")


def route(T: int, E: int) -> Bench:
    def make():
        return (cupy_normal(T, E),), {"top_k": CHOICES}, _routes(T)

    def vllm():
        call, logits = vllm_moe().topk_softmax, torch_normal(T, E)
        weights = torch_empty(T, CHOICES, dtype="float32")
        ids, rows = (torch_empty(T, CHOICES, dtype="int32") for _ in range(2))
        return lambda: call(weights, ids, rows, logits, True, None)

    def torch():
        logits = torch_normal(T, E)

        def call():
            weights, ids = logits.float().softmax(-1).topk(CHOICES)
            return weights / weights.sum(-1, keepdim=True), ids.int()

        return call

    call, peers = ours("moe_router_topk", make), {"vllm": vllm, "torch": torch}
    return Bench("moe_routing", f"moe_router_topk {T}x{E}", call, peers, 2 * T * E + 8 * T * CHOICES, 8 * T * E)


def grouped(T: int, E: int) -> Bench:
    def make():
        options = {
            "top_k": CHOICES, "scoring": "sigmoid", "num_expert_group": GROUPS, "topk_group": KEPT,
            "routed_scaling_factor": FACTOR,
        }  # fmt: skip
        return (cupy_normal(T, E, dtype=F32), cupy_normal(E, dtype=F32) / 8), options, _routes(T)

    def vllm():
        call, logits = vllm_moe().grouped_topk, torch_normal(T, E, dtype="float32")
        bias = torch_normal(E, dtype="float32") / 8
        return lambda: call(logits, GROUPS, KEPT, CHOICES, True, FACTOR, bias, 1)

    name, moved = f"moe_router_topk {T}x{E} in groups", 4 * T * E + 4 * E + 8 * T * CHOICES
    return Bench("moe_routing", name, ours("moe_router_topk", make), {"vllm": vllm}, moved, 16 * T * E)


def summed(T: int) -> Bench:
    def make():
        return (cupy_normal(T, CHOICES, HIDDEN),), {}, cupy_empty(T, HIDDEN)

    def vllm():
        call, x, out = vllm_moe().moe_sum, torch_normal(T, CHOICES, HIDDEN), torch_empty(T, HIDDEN)
        return lambda: call(x, out, None, None)

    def torch():
        import torch

        x, out = torch_normal(T, CHOICES, HIDDEN), torch_empty(T, HIDDEN)
        return lambda: torch.sum(x, dim=1, out=out)

    size, peers = 2 * T * HIDDEN * (CHOICES + 1), {"vllm": vllm, "torch": torch}
    return Bench("moe_routing", f"moe_sum {T}", ours("moe_sum", make), peers, size, T * CHOICES * HIDDEN)
