"""Experts of 4-bit weights in Marlin's layouts by groups of 128, the products of moe_wna16.py, beside vLLM's Marlin for
experts, which has the pairs in order at no cost; "vllm sorted" puts them in order in each call, as we do."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import BF16, F32, cupy_empty, cupy_normal, cupy_words, ours, torch_empty, torch_normal, torch_words
from .bench import Bench
from .moe_wna16 import CALLS, GROUP, UNIT, Product


def benches() -> Iterator[Bench]:
    for of, T in CALLS:
        yield product(of, T)


def product(of: Product, T: int) -> Bench:
    def make():
        from vtlab import ops

        scales = ops.cast_bf16(abs(cupy_normal(of.experts, of.K // GROUP, of.N, dtype=F32)) / 100)
        words = cupy_words(of.experts, of.K // 16, 2 * of.N)
        arguments = cupy_normal(of.rows(T), of.K), words, scales, *of.cupy_routed(T)
        return arguments, {"quant_type": "uint4b8"}, cupy_empty(T * of.choices, of.N, dtype=BF16)

    peers = {"vllm": lambda: marlin(of, T), "vllm sorted": lambda: marlin(of, T, sort=True)}
    name, call = f"moe_wna16_marlin_gemm {of.name} {T}", ours("moe_wna16_marlin_gemm", make)
    return Bench("moe_marlin", name, call, peers, of.moved(T, 4), of.flops(T), UNIT)


def marlin(of: Product, T: int, sort: bool = False):
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.scalar_type import scalar_types

    x, words = torch_normal(of.rows(T), of.K), torch_words(of.experts, of.K // 16, 2 * of.N)
    out = torch_empty(T * of.choices, of.N)
    scales = (torch_normal(of.experts, of.K // GROUP, of.N, dtype="float32").abs() / 100).bfloat16()
    high = next((each for each in (8, 16, 32, 48, 64) if T * of.choices / of.experts / each < 0.9), 64)
    ids, weights = of.torch_ids(T), torch_normal(T, of.choices, dtype="float32").abs()
    room, choices = marlin_make_workspace_new(x.device, 4), 1 if of.each else of.choices

    def put_in_order():
        return moe_align_block_size(ids, high, of.experts, None, ignore_invalid_experts=True)

    before = put_in_order()

    def call():
        order = put_in_order() if sort else before
        ops.moe_wna16_marlin_gemm(
            x, out, words, None, scales, None, None, None, None, None, room, *order, weights, moe_block_size=high,
            top_k=choices, mul_topk_weights=of.each, b_q_type=scalar_types.uint4b8, size_m=len(x), size_n=of.N,
            size_k=of.K, is_k_full=True, use_atomic_add=False, use_fp32_reduce=True, is_zp_float=False,
        )  # fmt: skip

    return call
