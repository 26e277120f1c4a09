"""NVFP4 goldens from vLLM's CUDA build: values of codes, by the Triton kernel of its emulation.

    python goldens/capture/ops_cuda_fp4.py --out goldens/ops

Runs on a GPU, in vLLM's own environment. The quantiser's own op needs a Blackwell GPU, and the Triton kernel that
stands in for it gives values made with approximate divisions, so that nothing of the quantiser is captured here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from record import Record, generator, normal

KINDS = (torch.bfloat16, torch.float16, torch.float32)


def capture(record: Record) -> None:
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    every = torch.arange(256, dtype=torch.uint8)
    for name, rows, blocks in (("every", 14, 32), ("1x320", 1, 320), ("37x8", 37, 8), ("130x3", 130, 3)):
        codes = torch.randint(0, 256, (rows, blocks * 8), generator=generator(name), dtype=torch.uint8)
        scales = normal(name, rows, blocks, scale=100).abs().clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8)
        if name == "every":
            codes, scales = every.repeat(14, 1), torch.arange(8, 120).repeat_interleave(4).to(torch.uint8).view(14, 32)
        global_scale = torch.tensor([0.00137])
        for kind in KINDS:
            with record.attempt(f"dequantize_nvfp4 {name} {kind}"):
                out = dequantize_to_dtype(codes.cuda(), scales.view(torch.float8_e4m3fn).cuda(), global_scale.cuda(),
                                          kind, 16, swizzle=False)  # fmt: skip
                record.case("dequantize_nvfp4", f"{name}_{str(kind)[6:]}", "dequantize_to_dtype",
                            {"out_dtype": str(kind)[6:], "is_sf_swizzled_layout": False},
                            {"packed": codes, "scale": scales, "global_scale": global_scale}, {"out": out})  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU; the CPU build's goldens come from ops_fp4.py")
    record = Record("fp4", __file__)
    capture(record)
    record.save(arguments.out)
    return int(bool(record.errors))


if __name__ == "__main__":
    raise SystemExit(main())
