"""vLLM's Triton scatter for DeepGEMM's grouped products with exponents packed into words, interpreted.

python goldens/capture/ops_deep_gemm_packed.py --out goldens/ops
"""

from __future__ import annotations

import exact_fp8  # noqa: F401  (first: it switches Triton on)
import torch
from record import Record, generator, normal, run
from vllm.model_executor.layers.fused_moe import deep_gemm_utils

E4M3, U8, I32 = torch.float8_e4m3fn, torch.uint8, torch.int32


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in row-major order, also of a lone column."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def capture(record: Record) -> None:
    """Groups of 32 in whole words, and of 64 that leave a word half empty; places are in the order of tokens."""
    for name, count, experts, mapped, width, group in (
        ("plain", 9, 4, False, 256, 32), ("mapped", 6, 3, True, 128, 32), ("half", 5, 3, False, 384, 64),
        ("lone", 4, 2, False, 32, 32),
    ):  # fmt: skip
        ids = torch.randint(-1, 6 if mapped else experts, (count, 3), generator=generator(name), dtype=I32)
        known = torch.tensor([2, -1, 0, 1, -1, 2], dtype=I32) if mapped else None
        local = [e if known is None or e < 0 else int(known[e]) for e in ids.flatten().tolist()]
        counts = torch.tensor([local.count(e) for e in range(experts)], dtype=I32)
        x = normal(f"x{name}", count, width, scale=8).to(E4M3)
        exponents = torch.randint(0, 256, (count, width // group), generator=generator(f"s{name}"), dtype=U8)
        rows, words = 8 * 8, -(-(width // group) // 4)
        a = torch.zeros(rows, width).to(E4M3)
        a_scale = torch.zeros(words, rows, dtype=I32).t()
        m_indices, inverse = torch.full((rows,), -1, dtype=I32), torch.full_like(ids, -1)
        inputs = {"a": a.view(U8).clone(), "a_scale": dense(a_scale), "x": x.view(U8),
                  "x_scale": exponents, "topk_ids": ids, "expert_map": known}  # fmt: skip
        with record.attempt(f"ep_scatter {name}"):
            deep_gemm_utils.ep_scatter(x, exponents, ids, counts, known, torch.empty_like(counts), a, a_scale,
                                       m_indices, inverse, align_m=8, block_size=group, pack_ue8m0=True)  # fmt: skip
            record.case("ep_scatter_ue8m0", name, "ep_scatter, pack_ue8m0 (interpreted)",
                        {"num_experts": experts, "alignment": 8}, inputs,
                        {"m_indices": m_indices, "inv_perm": inverse, "a": a.view(U8),
                         "a_scale": dense(a_scale)})  # fmt: skip


if __name__ == "__main__":
    run("deep_gemm_packed", __file__, capture)
