"""Block-scaled products at the widths of DeepSeek-V3: one weight, and many experts'."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import cupy_empty, ours, torch_empty
from .bench import Bench
from .fp8_matmul import cupy_codes, cupy_scales, torch_codes, torch_scales

WIDTH, EXPERTS, EXPERT = 7168, 32, 2048


def benches() -> Iterator[Bench]:
    for M in (1, 16, 64, 128, 256, 4096):
        yield alone(M, WIDTH, WIDTH)
    for M in (16, 128):
        yield masked(EXPERTS, M, EXPERT, WIDTH)
    yield contiguous(EXPERTS, 8192, EXPERT, WIDTH)


def _columns(scales):
    """Scales [M, G] of neighbouring tokens beside each other, as DeepGEMM wants them."""
    return scales.swapaxes(-1, -2).copy().swapaxes(-1, -2)


def _torch_columns(scales):
    return scales.transpose(-1, -2).contiguous().transpose(-1, -2)


def _weights(*lead: int, N: int, K: int):
    return cupy_codes(*lead, N, K), cupy_scales(*lead, N // 128, K // 128)


def _torch_weights(*lead: int, N: int, K: int):
    return torch_codes(*lead, N, K), torch_scales(*lead, N // 128, K // 128)


def alone(M: int, N: int, K: int) -> Bench:
    high = -(-M // 4) * 4  # tokens' scales start at multiples of 16 bytes

    def make():
        a, scales = cupy_codes(M, K), _columns(cupy_scales(high, K // 128))[:M]
        return (a, scales, *_weights(N=N, K=K)), {}, cupy_empty(M, N)

    def deepgemm():
        from vllm.utils.deep_gemm import fp8_gemm_nt

        a, scales, out = torch_codes(M, K), _torch_columns(torch_scales(high, K // 128))[:M], torch_empty(M, N)
        weights = _torch_weights(N=N, K=K)
        return lambda: fp8_gemm_nt((a, scales), weights, out)

    peers = {"deepgemm": deepgemm}
    return Bench("fp8_blocks", f"fp8_gemm_nt {M}x{N}x{K}", ours("fp8_gemm_nt", make), peers,
                 M * K + N * K + 2 * M * N, 2 * M * N * K)  # fmt: skip


def masked(E: int, M: int, N: int, K: int) -> Bench:
    def make():
        import cupy

        a, scales = cupy_codes(E, M, K), _columns(cupy_scales(E, M, K // 128))
        counts = cupy.full(E, M, cupy.int32)
        return (a, scales, *_weights(E, N=N, K=K), counts), {}, cupy_empty(E, M, N)

    def deepgemm():
        import torch
        from vllm.utils.deep_gemm import fp8_m_grouped_gemm_nt_masked

        a, scales, out = torch_codes(E, M, K), _torch_columns(torch_scales(E, M, K // 128)), torch_empty(E, M, N)
        weights, counts = _torch_weights(E, N=N, K=K), torch.full((E,), M, device="cuda", dtype=torch.int32)
        return lambda: fp8_m_grouped_gemm_nt_masked((a, scales), weights, out, counts, M)

    moved = E * (M * K + N * K + 2 * M * N)
    return Bench("fp8_blocks", f"masked {E} experts {M}x{N}x{K}", ours("m_grouped_fp8_gemm_nt_masked", make),
                 {"deepgemm": deepgemm}, moved, 2 * E * M * N * K)  # fmt: skip


def contiguous(E: int, M: int, N: int, K: int) -> Bench:
    def make():
        import cupy

        a, scales = cupy_codes(M, K), _columns(cupy_scales(M, K // 128))
        experts = cupy.repeat(cupy.arange(E, dtype=cupy.int32), M // E)
        return (a, scales, *_weights(E, N=N, K=K), experts), {}, cupy_empty(M, N)

    def deepgemm():
        import torch
        from vllm.utils.deep_gemm import m_grouped_fp8_gemm_nt_contiguous

        a, scales, out = torch_codes(M, K), _torch_columns(torch_scales(M, K // 128)), torch_empty(M, N)
        weights = _torch_weights(E, N=N, K=K)
        experts = torch.arange(E, device="cuda", dtype=torch.int32).repeat_interleave(M // E)
        return lambda: m_grouped_fp8_gemm_nt_contiguous((a, scales), weights, out, experts)

    moved = M * K + E * N * K + 2 * M * N
    return Bench("fp8_blocks", f"contiguous {E} experts {M}x{N}x{K}", ours("m_grouped_fp8_gemm_nt_contiguous", make),
                 {"deepgemm": deepgemm}, moved, 2 * M * N * K)  # fmt: skip
