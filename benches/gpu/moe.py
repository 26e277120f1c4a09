"""Experts' products at Qwen3 30B-A3B's shapes: 128 experts, 8 of them a token, 2048 wide inside of 768; bfloat16.

`up` and `down` are one grouped product each, sorting included, beside vLLM's Triton kernel with its own tuned tiles,
and beside torch's grouped product, which is given its rows in order. `experts` is all of it, from a token's row to the
sum of what its experts gave, beside vLLM's fused_experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_empty, torch_normal
from .bench import Bench

TOKENS = (1, 16, 64, 256, 2048)
EXPERTS, CHOICES, HIDDEN, INNER = 128, 8, 2048, 768
_UNIT = "bfloat16 tensor cores"


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield up(T)
        yield down(T)
        yield experts(T)


def chosen(T: int, experts: int = EXPERTS, choices: int = CHOICES) -> np.ndarray:
    """Different experts for each token, any as likely as another."""
    return np.random.default_rng(T).random((T, experts)).argsort(axis=1)[:, :choices].astype(np.int32)


def cupy_chosen(T: int):
    import cupy

    return cupy.asarray(chosen(T))


def torch_chosen(T: int):
    import torch

    return torch.from_numpy(chosen(T)).cuda()


def weight_bytes(T: int, N: int, K: int) -> int:
    """Of the matrices that some row goes to."""
    return 2 * N * K * len(np.unique(chosen(T)))


def up(T: int) -> Bench:
    pairs, N, K = T * CHOICES, 2 * INNER, HIDDEN

    def make():
        return (cupy_normal(T, K), cupy_normal(EXPERTS, N, K), cupy_chosen(T)), {}, cupy_empty(pairs, N)

    peers = {"vllm": lambda: triton(T, N, K, each=False), "torch": lambda: grouped(T, N, K)}
    moved = weight_bytes(T, N, K) + 2 * T * K + 2 * pairs * N
    call = ours("moe_grouped_gemm", make)
    return Bench("moe", f"moe_grouped_gemm up {T}", call, peers, moved, 2 * pairs * N * K, _UNIT)


def down(T: int) -> Bench:
    pairs, N, K = T * CHOICES, HIDDEN, INNER

    def make():
        arguments = cupy_normal(pairs, K), cupy_normal(EXPERTS, N, K), cupy_chosen(T)
        return (*arguments, abs(cupy_normal(T, CHOICES, dtype=F32))), {}, cupy_empty(pairs, N)

    peers = {"vllm": lambda: triton(T, N, K, each=True), "torch": lambda: grouped(T, N, K)}
    moved = weight_bytes(T, N, K) + 2 * pairs * (N + K)
    call = ours("moe_grouped_gemm", make)
    return Bench("moe", f"moe_grouped_gemm down {T}", call, peers, moved, 2 * pairs * N * K, _UNIT)


def experts(T: int) -> Bench:
    pairs = T * CHOICES

    def chain():
        from vtlab import ops

        x, ids, weights = cupy_normal(T, HIDDEN), cupy_chosen(T), abs(cupy_normal(T, CHOICES, dtype=F32))
        first, second = cupy_normal(EXPERTS, 2 * INNER, HIDDEN), cupy_normal(EXPERTS, HIDDEN, INNER)
        both, inner, each = (cupy_empty(pairs, width) for width in (2 * INNER, INNER, HIDDEN))
        out = cupy_empty(T, HIDDEN)

        def call():
            ops.moe_grouped_gemm(x, first, ids, out=both)
            ops.silu_and_mul(both, rounding="vllm", out=inner)
            ops.moe_grouped_gemm(inner, second, ids, weights, out=each)
            ops.moe_sum(each.reshape(T, CHOICES, HIDDEN), out=out)

        return call

    def vllm():
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts_impl

        x, ids = torch_normal(T, HIDDEN), torch_chosen(T)
        first, second = torch_normal(EXPERTS, 2 * INNER, HIDDEN), torch_normal(EXPERTS, HIDDEN, INNER)
        weights = torch_normal(T, CHOICES, dtype="float32").abs()
        return lambda: fused_experts_impl(x, first, second, weights, ids)

    moved = weight_bytes(T, 3 * INNER, HIDDEN) + 4 * T * HIDDEN
    return Bench("moe", f"experts {T}", chain, {"vllm": vllm}, moved, 6 * pairs * INNER * HIDDEN, _UNIT)


def triton(T: int, N: int, K: int, each: bool):
    """vLLM's kernel with the tiles that it has for this GPU; `each`: a row for each choice, times its weight."""
    from vllm.model_executor.layers.fused_moe.fused_moe import (
        _prepare_expert_assignment,
        invoke_fused_moe_triton_kernel,
        try_get_optimal_moe_config,
    )
    from vllm.triton_utils import tl

    sizes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    config = try_get_optimal_moe_config(*sizes, CHOICES, None, T)
    x, weight, ids = torch_normal(T * CHOICES if each else T, K), torch_normal(EXPERTS, N, K), torch_chosen(T)
    weights, out = torch_normal(T, CHOICES, dtype="float32").abs(), torch_empty(T, CHOICES, N)
    plain = dict.fromkeys(("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16"), False)

    def call():
        order = _prepare_expert_assignment(ids, config, T, CHOICES, EXPERTS, None)
        invoke_fused_moe_triton_kernel(
            x, weight, out, None, None, weights if each else None, *order, each, 1 if each else CHOICES, config,
            compute_type=tl.bfloat16, per_channel_quant=False, **plain,
        )  # fmt: skip

    return call


def grouped(T: int, N: int, K: int):
    """torch's grouped product of rows that were put in order before."""
    import torch

    counts = np.bincount(chosen(T).reshape(-1), minlength=EXPERTS)
    ends = torch.from_numpy(np.cumsum(counts).astype(np.int32)).cuda()
    x, weight = torch_normal(T * CHOICES, K), torch_normal(EXPERTS, N, K).transpose(1, 2)
    product = torch._grouped_mm
    return lambda: product(x, weight, offs=ends)
