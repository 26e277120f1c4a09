"""INT8 quantisers, FP8 weights and scaled products of vLLM: its CPU ops, interpreted Triton kernels, Python references.

python goldens/capture/ops_fp8.py --out goldens/ops
"""

from __future__ import annotations

import exact_fp8  # noqa: F401  (first: it switches Triton on)
import torch
from record import Record, generator, normal, run
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils import fp8_utils, int8_utils, w8a8_utils
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.utils.deep_gemm import per_block_cast_to_fp8

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def codes(name: str, *shape: int) -> torch.Tensor:
    """Finite e4m3 numbers."""
    return normal(name, *shape, scale=8).to(E4M3)


def whole(name: str, *shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=generator(name)).to(torch.int8)


def scales(name: str, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=generator(name)) * 0.04 + 0.01


def byte(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == E4M3 else tensor


def int8(record: Record) -> None:
    for rows, width in ((1, 17), (7, 64), (3, 1025), (5, 257)):
        for dtype in (F32, BF16):
            x = normal(f"i{rows}x{width}", rows, width, dtype=dtype, scale=3) + 0.5
            name = f"{str(dtype)[6:]}_{rows}x{width}"
            for azp in (None, -17, 240):
                full, shift = f"{name}_azp{azp}", None if azp is None else torch.tensor([azp], dtype=torch.int32)
                with record.attempt(f"static_scaled_int8_quant {full}"):
                    scale = torch.tensor([0.0213])
                    out = ops.scaled_int8_quant(x, scale, shift, symmetric=azp is None)[0]
                    record.case("static_scaled_int8_quant", full, "torch.ops._C.static_scaled_int8_quant",
                                {"rounding": "cpu"}, {"x": x, "scale": scale, "azp": shift}, {"out": out})  # fmt: skip
            for symmetric in (True, False):
                full = f"{name}_{'sym' if symmetric else 'azp'}"
                with record.attempt(f"dynamic_scaled_int8_quant {full}"):
                    out, scale, shift = ops.scaled_int8_quant(x, symmetric=symmetric)
                    more = {} if symmetric else {"azp": shift}
                    record.case("dynamic_scaled_int8_quant", full, "torch.ops._C.dynamic_scaled_int8_quant",
                                {"rounding": "cpu", "symmetric": symmetric}, {"x": x},
                                {"out": out, "scale": scale, **more})  # fmt: skip
            if dtype == BF16:
                x = torch.cat([x, torch.zeros_like(x[:1])])
            with record.attempt(f"dynamic_scaled_int8_quant {name}_token"):
                out, scale = int8_utils.per_token_quant_int8(x.float())
                record.case("dynamic_scaled_int8_quant", f"{name}_token", "per_token_quant_int8 (interpreted)",
                            {"rounding": "triton_token"}, {"x": x.float()}, {"out": out, "scale": scale})  # fmt: skip
            if width % 64 == 0:
                with record.attempt(f"per_token_group_quant_int8 {name}"):
                    out, scale = int8_utils.per_token_group_quant_int8(x.float(), 16)
                    record.case("per_token_group_quant_int8", name, "per_token_group_quant_int8 (interpreted)",
                                {"group_size": 16}, {"x": x.float()}, {"out": out, "scale": scale})  # fmt: skip


def native_quant(x, scale):
    return QuantFP8(True, GroupShape.PER_TENSOR).forward_native(x, scale)


def weights(record: Record) -> None:
    ops.scaled_fp8_quant = native_quant  # a CUDA op in requantize_with_max_scale
    for shape in ((3, 256), (2, 384)):
        x, scale = normal(f"g{shape}", *shape, dtype=BF16, scale=9), scales(f"gs{shape}", shape[0], shape[1] // 128)
        with record.attempt(f"scaled_fp8_quant_static_group {shape}"):
            out = QuantFP8(True, GroupShape(1, 128)).forward_native(x, scale)[0]
            record.case("scaled_fp8_quant_static_group", f"{shape[0]}x{shape[1]}", "QuantFP8.forward_native", {},
                        {"x": x, "scale": scale}, {"out": byte(out)})  # fmt: skip
    for widths in ([4, 3, 9], [5, 0, 7], [8]):
        name = "_".join(map(str, widths))
        weight, scale = codes("w" + name, sum(widths), 40), scales("ws" + name, len(widths))
        for fused in (False, True):
            full, given = name + "_fused" * fused, scale.clone()
            if fused:
                given[1:] = torch.finfo(E4M3).min
            if fused and len(widths) == 1:
                continue
            with record.attempt(f"requantize_with_max_scale {full}"):
                most, out = w8a8_utils.requantize_with_max_scale(weight.clone(), given, widths)
                record.case("requantize_with_max_scale", full, "requantize_with_max_scale",
                            {"logical_widths": widths}, {"weight": byte(weight), "weight_scale": given},
                            {"out": byte(out), "scale": most.reshape(1)})  # fmt: skip
    for dtype in (F32, BF16):
        x = normal(f"b{dtype}", 70, 50, dtype=dtype)
        x[:16, :16] = 0
        x[16:32, :16] *= 1e-6
        for ue8m0 in (False, True):
            name = f"{str(dtype)[6:]}_{'ue8m0' if ue8m0 else 'plain'}"
            with record.attempt(f"per_block_cast_to_fp8 {name}"):
                out, scale = per_block_cast_to_fp8(x, [16, 16], ue8m0)
                record.case("per_block_cast_to_fp8", name, "per_block_cast_to_fp8",
                            {"block_m": 16, "block_k": 16, "ue8m0": "log2" if ue8m0 else None}, {"x": x},
                            {"out": byte(out), "scale": scale})  # fmt: skip
    weight, scale = codes("rw", 70, 50), scales("rs", 5, 4)
    with record.attempt("requant_weight_ue8m0"):
        out, new = weight.clone(), scale.clone()
        fp8_utils.requant_weight_ue8m0_inplace(out, new, (16, 16))
        record.case("requant_weight_ue8m0", "70x50", "requant_weight_ue8m0_inplace",
                    {"block_m": 16, "block_k": 16, "ue8m0": "log2"}, {"weight": byte(weight), "scale": scale},
                    {"out": byte(out), "new_scale": new})  # fmt: skip


def products(record: Record) -> None:
    for m, n, k in ((1, 16, 32), (5, 48, 528)):
        a, b, alpha = codes(f"a{m}{k}", m, k), codes(f"b{n}{k}", n, k), torch.tensor([0.035 * 0.017])
        with record.attempt(f"matmul_fp8_cublaslt {m}x{n}x{k}"):
            out = torch._scaled_mm(a, b.t(), scale_a=alpha, scale_b=torch.ones(1), out_dtype=F32)
            record.case("matmul_fp8_cublaslt", f"{m}x{n}x{k}", "torch._scaled_mm", {"out_dtype": "float32"},
                        {"a": byte(a), "b": byte(b), "alpha": alpha}, {"out": out})  # fmt: skip
    for m, n, k in ((1, 16, 32), (5, 48, 528)):
        a, b = whole(f"ia{m}{k}", m, k), whole(f"ib{n}{k}", n, k)
        sa, sb = scales(f"isa{m}", m, 1) / 10, scales(f"isb{n}", 1, n) / 10
        bias = normal(f"ibias{n}", n, dtype=BF16)
        for shifted in (False, True):
            name = f"{m}x{n}x{k}" + "_azp" * shifted
            azp = torch.randint(-60, 60, (m, 1), dtype=torch.int32, generator=generator(name)) if shifted else None
            colsum = b.sum(1, dtype=torch.int32)[None]
            with record.attempt(f"onednn {name}"):
                handler = ops.create_onednn_scaled_mm(b.t(), sb.flatten(), F32, True, shifted)
                out = torch.empty(m, n, dtype=F32)
                ops.onednn_scaled_mm(handler, a, out, sa, azp, (colsum * sb) if shifted else None, bias.float())
                op = "cutlass_scaled_mm_azp" if shifted else "cutlass_scaled_mm"
                record.case(op, name, "onednn_scaled_mm to float32", {},
                            {"a": a, "b": b, "scale_a": sa, "scale_b": sb, "bias": bias,
                             **({"azp": azp, "azp_adj": colsum} if shifted else {})}, {"out": out})  # fmt: skip
    for m, n, k in ((5, 160, 300), (2, 128, 256)):
        sa, sb = scales(f"sa{m}{k}", m, -(-k // 128)), scales(f"sb{n}{k}", -(-n // 128), -(-k // 128))
        for kind, draw in (("fp8", codes), ("int8", whole)):
            a, b = draw(f"ba{kind}{m}{k}", m, k), draw(f"bb{kind}{n}{k}", n, k)
            call = fp8_utils.w8a8_triton_block_scaled_mm if kind == "fp8" else int8_utils.w8a8_block_int8_matmul
            with record.attempt(f"scaled_mm_block {kind}_{m}x{n}x{k}"):
                out = call(a, b, sa, sb, [128, 128], output_dtype=F32)
                record.case("scaled_mm_block", f"{kind}_{m}x{n}x{k}", f"{call.__name__} (interpreted)",
                            {"out_dtype": "float32"}, {"a": byte(a), "b": byte(b), "scale_a": sa, "scale_b": sb},
                            {"out": out})  # fmt: skip


def capture(record: Record) -> None:
    with torch.no_grad(), set_current_vllm_config(VllmConfig()):
        for part in (int8, weights, products):
            part(record)


if __name__ == "__main__":
    run("fp8", __file__, capture)
