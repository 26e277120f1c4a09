"""NVFP4 goldens from vLLM's Python reference and its layout functions: codes and scales as bytes, in rows and in tiles.

python goldens/capture/ops_fp4.py --out goldens/ops

`ref_nvfp4_quant` gives values; their codes are looked up here (a value -0 is code 8). vLLM's own op needs a GPU that
multiplies FP4. `swizzle_blockscale` ends with a copy to a GPU, which is left out.
"""

from __future__ import annotations

import torch
import vllm._custom_ops  # noqa: F401  registers torch.ops._C, which the layers look up
from record import Record, normal, run
from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as emulation
from vllm.model_executor.layers.quantization.utils.nvfp4_utils import swizzle_blockscale

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STEPS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
NATIVE = {"rounding": "vllm_native"}


def packed(values: torch.Tensor) -> torch.Tensor:
    """Codes of values on the grid of e2m1, two to a byte."""
    codes = torch.bucketize(values.abs(), emulation.kE2M1ToFloat_handle.val) | torch.signbit(values).int() << 3
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def scale_bytes(scale: torch.Tensor) -> torch.Tensor:
    """The float32 values of e4m3 as bytes."""
    return scale.to(torch.float8_e4m3fn)


def tiles(scale: torch.Tensor) -> torch.Tensor:
    """vLLM's `swizzle_blockscale`, on the CPU."""
    kept, torch.Tensor.cuda = torch.Tensor.cuda, lambda self: self
    try:
        return swizzle_blockscale(scale)
    finally:
        torch.Tensor.cuda = kept


def on_steps(largest: float) -> torch.Tensor:
    """Blocks of 16 that hold the steps of e2m1, an ulp beside them, their opposites, and `largest`."""
    steps = STEPS * (largest / 6)
    row = torch.cat([steps, torch.nextafter(steps, torch.tensor(0.0)), torch.nextafter(steps, torch.tensor(1e9))])
    row = torch.cat([row, -row, torch.zeros(3)]).reshape(3, 15)
    return torch.cat([row, torch.full((3, 1), largest)], dim=1).reshape(1, 48)


def inputs() -> list[tuple[str, torch.Tensor]]:
    found = [(f"{str(dtype)[6:]}_{m}x{k}", normal(f"fp4{m}{k}", m, k, dtype=dtype, scale=3))
             for dtype in (BF16, F16, F32) for m, k in ((1, 64), (37, 128), (90, 64), (150, 48))]  # fmt: skip
    found += [("bfloat16_128x80", normal("fp4tile", 128, 80, dtype=BF16))]
    spike = normal("fp4spike", 2, 64)
    spike[0, 5], spike[1, :16] = 1e4, 0.0
    found += [("float32_spike", spike), ("float32_tiny", normal("fp4tiny", 2, 64, scale=1e-6))]
    found += [("float32_infinite", spike.clone().index_fill_(1, torch.tensor([20]), torch.inf))]
    found += [(f"float32_steps_{largest:g}", on_steps(largest)) for largest in (6.0, 6.0 * 448, 3.0, 6 * 1.0625)]
    return found


def capture(record: Record) -> None:
    for name, x in inputs():
        finite = x.float().abs()[torch.isfinite(x)].max()
        for label, g in (("1", 1.0), ("calibrated", 448 * 6 / float(finite)), ("-3", -3.0), ("0", 0.0)):
            if label == "0" and name.endswith("infinite"):
                continue  # 0 * inf: a NaN, for which e2m1 has no code
            scale_of_all = torch.tensor([g], dtype=F32)
            with record.attempt(f"scaled_fp4_quant {name} {label}"):
                values, scale = emulation.ref_nvfp4_quant(x.clone(), scale_of_all, 16)
                codes, scale = packed(values), scale_bytes(scale)
                inputs_ = {"x": x, "input_global_scale": scale_of_all}
                for swizzled in (False, True):
                    record.case("scaled_fp4_quant", f"{name}_{label}" + "_tiles" * swizzled,
                                "ref_nvfp4_quant" + ", swizzle_blockscale" * swizzled,
                                {**NATIVE, "is_sf_swizzled_layout": swizzled}, inputs_,
                                {"out": codes, "scale": (tiles(scale) if swizzled else scale).view(torch.uint8)},
                                )  # fmt: skip
                if label not in ("calibrated", "-3") or name.endswith("infinite"):
                    continue
                for kind in (BF16, F32):
                    # it takes tiles apart wrongly where their columns were filled up
                    for swizzled in (False, True)[: 1 + (x.shape[1] % 64 == 0)]:
                        stored = tiles(scale) if swizzled else scale
                        out = emulation.dequantize_to_dtype(codes, stored, 1 / scale_of_all, kind, 16, swizzled)
                        record.case("dequantize_nvfp4", f"{name}_{label}_{str(kind)[6:]}" + "_tiles" * swizzled,
                                    "dequantize_to_dtype",
                                    {"out_dtype": str(kind)[6:], "is_sf_swizzled_layout": swizzled},
                                    {"packed": codes, "scale": stored.view(torch.uint8),
                                     "global_scale": 1 / scale_of_all}, {"out": out})  # fmt: skip
    for rows, blocks in ((1, 1), (127, 3), (128, 4), (129, 5), (300, 33)):
        scale = normal(f"sf{rows}", rows, blocks).abs().to(torch.float8_e4m3fn)
        record.case("swizzle_blockscale", f"{rows}x{blocks}", "swizzle_blockscale", {},
                    {"scale": scale.view(torch.uint8)}, {"out": tiles(scale).view(torch.uint8)})  # fmt: skip
    scale = normal("sf3d", 3, 130, 6).abs().to(torch.float8_e4m3fn)
    record.case("swizzle_blockscale", "3x130x6", "swizzle_blockscale", {}, {"scale": scale.view(torch.uint8)},
                {"out": tiles(scale).view(torch.uint8)})  # fmt: skip


if __name__ == "__main__":
    run("fp4", __file__, capture)
