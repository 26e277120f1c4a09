"""The NVFP4 quantiser of hidden states and of an MLP's wide rows, scales in rows and in tiles.

vLLM's own op runs on no GPU before Blackwell; there its Triton emulation, which quantises and gives the values back in
bfloat16, stands in for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_normal
from .bench import HIDDEN, INTERMEDIATE, TOKENS, Bench

U8 = np.dtype(np.uint8)
_GLOBAL = 448 * 6 / 5


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        for K in (HIDDEN, INTERMEDIATE):
            for tiles in (False, True):
                yield quantise(T, K, tiles)
        yield values(T, HIDDEN)


def quantise(T: int, K: int, tiles: bool) -> Bench:
    from vtlab.ops.nvfp4 import BLOCK, tiled_shape

    def make():
        import cupy

        shape = tiled_shape(T, K // BLOCK) if tiles else (T, K // BLOCK)
        arguments = cupy_normal(T, K), cupy.full(1, _GLOBAL, F32)
        return (
            arguments,
            {"is_sf_swizzled_layout": tiles},
            (cupy_empty(T, K // 2, dtype=U8), cupy_empty(*shape, dtype=U8)),
        )

    def torch():
        import torch

        x, g = torch_normal(T, K), torch.full((1,), _GLOBAL, device="cuda")
        steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device="cuda")

        def run():
            value = x.float().view(T, -1, BLOCK)
            scale = (g * value.abs().amax(-1, keepdim=True) / 6).clamp(max=448).to(torch.float8_e4m3fn)
            value = (value * (g / scale.float())).view(T, K)
            codes = torch.bucketize(value.abs(), steps, out_int32=True) | (value < 0).int() << 3
            return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scale

        return run

    def vllm():
        import torch
        from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils

        x, g = torch_normal(T, K), torch.full((1,), _GLOBAL, device="cuda")
        return lambda: nvfp4_emulation_utils.ref_nvfp4_quant_dequant(x, g, BLOCK)

    size = 2 * T * K + T * K // 2 + T * K // BLOCK
    name = f"nvfp4{' tiles' * tiles} {T}x{K}"
    return Bench("fp4", name, ours("scaled_fp4_quant", make), {"torch": torch, "vllm": vllm}, size, 12 * T * K)


def values(T: int, K: int) -> Bench:
    """Values of codes in bfloat16."""
    from vtlab.ops.nvfp4 import BLOCK

    def make():
        import cupy

        codes, scales = (cupy.random.randint(0, 120, (T, n), dtype=U8) for n in (K // 2, K // BLOCK))
        return (codes, scales, cupy.full(1, 1 / _GLOBAL, F32)), {"is_sf_swizzled_layout": False}, cupy_empty(T, K)

    def vllm():
        import torch
        from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils

        codes = torch.randint(0, 120, (T, K // 2), device="cuda", dtype=torch.uint8)
        scales = torch.randint(0, 120, (T, K // BLOCK), device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
        g = torch.full((1,), 1 / _GLOBAL, device="cuda")
        call = nvfp4_emulation_utils.dequantize_to_dtype
        return lambda: call(codes, scales, g, torch.bfloat16, BLOCK, swizzle=False)

    size = 2 * T * K + T * K // 2 + T * K // BLOCK
    return Bench("fp4", f"nvfp4 values {T}x{K}", ours("dequantize_nvfp4", make), {"vllm": vllm}, size, 2 * T * K)
