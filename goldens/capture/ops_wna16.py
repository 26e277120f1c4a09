"""Integer-weight goldens: vLLM's Python quantiser, packings, Marlin layouts, W4A8 scales; products of its kernels.

OMP_NUM_THREADS=1 python goldens/capture/ops_wna16.py --out goldens/ops

Triton kernels run interpreted, in float16 alone. Two W4A8 helpers assert a CUDA tensor and run without the assertion.
"""

from __future__ import annotations

import inspect

import interpreted  # noqa: F401  must come before anything of vLLM
import torch
from record import Record, generator, normal, run
from vllm import _custom_ops as custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear.mixed_precision.triton_w4a16 import triton_w4a16_gemm
from vllm.model_executor.layers.quantization import awq_triton
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils import (
    marlin_utils,
    marlin_utils_fp4,
    marlin_utils_test,
    quant_utils,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
KINDS = {name: getattr(scalar_types, name) for name in ("uint4", "uint8", "uint4b8", "uint8b128", "uint2b2", "uint3b4")}
OF_BITS = {2: scalar_types.uint2b2, 4: scalar_types.uint4, 8: scalar_types.uint8}


def codes(name: str, bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, generator=generator(name), dtype=torch.int32)


def scales(name: str, *shape: int, dtype=F16) -> torch.Tensor:
    return (torch.rand(*shape, generator=generator(name)) * 0.016 + 0.004).to(dtype)


def without_assertions(module, name: str):
    """The function with its assertions cut out."""
    lines = inspect.getsource(getattr(module, name)).splitlines()
    scope: dict = {}
    exec("\n".join(line for line in lines if ".is_cuda, " not in line), module.__dict__, scope)
    return scope[name]


def quantiser(record: Record) -> None:
    for kind, (name, quant_type) in ((k, item) for k in (BF16, F16, F32) for item in KINDS.items()):
        for k, n, group, after in ((64, 8, 32, False), (96, 5, -1, False), (64, 8, 16, True)):
            zero_points = not quant_type.has_bias()
            if after and not zero_points:
                continue
            w = normal(f"w{name}{k}{n}{kind}", k, n, dtype=kind, scale=0.02)
            with record.attempt(f"quantize_weights {name}"):
                w_ref, q, s, zero = quant_utils.quantize_weights(w, quant_type, group, zero_points, after)
                outputs = {"w_ref": w_ref, "q": q.int(), "scales": s}
                if zero is not None:
                    outputs["zero_points"] = zero
                record.case("quantize_weights", f"{name}_{str(kind)[6:]}_{k}x{n}_{group}{'_after' if after else ''}",
                            "quantize_weights",
                            {"quant_type": name, "group_size": group, "zero_points_after_scales": after},
                            {"w": w}, outputs)  # fmt: skip


def packings(record: Record) -> None:
    for bits, k, n in ((4, 64, 24), (8, 32, 12), (2, 64, 16)):
        q = codes(f"pack{bits}", bits, k, n)
        words = quant_utils.gptq_pack(q, bits, k, n)
        record.case("gptq_pack", f"{bits}bit", "gptq_pack", {"bits": bits}, {"q": q}, {"out": words})
        back = quant_utils.unpack_quantized_values_into_int32(words, OF_BITS[bits], 0)
        record.case("gptq_unpack", f"{bits}bit", "unpack_quantized_values_into_int32", {"bits": bits},
                    {"qweight": words}, {"q": back})  # fmt: skip
        plain = quant_utils.pack_cols(q, bits, k, n)
        flags = {"bits": bits, "interleaved": False}
        record.case("awq_pack", f"plain_{bits}bit", "pack_cols", flags, {"q": q}, {"out": plain})
        record.case("awq_unpack", f"plain_{bits}bit", "unpack_cols", flags, {"qweight": plain},
                    {"q": quant_utils.unpack_cols(plain, bits, k, n)})  # fmt: skip
        if bits != 2:
            record.case("awq_pack", f"{bits}bit", "awq_pack", {"bits": bits}, {"q": q},
                        {"out": quant_utils.awq_pack(q, bits, k, n)})  # fmt: skip


def act_order(record: Record) -> None:
    """Rows of a permuted checkpoint sorted again, and Marlin's words of them."""
    w = normal("act_order", 128, 64, dtype=F16, scale=0.02)
    perm = torch.randperm(128, generator=generator("act_order"))
    _, q, _, g_idx, _ = quant_utils.gptq_quantize_weights(w, scalar_types.uint4b8, 32, True, perm)
    q_sorted, g_sorted, order = quant_utils.sort_weights(q, g_idx)
    record.case("sort_weights", "4bit_128x64_32", "sort_weights", {}, {"q": q, "g_idx": g_idx},
                {"q_sorted": q_sorted, "g_idx_sorted": g_sorted, "perm": order})  # fmt: skip
    _, words, _, _, order, _ = marlin_utils_test.marlin_quantize(w, scalar_types.uint4b8, 32, True, perm)
    record.case("gptq_marlin_repack", "act_order", "marlin_quantize", {"bits": 4},
                {"b_q_weight": quant_utils.gptq_pack(q, 4, 128, 64), "perm": order}, {"out": words})  # fmt: skip


def marlin(record: Record) -> None:
    for bits, a8 in ((4, False), (8, False), (4, True), (8, True)):
        name, flags, k, n = f"{bits}bit{'_a8' if a8 else ''}", {"bits": bits, "is_a_8bit": a8}, 96, 128
        q = codes(f"marlin{bits}", bits, k, n)
        words = marlin_utils_test.marlin_weights(q, k, n, bits, marlin_utils_test.get_weight_perm(bits, a8), a8)
        for op, pack in (("gptq_marlin_repack", quant_utils.gptq_pack), ("awq_marlin_repack", quant_utils.awq_pack)):
            record.case(op, name, "marlin_weights", flags, {"b_q_weight": pack(q, bits, k, n)}, {"out": words})
        zero = codes(f"zero{bits}", bits, 3, n)
        packed = marlin_utils.marlin_zero_points(zero, 3, n, bits, a8)
        record.case("marlin_zero_points", name, "marlin_zero_points", flags, {"zp": zero}, {"out": packed})
        awq = quant_utils.awq_pack(zero, bits, 3, n)
        record.case("awq_to_marlin_zero_points", name, "awq_to_marlin_zero_points", flags, {"q_zp_packed": awq},
                    {"out": marlin_utils.awq_to_marlin_zero_points(awq, 3, n, bits, a8)})  # fmt: skip
    for kind, k, group, a8 in ((F16, 96, 32, False), (BF16, 96, -1, False), (BF16, 96, 96, False), (F32, 96, 32, True)):
        s = scales(f"permuted{kind}", 1 if group in (-1, k) else k // group, 128, dtype=kind)
        record.case("marlin_permute_scales", f"{str(kind)[6:]}_{group}{'_a8' if a8 else ''}", "marlin_permute_scales",
                    {"size_k": k, "group_size": group, "is_a_8bit": a8}, {"s": s},
                    {"out": marlin_utils.marlin_permute_scales(s, k, 128, group, a8)})  # fmt: skip
    bias = normal("bias", 96, dtype=BF16)
    record.case("marlin_permute_bias", "bfloat16_96", "marlin_permute_bias", {}, {"s": bias},
                {"out": marlin_utils.marlin_permute_bias(bias)})  # fmt: skip
    for kind in (F16, BF16):
        s = scales(f"int8{kind}", 8, 64, dtype=kind)
        as_kind, factor = marlin_utils.marlin_act_int8_process_scales(s)
        record.case("marlin_act_int8_process_scales", str(kind)[6:], "marlin_act_int8_process_scales", {}, {"s": s},
                    {"codes": as_kind.view(torch.int16), "factor": factor.reshape(1)})  # fmt: skip
    w = normal("int4fp8", 128, 64, dtype=F16, scale=0.02)
    _, q, _, zero = quant_utils.quantize_weights(w, scalar_types.uint4, 32, zero_points=True)
    _, words, _, _ = marlin_utils_test.awq_marlin_quantize(w, scalar_types.uint4, 32, torch.float8_e4m3fn)
    perm = marlin_utils_test.get_weight_perm(4, True)
    flat = quant_utils.unpack_cols(words, 4, 8, 1024).reshape(-1, 1024)[:, torch.argsort(perm)]
    rows = flat.reshape(4, 4, 32, 16).permute(0, 2, 1, 3).reshape(128, 64)
    record.case("marlin_int4_fp8_preprocess", "zero_points", "awq_marlin_quantize, its words unpacked", {},
                {"qweight": quant_utils.awq_pack(q.int(), 4, 128, 64), "qzeros": quant_utils.awq_pack(zero, 4, 4, 64)},
                {"out": quant_utils.awq_pack(rows, 4, 128, 64)})  # fmt: skip


def products(record: Record) -> None:
    for k, n, groups, m in ((256, 64, 2, 3), (128, 32, 4, 1)):
        q, zero = codes(f"awq{k}", 4, k, n), codes(f"awqz{k}", 4, groups, n)
        words, zeros = quant_utils.awq_pack(q, 4, k, n), quant_utils.awq_pack(zero, 4, groups, n)
        s, x = scales(f"awqs{k}", groups, n), normal(f"awqx{k}", m, k, dtype=F16)
        with record.attempt(f"awq {k}"):
            record.case("awq_dequantize", f"{k}x{n}", "awq_dequantize_triton", {},
                        {"qweight": words, "scales": s, "zeros": zeros},
                        {"out": awq_triton.awq_dequantize_triton(words, s, zeros)})  # fmt: skip
            for split in (1, 8):
                out = awq_triton.awq_gemm_triton(x, words, s, zeros, split)
                record.case("awq_gemm", f"{m}x{k}x{n}_{split}", "awq_gemm_triton",
                            {"split_k_iters": split, "rounding": "vllm_triton"},
                            {"input": x, "qweight": words, "scales": s, "qzeros": zeros}, {"out": out})  # fmt: skip
        plain, plain_zeros = quant_utils.pack_cols(q, 4, k, n), quant_utils.pack_cols(zero, 4, groups, n)
        for name, z in (("zeros", plain_zeros), ("symmetric", None)):
            with record.attempt(f"triton_w4a16_gemm {name}"):
                record.case("triton_w4a16_gemm", f"{m}x{k}x{n}_{name}", "triton_w4a16_gemm", {},
                            {"a": x, "b_q": plain, "scales": s, "qzeros": z},
                            {"out": triton_w4a16_gemm(x, plain, s, z, k // groups)})  # fmt: skip


def compiled(record: Record) -> None:
    """The CPU build's own product of GPTQ weights: columns in blocks of 16, zero points as they are stored."""
    current_platform.import_kernels()
    for name, m, k, n, groups, by_row in (("zeros", 5, 256, 64, 2, False), ("g_idx", 3, 128, 96, 4, True)):
        q, s, x = (
            codes(f"cpu{k}", 4, k, n),
            scales(f"cpus{k}", groups, n, dtype=BF16),
            normal(f"cpux{k}", m, k, dtype=BF16),
        )
        zero = torch.full((groups, n), 8, dtype=torch.int32) if by_row else codes(f"cpuz{k}", 4, groups, n)
        g_idx = (torch.randperm(k, generator=generator("cpug")) // (k // groups)).int() if by_row else None
        zeros = quant_utils.pack_cols(zero, 4, groups, n)
        blocks = quant_utils.pack_cols(q, 4, k, n).view(k, -1, 2).permute(1, 0, 2).reshape(-1, 2 * k).contiguous()
        with record.attempt(f"gptq_gemm {name}"):
            out = custom_ops.cpu_gemm_wna16(x, blocks, s, None if by_row else zeros, g_idx, None, 8, "vec")
            record.case("gptq_gemm", f"{m}x{k}x{n}_{name}", "cpu_gemm_wna16", {"use_v2_format": True},
                        {"a": x, "b_q_weight": quant_utils.gptq_pack(q, 4, k, n), "b_gptq_qzeros": zeros,
                         "b_gptq_scales": s, "b_g_idx": g_idx}, {"out": out})  # fmt: skip


def marlin_fp4(record: Record) -> None:
    """Every e4m3 scale, whole or a small part of the range, and exponents."""
    every = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    inputs = {"all": every[7:], "small": every[:40] * 2.0**-3, "zeros": torch.zeros(8), "tenth": every[40:96] * 0.1}
    for kind in (BF16, F16):
        for name, values in inputs.items():
            s = values.reshape(2, -1).to(kind)
            codes_, factor = marlin_utils_fp4.nvfp4_marlin_process_scales(s.clone(), None, kind)
            record.case("nvfp4_marlin_process_scales", f"{name}_{str(kind)[6:]}", "nvfp4_marlin_process_scales",
                        {"a_dtype": str(kind)[6:]}, {"marlin_scales": s},
                        {"out": codes_.view(torch.uint8), "factor": torch.tensor([factor])})  # fmt: skip
        g = torch.tensor([1e-3, 2.0**-20, 0.37, 0.0])
        record.case("nvfp4_marlin_process_global_scale", str(kind)[6:], "nvfp4_marlin_process_global_scale",
                    {"a_dtype": str(kind)[6:]}, {"global_scale": g},
                    {"out": marlin_utils_fp4.nvfp4_marlin_process_global_scale(g, kind)})  # fmt: skip
    exponents = torch.randint(60, 200, (3, 16), generator=generator("e8m0"), dtype=torch.uint8)
    values = torch.exp2(exponents.float() - 127)
    for name, dtype in (("16bit", None), ("fp8", torch.float8_e4m3fn)):
        out = marlin_utils_fp4.mxfp4_marlin_process_scales(values, dtype)
        record.case("mxfp4_marlin_process_scales", name, "mxfp4_marlin_process_scales",
                    {"fp8_activations": dtype is not None}, {"marlin_scales": exponents},
                    {"out": out.view(torch.uint8)})  # fmt: skip


def w4a8(record: Record) -> None:
    to_fp8 = without_assertions(quant_utils, "convert_bf16_scales_to_fp8")
    to_int4 = without_assertions(quant_utils, "convert_packed_uint4b8_to_signed_int4_inplace")
    with set_current_vllm_config(VllmConfig()):
        quantise = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN).forward_native
    s = scales("w4a8", 24, 16, dtype=BF16)
    s[0], s[1], s[2, ::2], s[3] = 0, s[1] * 1e-5, s[2, ::2] * 2.0**-7, torch.arange(16) * 2.0**-9
    codes_, channel = to_fp8(quantise, s)
    record.case("w4a8_quantize_scales", "24x16", "convert_bf16_scales_to_fp8, QuantFP8.forward_native",
                {"rounding": "vllm_native"}, {"scales": s},
                {"out": codes_.view(torch.uint8), "channel_scale": channel})  # fmt: skip
    words = quant_utils.gptq_pack(codes("int4", 4, 64, 5), 4, 64, 5)
    record.case("convert_packed_uint4b8_to_signed_int4", "8x5", "convert_packed_uint4b8_to_signed_int4_inplace", {},
                {"t": words}, {"out": to_int4(words.clone())})  # fmt: skip


def capture(record: Record) -> None:
    for part in (quantiser, packings, act_order, marlin, marlin_fp4, products, compiled, w4a8):
        with record.attempt(part.__name__):
            part(record)


if __name__ == "__main__":
    run("wna16", __file__, capture)
