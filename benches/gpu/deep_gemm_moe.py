"""Around DeepGEMM's grouped products, in the sizes of DeepSeek-V3: eight of 256 experts a token, 2048 wide.

Bytes are those of real rows. Peers: vLLM's Triton kernels, and its CUDA op for rows with counts, which rounds in
bfloat16 on the way.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_normal
from .bench import Bench
from .fp8_matmul import cupy_codes, cupy_scales, torch_codes, torch_scales
from .quant_fp8 import U8

WIDTH, EXPERT, EXPERTS, CHOICES, ALIGNMENT = 7168, 2048, 256, 8, 128
_I32 = np.dtype(np.int32)


def benches() -> Iterator[Bench]:
    for T in (1, 16, 256, 8192):
        yield scatter(T)
        yield scatter(T, packed=True)
        yield gather(T)
    for M in (128, 1024, 65536):
        for clamp, ue8m0 in ((None, False), (7.0, True)):
            yield silu_columns(M, clamp, ue8m0)
    for E, T, real in ((32, 256, 20), (32, 1024, 192), (256, 128, 8)):
        yield silu_masked(E, T, real)


def _rows(T: int) -> int:
    rows = T * CHOICES + min(T * CHOICES, EXPERTS) * (ALIGNMENT - 1)
    return -(-rows // ALIGNMENT) * ALIGNMENT


def _ids(T: int) -> np.ndarray:
    """Eight different experts a token."""
    rng = np.random.default_rng(0)
    return np.argsort(rng.random((T, EXPERTS)), axis=1)[:, :CHOICES].astype(np.int32)


def _torch_ids(T: int):
    import torch

    return torch.from_numpy(_ids(T)).cuda()


def scatter(T: int, H: int = WIDTH, packed: bool = False) -> Bench:
    """Scales of groups of 128 as float32; packed, exponents of groups of 32, whose words lie in columns."""
    rows, words = _rows(T), H // 128

    def make():
        import cupy

        scale = cupy.full((T, H // 32), 127, U8) if packed else cupy_scales(T, words)
        a_scale = cupy_empty(words, rows, dtype=_I32).T if packed else cupy_empty(rows, words, dtype=F32)
        arguments = cupy_empty(rows, H, dtype=U8), a_scale, cupy_codes(T, H), scale, cupy.asarray(_ids(T))
        out = cupy_empty(rows, dtype=_I32), cupy_empty(T, CHOICES, dtype=_I32)
        return arguments, {"num_experts": EXPERTS, "alignment": ALIGNMENT}, out

    def vllm():
        import torch
        from vllm.model_executor.layers.fused_moe.deep_gemm_utils import ep_scatter

        x, scale, ids = torch_codes(T, H), torch_scales(T, words), _torch_ids(T)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS).int()
        a, a_scale = torch.empty(rows, H, device="cuda", dtype=x.dtype), torch.empty(rows, words, device="cuda")
        if packed:
            scale = torch.full((T, H // 32), 127, device="cuda", dtype=torch.uint8)
            a_scale = torch.empty(words, rows, device="cuda", dtype=torch.int32).t()
        starts, inverse = torch.empty_like(counts), torch.empty_like(ids)
        m_indices = torch.empty(rows, device="cuda", dtype=torch.int32)

        def run():
            m_indices.fill_(-1)
            ep_scatter(x, scale, ids, counts, None, starts, a, a_scale, m_indices, inverse, ALIGNMENT,
                       block_size=32 if packed else 128, pack_ue8m0=packed)  # fmt: skip

        return run

    moved = (1 + CHOICES) * T * (H + 4 * words) + 4 * rows + 8 * T * CHOICES
    op, name = ("ep_scatter_ue8m0", "scatter, exponents") if packed else ("ep_scatter", "scatter")
    return Bench("deep_gemm_moe", f"{name} {T}x{H}", ours(op, make), {"vllm": vllm}, moved, 0)


def gather(T: int, H: int = WIDTH) -> Bench:
    rows = _rows(T)

    def make():
        import cupy

        inverse = cupy.random.permutation(rows)[: T * CHOICES].reshape(T, CHOICES).astype(_I32)
        return (cupy_normal(rows, H), cupy_scales(T, CHOICES), inverse), {}, cupy_empty(T, H)

    def vllm():
        import torch
        from vllm.model_executor.layers.fused_moe.deep_gemm_utils import ep_gather

        a, ids, weights = torch_normal(rows, H), _torch_ids(T), torch_scales(T, CHOICES)
        inverse = torch.randperm(rows, device="cuda")[: T * CHOICES].view(T, CHOICES).int()
        out = torch.empty(T, H, device="cuda", dtype=a.dtype)
        return lambda: ep_gather(a, ids, weights, inverse, None, out)

    size = 2 * (1 + CHOICES) * T * H
    return Bench("deep_gemm_moe", f"gather {T}x{H}", ours("ep_gather", make), {"vllm": vllm}, size, 2 * CHOICES * T * H)


def silu_columns(M: int, clamp: float | None, ue8m0: bool, half: int = EXPERT) -> Bench:
    groups = half // 128

    def make():
        out = cupy_empty(M, half, dtype=U8), cupy_empty(groups, M, dtype=F32).T
        return (cupy_normal(M, 2 * half),), {"clamp_limit": clamp, "ue8m0": ue8m0}, out

    def vllm():
        import torch
        from vllm.model_executor.layers.quantization.utils import fp8_utils

        x, out = torch_normal(M, 2 * half), torch.empty(M, half, device="cuda", dtype=torch.float8_e4m3fn)
        call = fp8_utils.silu_mul_per_token_group_quant_fp8_colmajor
        return lambda: call(x, out, use_ue8m0=ue8m0, clamp_limit=clamp)

    name = f"silu columns{' clamped ue8m0' if ue8m0 else ''} {M}x{half}"
    return Bench("deep_gemm_moe", name, ours("silu_mul_per_token_group_quant_fp8_colmajor", make), {"vllm": vllm},
                 5 * M * half + 4 * M * groups, 20 * M * half)  # fmt: skip


def silu_masked(E: int, T: int, real: int, half: int = EXPERT) -> Bench:
    """`real` rows of T an expert."""
    groups = half // 128

    def make():
        import cupy

        codes, scale = cupy_empty(E, T, half, dtype=U8), cupy_empty(E, groups, T, dtype=F32).swapaxes(1, 2)
        return (cupy_normal(E, T, 2 * half), cupy.full(E, real, _I32), codes, scale), {}, None

    def vllm():
        import torch
        import vllm._custom_ops  # noqa: F401  (registers them)

        call, x = torch.ops._C.persistent_masked_m_silu_mul_quant, torch_normal(E, T, 2 * half)
        counts = torch.full((E,), real, device="cuda", dtype=torch.int32)
        codes = torch.empty(E, T, half, device="cuda", dtype=torch.float8_e4m3fn)
        scale = torch.empty(E, groups, T, device="cuda").transpose(1, 2)
        return lambda: call(x, counts, codes, scale, False)

    size = E * real * (5 * half + 4 * groups)
    return Bench("deep_gemm_moe", f"silu masked {E}x{real} of {T}x{half}", ours("silu_mul_masked_quant", make),
                 {"vllm": vllm}, size, 20 * E * real * half)  # fmt: skip
