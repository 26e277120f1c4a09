"""W4A8's products, dense and by experts, beside vLLM's CUTLASS kernels (sm_90 alone): one row to many."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import cupy_empty, cupy_words, ours, torch_empty, torch_words, vllm_ops
from .bench import Bench
from .fp8_matmul import cupy_codes, cupy_scales, torch_codes, torch_scales

GROUP = 128
EXPERTS = 64


def benches() -> Iterator[Bench]:
    for M in (1, 16, 64, 256, 2048):
        yield dense(M, 8192, 8192)
    for M in (64, 1024, 8192):
        yield by_experts(M, 2048, 2048)


def cupy_tables(*shape: int):
    """Tables of random scales in CuPy."""
    import cupy

    from vtlab import ops

    codes = cupy.random.default_rng(2).integers(0x20, 0x60, shape, dtype=cupy.int32).astype(cupy.uint8)
    return ops.cutlass_pack_scale_fp8(codes.reshape(-1, shape[-1])).reshape(*shape, 8)


def torch_tables(*shape: int):
    """The same in torch, by vLLM's own op."""
    import torch

    codes = torch.randint(0x20, 0x60, shape, device="cuda").to(torch.uint8).view(torch.float8_e4m3fn)
    return vllm_ops().cutlass_pack_scale_fp8(codes)


def bytes_of(M: int, N: int, K: int, experts: int = 1) -> int:
    """Activations, results, codes and tables."""
    return M * K + 2 * M * N + experts * N * K * (4 + 8 * 8 / GROUP) // 8


def dense(M: int, N: int, K: int) -> Bench:
    def make():
        tables, words = cupy_tables(K // GROUP, N), cupy_words(N, K // 8).T
        return (cupy_codes(M, K), words, tables, cupy_scales(N), cupy_scales(M)), {}, cupy_empty(M, N)

    def vllm():
        call = vllm_ops().cutlass_w4a8_mm
        words = vllm_ops().cutlass_encode_and_reorder_int4b(torch_words(N, K // 8).t())
        a, tables = torch_codes(M, K), torch_tables(K // GROUP, N)
        channel, token = torch_scales(N, 1), torch_scales(M, 1)
        return lambda: call(a, words, tables, GROUP, channel, token, None, None)

    name = f"cutlass_w4a8_mm {M}x{N}x{K}"
    return Bench("w4a8_matmul", name, ours("cutlass_w4a8_mm", make), {"vllm": vllm}, bytes_of(M, N, K), 2 * M * N * K)


def by_experts(M: int, N: int, K: int) -> Bench:
    """M rows, the same number for each expert."""
    E, each = EXPERTS, M // EXPERTS
    offsets, sizes = np.arange(E) * each, np.array([[N, each, K]] * E, np.int32)

    def make():
        import cupy

        tables, words = cupy_tables(E, K // GROUP, N), cupy_words(E, N, K // 8)
        rows = cupy.asarray(offsets), cupy.asarray(sizes)
        return (cupy_codes(M, K), words, cupy_scales(M), cupy_scales(E, N), tables, *rows), {}, cupy_empty(M, N)

    def vllm():
        import torch

        call = vllm_ops().cutlass_w4a8_moe_mm
        words, strides = vllm_ops().cutlass_encode_and_reorder_int4b_grouped(torch_words(E, N, K // 8))
        a, tables, target = torch_codes(M, K), torch_tables(E, K // GROUP, N), torch_empty(M, N)
        channel, token = torch_scales(E, N), torch_scales(M, 1)
        first, problems = torch.from_numpy(offsets).cuda(), torch.from_numpy(sizes).cuda()
        a_strides, c_strides = (torch.full((E,), size, device="cuda", dtype=torch.int64) for size in (K, N))
        group_strides = torch.zeros((E, 2), device="cuda", dtype=torch.int64)
        group_strides[:, 0] = N
        return lambda: call(target, a, words, token, channel, tables, GROUP, first, problems, a_strides, strides,
                            c_strides, group_strides, None)  # fmt: skip

    name = f"cutlass_w4a8_moe_mm {M}x{N}x{K}, {E} experts"
    moved, flops = bytes_of(M, N, K, E), 2 * M * N * K
    return Bench("w4a8_matmul", name, ours("cutlass_w4a8_moe_mm", make), {"vllm": vllm}, moved, flops)
