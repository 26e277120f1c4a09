"""Op-level goldens from vLLM's CUDA build: layouts and products of weights of 4 and 8 bits, DeepGEMM, Hadamard.

    python goldens/capture/ops_cuda_lowbit.py --out goldens/ops [--families wna16 mxfp4 fp8_blocks]

Runs on a GPU, in vLLM's own environment. Every case stands alone: one that fails is listed under "errors" in its
family's file. Codes are kept as bytes. Layouts that no document gives (Machete's, CUTLASS's) are captured over words
whose nibbles spell the digits of their own index, so that every nibble's new place can be read off.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from record import Record, generator, normal, run_cuda

BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in row-major order, FP8 codes as bytes, once everything that writes it is done."""
    torch.cuda.synchronize()
    tensor = tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def codes(name: str, count: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, count, shape, generator=generator(name), dtype=torch.int32)


def scales(name: str, *shape: int, dtype=F16) -> torch.Tensor:
    return (torch.rand(*shape, generator=generator(name)) * 0.016 + 0.004).to(dtype)


def digit(place: int, bits_: int, k: int, n: int) -> torch.Tensor:
    """[k, n] codes: digit `place`, in base 2^bits, of each element's own index."""
    index = torch.arange(k * n, dtype=torch.int64).reshape(k, n)
    return (index >> (bits_ * place) & ((1 << bits_) - 1)).int()


def by_columns(words: torch.Tensor) -> torch.Tensor:
    """The same matrix on the GPU, its columns contiguous."""
    return words.cuda().t().contiguous().t()


def gptq(record: Record) -> None:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import quant_utils

    empty = torch.empty(0, dtype=torch.int32, device="cuda")
    for width, k, n in ((2, 64, 32), (3, 96, 32), (4, 64, 32), (8, 64, 32)):
        words = torch.randint(-(2**31), 2**31, (k * width // 32, n), generator=generator(f"shuffle{width}"),
                              dtype=torch.int64).int()  # fmt: skip
        for name, perm in (("plain", None), ("perm", torch.randperm(k, generator=generator("perm")).int())):
            if perm is not None and width == 3:
                continue
            with record.attempt(f"gptq_shuffle {width} {name}"):
                out = words.cuda().clone()
                ops.gptq_shuffle(out, empty if perm is None else perm.cuda(), width)
                record.case("gptq_shuffle", f"{width}bit_{name}", "gptq_shuffle", {"bits": width},
                            {"qweight": words, "q_perm": perm}, {"out": bits(out)})  # fmt: skip
    for m, k, n, groups in ((1, 256, 64, 2), (7, 128, 64, 4), (60, 128, 32, 1)):
        q, zero = codes(f"gptq{k}{n}", 16, k, n), codes(f"gptqz{k}{n}", 15, groups, n)
        words, zeros = quant_utils.gptq_pack(q, 4, k, n), quant_utils.pack_cols(zero, 4, groups, n)
        s, x = scales(f"gptqs{k}{n}", groups, n), normal(f"gptqx{m}{k}", m, k, dtype=F16)
        for name, v2, g_idx in (("v1", False, None), ("v2", True, None), ("g_idx", False, True)):
            order = torch.randperm(k, generator=generator(f"g{k}")) // (k // groups) if g_idx else None
            group_of = torch.arange(k) // (k // groups) if order is None else order
            with record.attempt(f"gptq_gemm {m}x{k}x{n} {name}"):
                out = ops.gptq_gemm(x.cuda(), words.cuda(), zeros.cuda(), s.cuda(), group_of.int().cuda(), False, v2, 4)
                record.case("gptq_gemm", f"{m}x{k}x{n}_{name}", "gptq_gemm", {"use_v2_format": v2},
                            {"a": x, "b_q_weight": words, "b_gptq_qzeros": zeros, "b_gptq_scales": s,
                             "b_g_idx": None if order is None else order.int()}, {"out": bits(out)})  # fmt: skip
        if groups == 1 or m == 7:
            with record.attempt(f"gptq_gemm {m}x{k}x{n} exllama"):
                mixed = words.cuda().clone()
                ops.gptq_shuffle(mixed, empty, 4)
                out = ops.gptq_gemm(x.cuda(), mixed, zeros.cuda(), s.cuda(), empty, True, False, 4)
                record.case("gptq_gemm", f"{m}x{k}x{n}_exllama", "gptq_gemm", {"use_exllama": True},
                            {"a": x, "b_q_weight": bits(mixed), "b_gptq_qzeros": zeros, "b_gptq_scales": s},
                            {"out": bits(out)})  # fmt: skip


def awq(record: Record) -> None:
    from vllm.model_executor.layers.quantization.utils import quant_utils

    for m, k, n, groups in ((1, 256, 64, 2), (7, 128, 128, 4), (40, 64, 64, 1)):
        q, zero = codes(f"awq{k}{n}", 16, k, n), codes(f"awqz{k}{n}", 16, groups, n)
        words, zeros = quant_utils.awq_pack(q, 4, k, n), quant_utils.awq_pack(zero, 4, groups, n)
        s, x = scales(f"awqs{k}{n}", groups, n), normal(f"awqx{m}{k}", m, k, dtype=F16)
        with record.attempt(f"awq_dequantize {k}x{n}"):
            out = torch.ops._C.awq_dequantize(words.cuda(), s.cuda(), zeros.cuda(), 0, 0, 0)
            record.case("awq_dequantize", f"{k}x{n}", "awq_dequantize", {},
                        {"qweight": words, "scales": s, "zeros": zeros}, {"out": bits(out)})  # fmt: skip
        with record.attempt(f"awq_gemm {m}x{k}x{n}"):
            out = torch.ops._C.awq_gemm(x.cuda(), words.cuda(), s.cuda(), zeros.cuda(), 8)
            record.case("awq_gemm", f"{m}x{k}x{n}", "awq_gemm", {"rounding": "vllm"},
                        {"input": x, "qweight": words, "scales": s, "qzeros": zeros}, {"out": bits(out)})  # fmt: skip


def marlin(record: Record) -> None:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils, quant_utils
    from vllm.scalar_type import scalar_types

    empty = torch.empty(0, dtype=torch.int32, device="cuda")
    for width in (4, 8):
        k, n, q = 128, 64, codes(f"repack{width}", 1 << width, 128, 64)
        for a8 in (False, True):
            words = quant_utils.gptq_pack(q, width, k, n)
            flags = {"bits": width, "is_a_8bit": a8}
            with record.attempt(f"gptq_marlin_repack {flags}"):
                out = ops.gptq_marlin_repack(words.cuda(), empty, k, n, width, a8)
                record.case("gptq_marlin_repack", f"{width}bit{'_a8' * a8}", "gptq_marlin_repack", flags,
                            {"b_q_weight": words}, {"out": bits(out)})  # fmt: skip
            packed = quant_utils.awq_pack(q, width, k, n)
            with record.attempt(f"awq_marlin_repack {flags}"):
                out = ops.awq_marlin_repack(packed.cuda(), k, n, width, a8)
                record.case("awq_marlin_repack", f"{width}bit{'_a8' * a8}", "awq_marlin_repack", flags,
                            {"b_q_weight": packed}, {"out": bits(out)})  # fmt: skip
        perm = torch.randperm(k, generator=generator(f"repack_perm{width}")).int()
        with record.attempt(f"gptq_marlin_repack perm {width}"):
            out = ops.gptq_marlin_repack(words.cuda(), perm.cuda(), k, n, width, False)
            record.case("gptq_marlin_repack", f"{width}bit_perm", "gptq_marlin_repack", {"bits": width},
                        {"b_q_weight": words, "perm": perm}, {"out": bits(out)})  # fmt: skip
    workspace = marlin_utils.marlin_make_workspace_new(torch.device("cuda"))
    for kind, dtype in (("uint4b8", BF16), ("uint4b8", F16), ("uint8b128", BF16), ("uint4", F16)):
        for m, k, n, group in ((1, 128, 128, 32), (17, 256, 64, 128), (70, 128, 128, -1)):
            width, groups = 4 if "4" in kind else 8, 1 if group == -1 else k // group
            q = codes(f"marlin{kind}{k}{n}", 1 << width, k, n)
            words = ops.gptq_marlin_repack(quant_utils.gptq_pack(q, width, k, n).cuda(), empty, k, n, width, False)
            s = scales(f"marlin{kind}{k}{n}", groups, n, dtype=dtype).cuda()
            s = marlin_utils.marlin_permute_scales(s, k, n, group)
            zeros = None
            if kind == "uint4":
                zeros = marlin_utils.marlin_zero_points(codes(f"mz{k}{n}", 16, groups, n).cuda(), groups, n, 4)
            x = normal(f"marlinx{m}{k}", m, k, dtype=dtype).cuda()
            for name, bias in (("", None), ("_bias", normal(f"marlinb{n}", n, dtype=dtype).cuda())):
                if name and m != 17:
                    continue
                own = None if bias is None else marlin_utils.marlin_permute_bias(bias)
                full = f"{kind}_{str(dtype)[6:]}_{m}x{k}x{n}_{group}{name}"
                with record.attempt(f"marlin_gemm {full}"):
                    out = ops.marlin_gemm(x, None, words, own, s, None, None, zeros, empty, empty, workspace,
                                          getattr(scalar_types, kind), m, n, k, is_k_full=True,
                                          use_fp32_reduce=True)  # fmt: skip
                    record.case("marlin_gemm", full, "marlin_gemm", {"quant_type": kind},
                                {"a": x, "b_q_weight": words, "b_scales": s, "b_zeros": zeros, "b_bias": own},
                                {"out": bits(out)})  # fmt: skip


def machete(record: Record) -> None:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.scalar_type import scalar_types

    for kind, places in (("uint4b8", 4), ("uint8b128", 2)):
        width, k, n = 4 if places == 4 else 8, 128, 256
        for place in range(places):
            words = quant_utils.gptq_pack(digit(place, width, k, n), width, k, n)
            for dtype in (F16, BF16)[: 2 if place == 0 else 1]:
                with record.attempt(f"machete_prepack_b {kind} {place} {dtype}"):
                    out = ops.machete_prepack_B(by_columns(words), dtype, getattr(scalar_types, kind), dtype)
                    record.case("machete_prepack_b", f"{kind}_digit{place}_{str(dtype)[6:]}", "machete_prepack_B",
                                {"bits": width}, {"b_q_weight": words},
                                {"out": bits(out)})  # fmt: skip
    for kind, dtype, m, k, n, group in (
        ("uint4b8", BF16, 1, 128, 128, 128), ("uint4b8", F16, 33, 256, 128, 64), ("uint4", BF16, 5, 256, 128, 128),
        ("uint8b128", F16, 16, 128, 256, 128), ("uint4b8", BF16, 70, 128, 128, 128),
    ):  # fmt: skip
        width = 4 if "4" in kind else 8
        words = quant_utils.gptq_pack(codes(f"machete{kind}{k}{n}", 1 << width, k, n), width, k, n)
        packed = ops.machete_prepack_B(by_columns(words), dtype, getattr(scalar_types, kind), dtype)
        s = scales(f"machetes{k}{n}", k // group, n, dtype=dtype).cuda()
        zeros = None
        if kind == "uint4":
            zeros = (-1.0 * s * codes(f"machetez{k}{n}", 16, k // group, n).cuda().to(dtype)).contiguous()
        x = normal(f"machetex{m}{k}", m, k, dtype=dtype).cuda()
        name = f"{kind}_{str(dtype)[6:]}_{m}x{k}x{n}_{group}"
        with record.attempt(f"machete_mm {name}"):
            out = ops.machete_mm(x, packed, getattr(scalar_types, kind), None, s, zeros, group)
            record.case("machete_mm", name, "machete_mm", {"quant_type": kind},
                        {"a": x, "b_q": bits(packed), "b_group_scales": s,
                         "b_group_zeros": zeros}, {"out": bits(out)})  # fmt: skip


def allspark(record: Record) -> None:
    from vllm import _custom_ops as ops

    for k, n, dtype in ((64, 64, F16), (128, 48, BF16)):
        q, s = codes(f"allspark{k}", 256, k, n).to(torch.uint8), scales(f"allspark{k}", 1, n, dtype=dtype)
        with record.attempt(f"allspark_repack_weight {k}x{n}"):
            out, permuted, _ = ops.allspark_repack_weight(q.cuda(), s.cuda(), None, False)
            record.case("allspark_repack_weight", f"{k}x{n}", "allspark_repack_weight", {},
                        {"qweight": q, "scale": s}, {"out": bits(out), "scale_out": bits(permuted)})  # fmt: skip
        facts = torch.cuda.get_device_properties(0)
        for m in (1, 40):
            x = normal(f"allsparkx{m}{k}", m, k, dtype=dtype)
            with record.attempt(f"allspark_w8a16_gemm {m}x{k}x{n}"):
                product = ops.allspark_w8a16_gemm(x.cuda(), out, permuted, None, n, -1, facts.multi_processor_count,
                                                  facts.major * 10 + facts.minor, 1024, False, True)  # fmt: skip
                record.case("allspark_w8a16_gemm", f"{m}x{k}x{n}", "allspark_w8a16_gemm", {"n": n},
                            {"a": x, "b_qweight": bits(out), "b_scales": bits(permuted)},
                            {"out": bits(product)})  # fmt: skip


def w4a8(record: Record) -> None:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import quant_utils

    k, n = 128, 256
    for place in range(4):
        words = quant_utils.gptq_pack(digit(place, 4, k, n), 4, k, n)
        with record.attempt(f"cutlass_encode_and_reorder_int4b {place}"):
            out = ops.cutlass_encode_and_reorder_int4b(by_columns(words))
            record.case("cutlass_encode_and_reorder_int4b", f"digit{place}", "cutlass_encode_and_reorder_int4b", {},
                        {"b": words}, {"out": bits(out)})  # fmt: skip
    every = torch.arange(1, 0x7F, dtype=torch.uint8)[:120].reshape(2, 60)
    with record.attempt("cutlass_pack_scale_fp8"):
        out = ops.cutlass_pack_scale_fp8(every.cuda().view(FP8))
        record.case("cutlass_pack_scale_fp8", "codes", "cutlass_pack_scale_fp8", {}, {"scales": every},
                    {"out": bits(out).reshape(2, 60, 8)})  # fmt: skip
    for m, k, n in ((1, 256, 128), (19, 128, 256), (70, 256, 128)):
        q = codes(f"w4a8{k}{n}", 16, k, n)
        words = quant_utils.gptq_pack(q, 4, k, n)
        own = ops.cutlass_encode_and_reorder_int4b(by_columns(words))
        group = (torch.rand(k // 128, n, generator=generator(f"w4a8s{k}{n}")) * 2 + 0.5).to(FP8).cuda()
        table = ops.cutlass_pack_scale_fp8(group)
        channel, token = scales(f"w4a8c{n}", n, 1, dtype=F32).cuda(), scales(f"w4a8t{m}", m, 1, dtype=F32).cuda()
        x = normal(f"w4a8x{m}{k}", m, k, scale=4).to(FP8).cuda()
        with record.attempt(f"cutlass_w4a8_mm {m}x{k}x{n}"):
            out = ops.cutlass_w4a8_mm(x, own, table, 128, channel, token)
            record.case("cutlass_w4a8_mm", f"{m}x{k}x{n}", "cutlass_w4a8_mm", {},
                        {"a": bits(x), "b_q": bits(own), "b_group_scales": bits(table).reshape(*group.shape, 8),
                         "b_channel_scales": channel.reshape(-1),
                         "a_token_scales": token.reshape(-1)}, {"out": bits(out)})  # fmt: skip


def wna16(record: Record) -> None:
    for part in (gptq, awq, marlin, machete, allspark, w4a8):
        with record.attempt(part.__name__):
            part(record)


def mxfp4(record: Record) -> None:
    from vllm import _custom_ops as ops

    for dtype in (BF16, F16):
        for n in (2, 64, 256, 2048, 32768):
            x = normal(f"hadacore{n}", 2 if n < 32768 else 1, n, dtype=dtype)
            with record.attempt(f"hadacore_transform {n} {dtype}"):
                out = ops.hadacore_transform(x.cuda().clone())
                record.case("hadacore_transform", f"{n}_{str(dtype)[6:]}", "hadacore_transform", {}, {"x": x},
                            {"out": bits(out)})  # fmt: skip


def fp8_blocks(record: Record) -> None:
    """DeepGEMM, float32 scales: the plain product, groups end to end, and groups with counts."""
    from vllm.utils import deep_gemm

    for m, n, k in ((1, 128, 256), (64, 192, 384), (100, 256, 128)):
        a, b = normal(f"dga{m}{k}", m, k), normal(f"dgb{n}{k}", n, k)
        codes_b, sb = deep_gemm.per_block_cast_to_fp8(b.cuda(), [128, 128], use_ue8m0=False)
        amax = a.reshape(m, k // 128, 128).abs().amax(2).clamp(1e-4)
        sa = (amax / 448).float()
        codes_a = (a / sa.repeat_interleave(128, 1)).to(FP8).cuda()
        with record.attempt(f"fp8_gemm_nt {m}x{n}x{k}"):
            out = torch.empty(m, n, dtype=BF16, device="cuda")
            aligned = deep_gemm.get_col_major_tma_aligned_tensor(sa.cuda())
            deep_gemm.fp8_gemm_nt((codes_a, aligned), (codes_b, sb), out, is_deep_gemm_e8m0_used=False)
            record.case("fp8_gemm_nt", f"{m}x{n}x{k}", "fp8_gemm_nt", {},
                        {"a": bits(codes_a), "scale_a": sa, "b": bits(codes_b), "scale_b": sb},
                        {"out": bits(out)})  # fmt: skip
    groups, n, k, rows = 3, 128, 128, 128
    a, b = normal("dgg", rows * groups, k), normal("dggb", groups * n, k)
    codes_b, sb = deep_gemm.per_block_cast_to_fp8(b.cuda(), [128, 128], use_ue8m0=False)
    codes_b, sb = codes_b.reshape(groups, n, k), sb.reshape(groups, n // 128, k // 128)
    sa = (a.reshape(len(a), k // 128, 128).abs().amax(2).clamp(1e-4) / 448).float()
    codes_a = (a / sa.repeat_interleave(128, 1)).to(FP8).cuda()
    indices = torch.arange(groups).repeat_interleave(rows).int()
    with record.attempt("m_grouped_fp8_gemm_nt_contiguous"):
        out = torch.empty(len(a), n, dtype=BF16, device="cuda")
        aligned = deep_gemm.get_col_major_tma_aligned_tensor(sa.cuda())
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((codes_a, aligned), (codes_b, sb), out, indices.cuda())
        record.case("m_grouped_fp8_gemm_nt_contiguous", f"{groups}x{rows}", "m_grouped_fp8_gemm_nt_contiguous", {},
                    {"a": bits(codes_a), "scale_a": sa, "b": bits(codes_b), "scale_b": sb, "m_indices": indices},
                    {"out": bits(out)})  # fmt: skip
    counts = torch.tensor([3, 0, 100], dtype=torch.int32)
    with record.attempt("m_grouped_fp8_gemm_nt_masked"):
        out = torch.zeros(groups, rows, n, dtype=BF16, device="cuda")
        per = deep_gemm.get_col_major_tma_aligned_tensor(sa.reshape(groups, rows, -1).cuda())
        deep_gemm.fp8_m_grouped_gemm_nt_masked((codes_a.reshape(groups, rows, k), per), (codes_b, sb), out,
                                               counts.cuda(), 64)  # fmt: skip
        for group, count in enumerate(counts.tolist()):
            out[group, count:] = 0  # nobody's: whole blocks were multiplied
        record.case("m_grouped_fp8_gemm_nt_masked", f"{groups}x{rows}", "fp8_m_grouped_gemm_nt_masked", {},
                    {"a": bits(codes_a.reshape(groups, rows, k)), "scale_a": sa.reshape(groups, rows, -1),
                     "b": bits(codes_b), "scale_b": sb, "masked_m": counts}, {"out": bits(out)})  # fmt: skip


FAMILIES = {"wna16": wna16, "mxfp4": mxfp4, "fp8_blocks": fp8_blocks}


if __name__ == "__main__":
    run_cuda(FAMILIES, __file__, __doc__)
