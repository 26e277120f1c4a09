"""FP8 quantiser goldens from vLLM's CPU build: QuantFP8's Python forms, alone and after the native norm or activation.

python goldens/capture/ops_quant_fp8.py --out goldens/ops

Writes quant_fp8.cpu.safetensors and norm_quant.cpu.safetensors.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import vllm._custom_ops  # noqa: F401  registers torch.ops._C, which the layers look up
from record import Record, normal
from vllm import ir
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

BF16, F32 = torch.bfloat16, torch.float32
EDGES = torch.tensor([0.0, -0.0, 1e-40, -1e-40, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 448.0, 464.0, 2.0**-10])
NATIVE = {"rounding": "vllm_native"}


def codes(tensor: torch.Tensor) -> torch.Tensor:
    """The codes' bytes; NaN of either sign as 0x7F."""
    tensor = tensor.contiguous().view(torch.uint8)
    return torch.where((tensor & 0x7F) == 0x7F, torch.full_like(tensor, 0x7F), tensor)


def inputs() -> list[tuple[str, torch.Tensor]]:
    found = []
    for dtype in (BF16, F32):
        kind = str(dtype)[6:]
        edges = normal("edges", 3, 64, scale=2)
        edges[0, : len(EDGES)], edges[1] = EDGES, 0.0
        plain = [(f"{kind}_{m}x{k}", normal(f"x{m}{k}", m, k, dtype=dtype, scale=3))
                 for m, k in ((1, 64), (7, 256), (3, 1000), (2, 5120))]  # fmt: skip
        found += [*plain, (f"{kind}_edges", edges.to(dtype)), (f"{kind}_zeros", torch.zeros(2, 64, dtype=dtype))]
    return found


def quant_fp8(record: Record) -> None:
    where = "QuantFP8.forward_native"
    for name, x in inputs():
        for value in (0.01, 0.0321, 1.0, 10.0):
            scale = torch.tensor([value], dtype=F32)
            with record.attempt(f"quant_fp8_static {name} {value:g}"):
                out, _ = QuantFP8(True, GroupShape.PER_TENSOR).forward_native(x, scale)
                record.case("quant_fp8_static", f"{name}_{value:g}", where, NATIVE, {"x": x, "scale": scale},
                            {"out": codes(out)})  # fmt: skip
        with record.attempt(f"dynamic_scaled_fp8_quant {name}"):
            out, scale = QuantFP8(False, GroupShape.PER_TENSOR).forward_native(x)
            record.case("dynamic_scaled_fp8_quant", name, where, NATIVE, {"x": x},
                        {"out": codes(out), "scale": scale})  # fmt: skip
        for bound in (None, 1.25):
            full = name + ("" if bound is None else f"_ub{bound:g}")
            limit = None if bound is None else torch.tensor([bound], dtype=F32)
            with record.attempt(f"dynamic_per_token_scaled_fp8_quant {full}"):
                out, scale = QuantFP8(False, GroupShape.PER_TOKEN).forward_native(x, None, limit)
                record.case("dynamic_per_token_scaled_fp8_quant", full, where, NATIVE, {"x": x, "scale_ub": limit},
                            {"out": codes(out), "scale": scale})  # fmt: skip
        for size, ue8m0, column in ((128, False, False), (64, True, False), (64, False, True), (48, True, True)):
            full = f"{name}_g{size}" + "_ue8m0" * ue8m0 + "_column" * column
            with record.attempt(f"per_token_group_quant_fp8 {full}"):
                layer = QuantFP8(False, GroupShape(1, size), column_major_scales=column, use_ue8m0=ue8m0)
                out, scale = layer.forward_native(x)
                scale = scale.clone(memory_format=torch.contiguous_format)
                record.case("per_token_group_quant_fp8", full, where,
                            {**NATIVE, "group_size": size, "ue8m0": ue8m0, "column_major": column}, {"x": x},
                            {"out": codes(out), "scale": scale})  # fmt: skip


def norm_quant(record: Record) -> None:
    where = "vllm.ir.ops.{} (native), then QuantFP8.forward_native"
    scale = torch.tensor([0.0321], dtype=F32)
    static, token = QuantFP8(True, GroupShape.PER_TENSOR), QuantFP8(False, GroupShape.PER_TOKEN)
    for rows, width in ((1, 64), (7, 128), (3, 1000), (2, 5120)):
        name = f"bfloat16_{rows}x{width}"
        x, residual = normal("nx" + name, rows, width, dtype=BF16), normal("nr" + name, rows, width, dtype=BF16)
        x[-1] *= 30
        weight = (1 + 0.2 * normal("nw" + name, width)).to(BF16)
        base = {"x": x, "weight": weight}
        for add in (False, True):
            full, more, new = name + "_residual" * add, {"residual": residual} if add else {}, {}
            function = "fused_add_rms_norm" if add else "rms_norm"
            if add:
                y, summed = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x.clone(), residual.clone(), weight, 1e-6)
                new = {"residual": summed}
            else:
                y = ir.ops.rms_norm.impls["native"].impl_fn(x, weight, 1e-6)
            with record.attempt(f"rms_norm_quant_fp8 {full}"):
                record.case("rms_norm_quant_fp8", full, where.format(function), {**NATIVE, "eps": 1e-6},
                            {**base, **more, "scale": scale},
                            {"out": codes(static.forward_native(y, scale)[0]), **new})  # fmt: skip
            with record.attempt(f"rms_norm_dynamic_per_token_quant {full}"):
                out, found = token.forward_native(y)
                record.case("rms_norm_dynamic_per_token_quant", full, where.format(function),
                            {**NATIVE, "eps": 1e-6, "quant_dtype": "float8_e4m3fn"}, {**base, **more},
                            {"out": codes(out), "scale": found, **new})  # fmt: skip
        wide = normal("sx" + name, rows, 2 * width, dtype=BF16, scale=3)
        with record.attempt(f"silu_and_mul_quant {name}"):
            y = SiluAndMul().forward_native(wide)
            record.case("silu_and_mul_quant", name, "SiluAndMul.forward_native, then QuantFP8.forward_native", NATIVE,
                        {"x": wide, "scale": scale}, {"out": codes(static.forward_native(y, scale)[0])})  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out, failed = parser.parse_args().out, 0
    for capture in (quant_fp8, norm_quant):
        record = Record(capture.__name__, __file__)
        with torch.no_grad(), set_current_vllm_config(VllmConfig()):
            capture(record)
        record.save(out)
        failed += len(record.errors)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
