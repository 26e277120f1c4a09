"""Products of e4m3 in groups: DeepSeek-V4's output projection by groups of heads beside DeepGEMM, and stretches of K,
whose peer in DeepGEMM needs a later GPU than Hopper."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, ours, torch_empty
from .bench import Bench
from .fp8_matmul import cupy_codes, cupy_scales, torch_codes, torch_scales

HEADS, DEPTH, COLUMNS = 8, 4096, 1024


def benches() -> Iterator[Bench]:
    for B in (1, 16, 128, 1024):
        yield heads(B)
    yield stretches(8, 512, 2048, 2048)


def heads(B: int) -> Bench:
    def make():
        a, scales = cupy_codes(B, HEADS, DEPTH), cupy_scales(B, HEADS, DEPTH // 128)
        b, own = cupy_codes(HEADS, COLUMNS, DEPTH), cupy_scales(HEADS, COLUMNS // 128, DEPTH // 128)
        return (a, scales, b, own), {}, cupy_empty(B, HEADS, COLUMNS)

    def deepgemm():
        from vllm.utils.deep_gemm import fp8_einsum

        a, scales, out = (
            torch_codes(B, HEADS, DEPTH),
            torch_scales(B, HEADS, DEPTH // 128),
            torch_empty(B, HEADS, COLUMNS),
        )
        b, own = torch_codes(HEADS, COLUMNS, DEPTH), torch_scales(HEADS, COLUMNS // 128, DEPTH // 128)
        return lambda: fp8_einsum("bhr,hdr->bhd", (a, scales), (b, own), out, recipe=(1, 128, 128))

    moved = HEADS * (B * DEPTH + COLUMNS * DEPTH + 2 * B * COLUMNS)
    return Bench("fp8_groups", f"fp8_einsum {B}x{HEADS} {COLUMNS}x{DEPTH}", ours("fp8_einsum", make),
                 {"deepgemm": deepgemm}, moved, 2 * HEADS * B * COLUMNS * DEPTH)  # fmt: skip


def stretches(E: int, each: int, M: int, N: int) -> Bench:
    K = E * each

    def make():
        import cupy

        operands = cupy_codes(K, M), cupy_scales(K // 128, M), cupy_codes(K, N), cupy_scales(K // 128, N)
        return (*operands, cupy.full(E, each, cupy.int32)), {}, cupy_empty(E, M, N, dtype=F32)

    moved, call = K * (M + N) + 4 * E * M * N, ours("k_grouped_fp8_gemm_tn", make)
    return Bench("fp8_groups", f"k_grouped_fp8_gemm_tn {E}x{each} {M}x{N}", call, {}, moved, 2 * K * M * N)
