"""INT8 quantisers of hidden states; groups of 128 at the width of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_empty, torch_normal, vllm_ops
from .bench import HIDDEN, TOKENS, Bench
from .quant_fp8 import GROUPED, given_scale, torch_scale

_CODES, _ZERO = np.dtype(np.int8), np.dtype(np.int32)


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        for azp in (False, True):
            yield static(T, azp)
            yield per_token(T, azp)
        yield per_group(T)


def static(T: int, azp: bool, K: int = HIDDEN) -> Bench:
    def make():
        import cupy

        options = {"azp": cupy.full(1, -17, _ZERO)} if azp else {}
        return (cupy_normal(T, K), given_scale()), options, cupy_empty(T, K, dtype=_CODES)

    def vllm():
        import torch

        call, x, out = vllm_ops().static_scaled_int8_quant, torch_normal(T, K), torch_empty(T, K, dtype="int8")
        zero, scale = torch.full((1,), -17, device="cuda", dtype=torch.int32) if azp else None, torch_scale()
        return lambda: call(out, x, scale, zero)

    name = f"int8 static{' azp' * azp} {T}x{K}"
    op = "static_scaled_int8_quant"
    return Bench("quant_int8", name, ours(op, make), {"vllm": vllm}, 3 * T * K, 2 * T * K)


def per_token(T: int, azp: bool, K: int = HIDDEN) -> Bench:
    def make():
        out = cupy_empty(T, K, dtype=_CODES), cupy_empty(T, 1, dtype=F32), cupy_empty(T, 1, dtype=_ZERO)
        return (cupy_normal(T, K),), {"symmetric": not azp}, out if azp else out[:2]

    def vllm():
        call, x, out = vllm_ops().dynamic_scaled_int8_quant, torch_normal(T, K), torch_empty(T, K, dtype="int8")
        scale, zero = torch_empty(T, 1, dtype="float32"), torch_empty(T, 1, dtype="int32") if azp else None
        return lambda: call(out, x, scale, zero)

    name = f"int8 per token{' azp' * azp} {T}x{K}"
    op = "dynamic_scaled_int8_quant"
    return Bench("quant_int8", name, ours(op, make), {"vllm": vllm}, 3 * T * K, 3 * T * K)


def per_group(T: int, K: int = GROUPED) -> Bench:
    G = K // 128

    def make():
        return (cupy_normal(T, K),), {}, (cupy_empty(T, K, dtype=_CODES), cupy_empty(T, G, dtype=F32))

    def vllm():
        call, x = vllm_ops().per_token_group_quant_int8, torch_normal(T, K)
        out, scale = torch_empty(T, K, dtype="int8"), torch_empty(T, G, dtype="float32")
        return lambda: call(x, out, scale, 128, 1e-10, -128.0, 127.0)

    op, size = "per_token_group_quant_int8", 3 * T * K + 4 * T * G
    return Bench("quant_int8", f"int8 per group of 128 {T}x{K}", ours(op, make), {"vllm": vllm}, size, 3 * T * K)
