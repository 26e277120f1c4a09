"""Op-level goldens from vLLM's CUDA build: INT8 and FP8 under given scales, scaled products, quantised KV caches.

    python goldens/capture/ops_cuda_fp8.py --out goldens/ops [--families fp8 kv_quant]

Runs on a GPU, in vLLM's own environment. Every case stands alone: one that fails is listed under "errors" in its
family's file. Codes are kept as bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from record import Record, generator, normal, run_cuda

BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
SLOTS = torch.tensor([3, 17, -1, 64, 95, 0, 33])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in row-major order, FP8 codes as bytes, once everything that writes it is done."""
    torch.cuda.synchronize()
    tensor = tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def uniform(name: str, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=generator(name)) * 0.04 + 0.01


def operand(kind: str, name: str, *shape: int) -> torch.Tensor:
    if kind == "fp8":
        return normal(name, *shape, scale=8).to(FP8).cuda()
    return torch.randint(-128, 128, shape, generator=generator(name)).to(torch.int8).cuda()


def int8(record: Record) -> None:
    from vllm import _custom_ops as ops

    for rows, width in ((1, 17), (7, 64), (3, 1025), (5, 5120)):
        x = (normal(f"i{rows}x{width}", rows, width, scale=3) + 0.5).to(BF16).cuda()
        for azp in (None, -17, 240):
            shift = None if azp is None else torch.tensor([azp], dtype=torch.int32, device="cuda")
            scale = torch.tensor([0.0213], device="cuda")
            with record.attempt(f"static_scaled_int8_quant {rows}x{width} {azp}"):
                out = ops.scaled_int8_quant(x, scale, shift, symmetric=azp is None)[0]
                record.case("static_scaled_int8_quant", f"{rows}x{width}_azp{azp}", "static_scaled_int8_quant",
                            {"rounding": "cuda"}, {"x": x, "scale": scale, "azp": shift},
                            {"out": bits(out)})  # fmt: skip
        for symmetric in (True, False):
            with record.attempt(f"dynamic_scaled_int8_quant {rows}x{width} {symmetric}"):
                out, scale, shift = ops.scaled_int8_quant(x, symmetric=symmetric)
                more = {} if symmetric else {"azp": bits(shift)}
                record.case("dynamic_scaled_int8_quant", f"{rows}x{width}_{'sym' if symmetric else 'azp'}",
                            "dynamic_scaled_int8_quant", {"rounding": "cuda", "symmetric": symmetric}, {"x": x},
                            {"out": bits(out), "scale": bits(scale), **more})  # fmt: skip
    for rows, size, groups in ((5, 128, 2), (3, 64, 3)):
        x = normal(f"g{rows}x{size}", rows, size * groups, dtype=BF16, scale=3).cuda()
        x[1, :size] = 0
        out = torch.empty_like(x, dtype=torch.int8), torch.empty(rows, groups, device="cuda")
        with record.attempt(f"per_token_group_quant_int8 {rows}x{size}"):
            torch.ops._C.per_token_group_quant_int8(x, *out, size, 1e-10, -128.0, 127.0)
            record.case("per_token_group_quant_int8", f"cuda_{rows}x{size}", "per_token_group_quant_int8",
                        {"group_size": size}, {"x": x}, {"out": bits(out[0]), "scale": bits(out[1])})  # fmt: skip


def weights(record: Record) -> None:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.w8a8_utils import requantize_with_max_scale

    for rows, width in ((8, 256), (5, 384)):
        x = normal(f"w{rows}x{width}", rows, width, dtype=BF16, scale=3).cuda()
        for name, shape in (("token", (1, width)), ("channel", (rows, 1)), ("group", (1, 128))):
            scale = uniform(f"w{name}{rows}", rows // shape[0], width // shape[1]).cuda()
            with record.attempt(f"scaled_fp8_quant_static_group {name} {rows}"):
                out = ops.scaled_fp8_quant(x, scale, group_shape=shape)[0]
                record.case("scaled_fp8_quant_static_group", f"cuda_{name}_{rows}x{width}", "scaled_fp8_quant",
                            {"rounding": "vllm"}, {"x": x, "scale": scale}, {"out": bits(out)})  # fmt: skip
    weight, scale = operand("fp8", "shards", 48, 64), torch.tensor([0.021, 0.034, 0.013], device="cuda")
    before = bits(weight)
    with record.attempt("requantize_with_max_scale"):
        most, out = requantize_with_max_scale(weight, scale, [32, 8, 8])
        record.case("requantize_with_max_scale", "cuda", "requantize_with_max_scale",
                    {"logical_widths": [32, 8, 8]}, {"weight": before, "weight_scale": scale},
                    {"out": bits(out), "scale": bits(most.reshape(1))})  # fmt: skip


def products(record: Record) -> None:
    from vllm import _custom_ops as ops

    for kind in ("fp8", "int8"):
        for m, n, k in ((1, 256, 128), (8, 256, 256), (16, 128, 512), (72, 160, 128)):
            a, b = operand(kind, f"a{m}{k}", m, k), operand(kind, f"b{n}{k}", n, k)
            for by in ("tensor", "row"):
                sa = uniform(f"sa{m}", *((m, 1) if by == "row" else (1,))).cuda()
                sb = uniform(f"sb{n}", *((1, n) if by == "row" else (1,))).cuda()
                for bias in (None, normal(f"bias{n}", n, dtype=BF16).cuda()):
                    name = f"{kind}_{m}x{n}x{k}_{by}{'' if bias is None else '_bias'}"
                    with record.attempt(f"cutlass_scaled_mm {name}"):
                        out = ops.cutlass_scaled_mm(a, b.t(), sa, sb, BF16, bias)
                        record.case("cutlass_scaled_mm", name, "cutlass_scaled_mm", {},
                                    {"a": bits(a), "b": bits(b.t()), "scale_a": sa, "scale_b": sb, "bias": bias},
                                    {"out": bits(out)})  # fmt: skip


def kv_quant(record: Record) -> None:
    from vllm import _custom_ops as ops

    slots, scales = SLOTS.cuda(), [torch.tensor([0.0321], device="cuda"), torch.tensor([0.37], device="cuda")]
    for kind in ("fp8_e4m3", "fp8_e5m2"):
        for dtype in (BF16, F16, F32):
            key, value = (normal(f"{part}{dtype}", 7, 2, 64, scale=9).to(dtype).cuda() for part in "kv")
            caches = [torch.zeros(6, 16, 2, 64, dtype=torch.uint8, device="cuda") for _ in "kv"]
            before = [bits(cache) for cache in caches]
            name = f"{kind}_{str(dtype)[6:]}"
            with record.attempt(f"reshape_and_cache_fp8 {name}"):
                ops.reshape_and_cache_flash(key, value, *caches, slots, kind, *scales)
                record.case("reshape_and_cache_fp8", name, "reshape_and_cache_flash", {"kind": kind},
                            {"key": key, "value": value, "key_cache": before[0], "value_cache": before[1],
                             "slot_mapping": slots, "k_scale": scales[0], "v_scale": scales[1]},
                            {"key_cache": bits(caches[0]), "value_cache": bits(caches[1])})  # fmt: skip
    latent, rope = normal("latent", 7, 512, dtype=BF16).cuda(), normal("rope", 7, 64, dtype=BF16).cuda()
    latent[0, :128] = 0
    cache = torch.zeros(2, 64, 656, dtype=torch.uint8, device="cuda")
    before = bits(cache)
    with record.attempt("concat_and_cache_ds_mla"):
        ops.concat_and_cache_mla(latent, rope, cache, slots, "fp8_ds_mla", torch.ones(1, device="cuda"))
        record.case("concat_and_cache_ds_mla", "bfloat16", "concat_and_cache_mla", {},
                    {"kv_c": latent, "k_pe": rope, "kv_cache": before, "slot_mapping": slots},
                    {"kv_cache": bits(cache)})  # fmt: skip
    out, table = torch.zeros(128, 576, dtype=BF16, device="cuda"), torch.tensor([[0, 1]], device="cuda").int()
    with record.attempt("dequantize_ds_mla"):
        ops.cp_gather_and_upconvert_fp8_kv_cache(cache, out, table, torch.zeros_like(table[0, :1]), 1)
        record.case("dequantize_ds_mla", "cuda", "cp_gather_and_upconvert_fp8_kv_cache", {},
                    {"entries": bits(cache).reshape(128, 656)}, {"out": bits(out)})  # fmt: skip
    keys = normal("keys", 7, 128, dtype=BF16, scale=3).cuda()
    keys[1] = 0
    for ue8m0 in (False, True):
        cache = torch.zeros(2, 64, 132, dtype=torch.uint8, device="cuda")
        before = bits(cache)
        with record.attempt(f"indexer_k_quant_and_cache {ue8m0}"):
            ops.indexer_k_quant_and_cache(keys, cache, slots, 128, "ue8m0" if ue8m0 else "")
            record.case("indexer_k_quant_and_cache", f"cuda{'_ue8m0' * ue8m0}", "indexer_k_quant_and_cache",
                        {"ue8m0": ue8m0}, {"k": keys, "kv_cache": before, "slot_mapping": slots},
                        {"kv_cache": bits(cache)})  # fmt: skip
    table, bounds = torch.tensor([[1, 0], [0, 1]], device="cuda").int(), torch.tensor([0, 70, 97], device="cuda").int()
    found = [torch.zeros(100, width, dtype=torch.uint8, device="cuda") for width in (128, 4)]
    before = [bits(array) for array in found]
    with record.attempt("cp_gather_indexer_k_quant_cache"):
        ops.cp_gather_indexer_k_quant_cache(cache, *found, table, bounds)
        record.case("cp_gather_indexer_k_quant_cache", "cuda", "cp_gather_indexer_k_quant_cache", {},
                    {"kv_cache": bits(cache), "dst_k": before[0], "dst_scale": before[1].view(F32)[:, 0],
                     "block_table": table, "cu_seq_lens": bounds},
                    {"dst_k": bits(found[0]), "dst_scale": bits(found[1]).view(F32)[:, 0]})  # fmt: skip


def fp8(record: Record) -> None:
    int8(record)
    weights(record)
    products(record)


FAMILIES = {"fp8": fp8, "kv_quant": kv_quant}


if __name__ == "__main__":
    run_cuda(FAMILIES, __file__, __doc__)
