"""FP8 quantisers of hidden states; groups of 128 at the width of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_empty, torch_normal, vllm_ops
from .bench import HIDDEN, TOKENS, Bench

U8 = np.dtype(np.uint8)
GROUPED = 7168


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield static(T)
        yield per_tensor(T)
        yield per_token(T)
        for ue8m0, column_major in ((False, False), (True, False), (False, True)):
            yield per_group(T, ue8m0, column_major)


def given_scale():
    """A static scale in CuPy."""
    import cupy

    return cupy.full(1, 0.0321, F32)


def torch_scale():
    """A static scale in torch."""
    import torch

    return torch.full((1,), 0.0321, device="cuda")


def static(T: int, K: int = HIDDEN) -> Bench:
    def torch():
        from torch import float8_e4m3fn

        x, inverse = torch_normal(T, K), 1 / torch_scale()
        return lambda: (x.float() * inverse).clamp(-448, 448).to(float8_e4m3fn)

    def vllm():
        call, x, scale = vllm_ops().static_scaled_fp8_quant, torch_normal(T, K), torch_scale()
        out = torch_empty(T, K, dtype="float8_e4m3fn")
        return lambda: call(out, x, scale, None)

    make = ours("quant_fp8_static", lambda: ((cupy_normal(T, K), given_scale()), {}, cupy_empty(T, K, dtype=U8)))
    return Bench("quant_fp8", f"static {T}x{K}", make, {"torch": torch, "vllm": vllm}, 3 * T * K, 2 * T * K)


def per_tensor(T: int, K: int = HIDDEN) -> Bench:
    def vllm():
        call, x = vllm_ops().dynamic_scaled_fp8_quant, torch_normal(T, K)
        out, scale = torch_empty(T, K, dtype="float8_e4m3fn"), torch_empty(1, dtype="float32")
        return lambda: call(out, x, scale)

    def make():
        return (cupy_normal(T, K),), {}, (cupy_empty(T, K, dtype=U8), cupy_empty(1, dtype=F32))

    # x counts twice: its largest element decides over the first code, and no chip holds the longest between
    return Bench("quant_fp8", f"dynamic per tensor {T}x{K}", ours("dynamic_scaled_fp8_quant", make), {"vllm": vllm},
                 5 * T * K, 3 * T * K)  # fmt: skip


def per_token(T: int, K: int = HIDDEN) -> Bench:
    def vllm():
        call, x = vllm_ops().dynamic_per_token_scaled_fp8_quant, torch_normal(T, K)
        out, scale = torch_empty(T, K, dtype="float8_e4m3fn"), torch_empty(T, 1, dtype="float32")
        return lambda: call(out, x, scale, None)

    def make():
        return (cupy_normal(T, K),), {}, (cupy_empty(T, K, dtype=U8), cupy_empty(T, 1, dtype=F32))

    return Bench("quant_fp8", f"dynamic per token {T}x{K}", ours("dynamic_per_token_scaled_fp8_quant", make),
                 {"vllm": vllm}, 3 * T * K, 3 * T * K)  # fmt: skip


def per_group(T: int, ue8m0: bool, column_major: bool, K: int = GROUPED) -> Bench:
    G = K // 128

    def vllm():
        call, x = vllm_ops().per_token_group_fp8_quant, torch_normal(T, K)
        out = torch_empty(T, K, dtype="float8_e4m3fn")
        scale = torch_empty(G, T, dtype="float32").t() if column_major else torch_empty(T, G, dtype="float32")
        return lambda: call(x, out, scale, 128, 1e-10, -448.0, 448.0, ue8m0, column_major, False)

    def make():
        scale = cupy_empty(G, T, dtype=F32).T if column_major else cupy_empty(T, G, dtype=F32)
        options = {"ue8m0": ue8m0, "column_major": column_major}
        return (cupy_normal(T, K),), options, (cupy_empty(T, K, dtype=U8), scale)

    name = f"per group of 128{' ue8m0' * ue8m0}{' column-major' * column_major} {T}x{K}"
    size = 3 * T * K + 4 * T * G
    return Bench("quant_fp8", name, ours("per_token_group_quant_fp8", make), {"vllm": vllm}, size, 3 * T * K)
