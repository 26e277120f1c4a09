"""vLLM's Triton kernels around DeepGEMM's grouped products, interpreted: scatter, gather, gated products as FP8.

python goldens/capture/ops_deep_gemm.py --out goldens/ops
"""

from __future__ import annotations

import exact_fp8  # noqa: F401  (first: it switches Triton on)
import torch
from record import Record, generator, normal, run
from vllm.model_executor.layers.fused_moe import deep_gemm_utils
from vllm.model_executor.layers.fused_moe.experts import batched_deep_gemm_moe
from vllm.model_executor.layers.quantization.utils import fp8_utils

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
KINDS = (F32, F16)
"""The interpreter stores and multiplies bfloat16 wrongly."""


def byte(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def scattered(record: Record) -> None:
    """The interpreter runs one program after the other, so that places are in the order of tokens."""
    for name, count, experts, mapped in (("plain", 9, 4, False), ("mapped", 6, 3, True)):
        draw = generator(name)
        ids = torch.randint(-1, 6 if mapped else experts, (count, 3), generator=draw, dtype=torch.int32)
        known = torch.tensor([2, -1, 0, 1, -1, 2], dtype=torch.int32) if mapped else None
        local = [e if known is None or e < 0 else int(known[e]) for e in ids.flatten().tolist()]
        counts = torch.tensor([local.count(e) for e in range(experts)], dtype=torch.int32)
        x, x_scale = normal(f"x{name}", count, 256, scale=8).to(E4M3), normal(f"s{name}", count, 2).abs()
        rows = 8 * 8
        a, a_scale = torch.zeros(rows, 256).to(E4M3), torch.zeros(rows, 2)
        m_indices, inverse = torch.full((rows,), -1, dtype=torch.int32), torch.full_like(ids, -1)
        inputs = {"a": byte(a), "a_scale": a_scale, "x": byte(x), "x_scale": x_scale, "topk_ids": ids,
                  "expert_map": known}  # fmt: skip
        inputs = {part: value if value is None else value.clone() for part, value in inputs.items()}
        with record.attempt(f"ep_scatter {name}"):
            deep_gemm_utils.ep_scatter(x, x_scale, ids, counts, known, torch.empty_like(counts), a, a_scale, m_indices,
                                       inverse, align_m=8)  # fmt: skip
            record.case("ep_scatter", name, "ep_scatter (interpreted)", {"num_experts": experts, "alignment": 8},
                        inputs, {"m_indices": m_indices, "inv_perm": inverse, "a": byte(a),
                                 "a_scale": a_scale})  # fmt: skip
        for dtype in KINDS:
            rows_of, weights = normal(f"g{name}{dtype}", rows, 64, dtype=dtype), normal(f"w{name}", count, 3).abs()
            out = torch.empty(count, 64, dtype=dtype)
            with record.attempt(f"ep_gather {name}_{dtype}"):
                deep_gemm_utils.ep_gather(rows_of, ids, weights, inverse, known, out)
                record.case("ep_gather", f"{name}_{str(dtype)[6:]}", "ep_gather (interpreted)", {},
                            {"a": rows_of, "topk_weights": weights, "inv_perm": inverse}, {"out": out})  # fmt: skip


def columns(record: Record) -> None:
    for dtype in KINDS:
        for name, options in (
            ("plain", {}), ("clamped", {"clamp_limit": 7.0, "alpha": 1.702, "beta": 1.0}),
            ("ue8m0", {"clamp_limit": 1.5, "ue8m0": True}),
        ):  # fmt: skip
            x, full = normal(f"c{dtype}", 128, 512, dtype=dtype, scale=2), f"{name}_{str(dtype)[6:]}"
            given = {"use_ue8m0": options.get("ue8m0", False)} | {k: v for k, v in options.items() if k != "ue8m0"}
            with record.attempt(f"silu columns {full}"):
                out, scale = fp8_utils.silu_mul_per_token_group_quant_fp8_colmajor(x, **given)
                record.case("silu_mul_per_token_group_quant_fp8_colmajor", full,
                            "silu_mul_per_token_group_quant_fp8_colmajor (interpreted)", options, {"x": x},
                            {"out": byte(out), "scale": scale})  # fmt: skip


def masked(record: Record) -> None:
    """The Triton form, which its caller takes where there is no CUDA op."""
    counts, kernel = torch.tensor([4, 0, 2], dtype=torch.int32), batched_deep_gemm_moe._silu_mul_fp8_quant_deep_gemm
    for ue8m0 in (False, True):
        x = normal("m", 3, 4, 512, dtype=BF16, scale=2)
        codes, scale = torch.zeros(3, 4, 256).to(E4M3), torch.zeros(3, 2, 4).transpose(1, 2)
        inputs = {"x": x, "counts": counts, "codes": byte(codes).clone(), "scale": scale.contiguous().clone()}
        with record.attempt(f"silu masked {ue8m0}"):
            kernel[(6,)](x, codes, scale, counts, 256, 128, *x.stride(), *codes.stride(), *scale.stride(), 1, 1e-10,
                         -448.0, 448.0, ue8m0, BLOCK=128, NUM_STAGES=4, num_warps=1)  # fmt: skip
            record.case("silu_mul_masked_quant", "ue8m0" if ue8m0 else "plain",
                        "_silu_mul_fp8_quant_deep_gemm (interpreted)", {"ue8m0": ue8m0}, inputs,
                        {"codes": byte(codes), "scale": scale.contiguous()})  # fmt: skip


def capture(record: Record) -> None:
    with torch.no_grad():
        for part in (scattered, columns, masked):
            part(record)


if __name__ == "__main__":
    run("deep_gemm", __file__, capture)
