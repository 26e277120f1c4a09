"""NVFP4 product goldens from vLLM's emulation: both operands quantised, given their values back, multiplied.

python goldens/capture/ops_fp4_matmul.py --out goldens/ops

What it multiplies has been rounded to the dtype of x, global scales included, which the block-scaled product never is.
"""

from __future__ import annotations

import torch
from ops_fp4 import packed, scale_bytes, tiles
from record import Record, normal, run
from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as emulation


def capture(record: Record) -> None:
    for m, n, k in ((1, 16, 64), (5, 130, 128), (33, 48, 512), (130, 24, 192)):
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{m}x{n}x{k}_{str(dtype)[6:]}"
            x, w = normal(f"mmx{name}", m, k, dtype=dtype), normal(f"mmw{name}", n, k, dtype=dtype, scale=0.05)
            gx, gw = (448 * 6 / value.float().abs().max().reshape(1) for value in (x, w))
            (a, sa), (b, sb) = (emulation.ref_nvfp4_quant(v.clone(), g, 16) for v, g in ((x, gx), (w, gw)))
            stored = tiles(scale_bytes(sb))
            with record.attempt(f"cutlass_scaled_fp4_mm {name}"):
                out = emulation.run_nvfp4_emulations(x, gx, packed(b), stored, 1 / gw)
                record.case("cutlass_scaled_fp4_mm", name, "run_nvfp4_emulations", {"out_dtype": str(dtype)[6:]},
                            {"a": packed(a), "b": packed(b), "block_scale_a": tiles(scale_bytes(sa)).view(torch.uint8),
                             "block_scale_b": stored.view(torch.uint8), "alpha": (1 / gx) * (1 / gw)},
                            {"out": out})  # fmt: skip


if __name__ == "__main__":
    run("fp4_matmul", __file__, capture)
