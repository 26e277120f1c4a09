"""DeepGEMM's casts at the width of DeepSeek-V3: tokens by groups, weights by tiles, scales into columns.

Its own casts are Python on torch; so is vLLM's requantisation.
"""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_normal
from .bench import TOKENS, Bench
from .fp8_matmul import cupy_codes, cupy_scales, torch_codes, torch_scales
from .quant_fp8 import U8

WIDTH = 7168
_SMALL = 32
"""A group of FP4."""


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        for ue8m0 in (None, "bits"):
            yield tokens(T, ue8m0)
        yield fp4(T)
    for N, K in ((WIDTH, 2048), (24576, 1536)):
        yield blocks(N, K)
        yield requantised(N, K)
    for packed in (False, True):
        yield columns(8192, packed)


def _deepgemm(name: str):
    """A cast of DeepGEMM's Python, as vLLM ships it."""
    from vllm.third_party.deep_gemm.utils import math

    return getattr(math, name)


def tokens(T: int, ue8m0: str | None, K: int = WIDTH) -> Bench:
    def make():
        return (cupy_normal(T, K),), {"ue8m0": ue8m0}, (cupy_empty(T, K, dtype=U8), cupy_empty(T, K // 128, dtype=F32))

    def deepgemm():
        call, x = _deepgemm("per_token_cast_to_fp8"), torch_normal(T, K)
        return lambda: call(x, ue8m0 is not None)

    size = 3 * T * K + 4 * T * K // 128
    return Bench("fp8_casts", f"tokens{' ue8m0' if ue8m0 else ''} {T}x{K}", ours("per_token_cast_to_fp8", make),
                 {"deepgemm": deepgemm}, size, 3 * T * K)  # fmt: skip


def fp4(T: int, K: int = WIDTH) -> Bench:
    def make():
        options = {"group_size": _SMALL, "ue8m0": "bits"}
        return (cupy_normal(T, K),), options, (cupy_empty(T, K // 2, dtype=U8), cupy_empty(T, K // _SMALL, dtype=F32))

    # No peer: DeepGEMM's Python copies a table from the host in each call, which a graph cannot capture, and the
    # attempt leaves torch unfit for the captures that follow.
    size = 2 * T * K + T * K // 2 + 4 * T * K // _SMALL
    return Bench("fp8_casts", f"tokens fp4 {T}x{K}", ours("per_token_cast_to_fp4", make), {}, size, 12 * T * K)


def blocks(N: int, K: int) -> Bench:
    def make():
        out = cupy_empty(N, K, dtype=U8), cupy_empty(N // 128, K // 128, dtype=F32)
        return (cupy_normal(N, K),), {"ue8m0": "log2"}, out

    def deepgemm():
        call, x = _deepgemm("per_block_cast_to_fp8"), torch_normal(N, K)
        return lambda: call(x, True)

    def vllm():
        from vllm.utils.deep_gemm import per_block_cast_to_fp8

        x = torch_normal(N, K)
        return lambda: per_block_cast_to_fp8(x, [128, 128], True)

    return Bench("fp8_casts", f"blocks {N}x{K}", ours("per_block_cast_to_fp8", make),
                 {"deepgemm": deepgemm, "vllm": vllm}, 3 * N * K, 3 * N * K)  # fmt: skip


def requantised(N: int, K: int) -> Bench:
    def make():
        arguments = cupy_codes(N, K), cupy_scales(N // 128, K // 128)
        return arguments, {}, (cupy_empty(N, K, dtype=U8), cupy_empty(N // 128, K // 128, dtype=F32))

    def vllm():
        from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace

        weight, scale = torch_codes(N, K), torch_scales(N // 128, K // 128)
        return lambda: requant_weight_ue8m0_inplace(weight, scale)

    return Bench("fp8_casts", f"requant {N}x{K}", ours("requant_weight_ue8m0", make), {"vllm": vllm}, 2 * N * K,
                 4 * N * K)  # fmt: skip


def columns(M: int, packed: bool, K: int = WIDTH) -> Bench:
    groups = K // 128
    wide = groups // 4 if packed else groups

    def make():
        import cupy

        scale = cupy.exp2(cupy.random.randint(-9, 9, (M, groups)).astype(F32))
        return (scale,), {"packed": packed}, cupy_empty(wide, M, dtype="int32" if packed else F32).T

    def deepgemm():
        import torch
        from vllm.third_party import deep_gemm

        scale = torch.exp2(torch.randint(-9, 9, (M, groups), device="cuda").float())
        name = f"get_mn_major_tma_aligned_{'packed_ue8m0_' * packed}tensor"
        call = getattr(deep_gemm, name)
        return lambda: call(scale)

    return Bench("fp8_casts", f"scales in columns{' packed' * packed} {M}x{groups}", ours("transform_sf_layout", make),
                 {"deepgemm": deepgemm}, 4 * M * (groups + wide), 0)  # fmt: skip
