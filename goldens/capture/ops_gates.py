"""Gate goldens from vLLM's CPU build: Qwen's gates as its forwards write them, and the Triton gating and
post-convolution kernels of the gated delta rule, interpreted.

    python goldens/capture/ops_gates.py --out goldens/ops

fused_gdn_gating_cpu is left out: with AVX-512 it computes beta in bfloat16 arithmetic, with AVX2 in float32.
"""

from __future__ import annotations

import interpreted  # noqa: F401  before vLLM
import torch
from record import Record, normal, run
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import fused_gdn_gating
from vllm.third_party.flash_linear_attention.ops.fused_gdn_prefill_post_conv import fused_post_conv_prep

BF16, F32 = torch.bfloat16, torch.float32
NATIVE = {"rounding": "vllm_native"}


def sigmoid_gates(record: Record) -> None:
    """Qwen3-Next's attention gate and Qwen2-MoE's shared expert gate: torch, in the model's dtype."""
    for dtype in (F32, BF16):
        name = f"{str(dtype)[6:]}_6x96"
        x, gate = normal("sx" + name, 6, 96, dtype=dtype), normal("sg" + name, 6, 96, dtype=dtype, scale=4)
        gate[0, :4] = torch.tensor([float("inf"), -float("inf"), 80.0, -80.0])
        with record.attempt(f"sigmoid_gate {name}"):
            record.case("sigmoid_gate_bf16", name, "qwen3_next.py: attn_output * torch.sigmoid(gate)", NATIVE,
                        {"attn": x, "gate": gate}, {"out": x * torch.sigmoid(gate)})  # fmt: skip
        one = gate[:, :1].contiguous()
        with record.attempt(f"shared_expert_gate {name}"):
            record.case("shared_expert_gate", name, "qwen2_moe.py: F.sigmoid(expert_gate(x)) * out", NATIVE,
                        {"sd": x, "gl": one}, {"out": torch.nn.functional.sigmoid(one) * x})  # fmt: skip
        packed = normal("pq" + name, 5, 3 * 2 * 8, dtype=dtype)
        with record.attempt(f"attn_gate_split {name}"):
            q, gate = torch.chunk(packed.view(5, 3, -1), 2, dim=-1)
            record.case("attn_gate_split", name, "qwen3_next.py: torch.chunk per head", {"head_dim": 8},
                        {"qgate": packed}, {"q": q, "gate": gate})  # fmt: skip


def gating(record: Record) -> None:
    """-exp(A_log) * softplus(a + dt_bias) and sigmoid(b), with a + dt_bias on both sides of softplus's threshold."""
    for heads in (6, 16):
        name = f"float32_9x{heads}"
        a, b = normal("ga" + name, 9, heads, scale=8), normal("gb" + name, 9, heads, scale=3)
        A_log, dt_bias = normal("gA" + name, heads), normal("gd" + name, heads)
        with record.attempt(f"gdn_g_beta {name}"):
            g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
            record.case("gdn_g_beta", name, "fused_gdn_gating (Triton, interpreted)", {"rounding": "vllm"},
                        {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias},
                        {"g": g[0], "beta": beta[0]})  # fmt: skip


def post_conv(record: Record) -> None:
    for heads_k, heads_v, dim_k, dim_v in ((4, 8, 32, 16), (2, 6, 128, 8), (3, 3, 20, 5)):
        name = f"float32_{heads_k}x{dim_k}_{heads_v}x{dim_v}"
        conv = normal("pc" + name, 5, 2 * heads_k * dim_k + heads_v * dim_v)
        a, b = normal("pa" + name, 5, heads_v, scale=8), normal("pb" + name, 5, heads_v, scale=3)
        A_log, dt_bias = normal("pA" + name, heads_v), normal("pd" + name, heads_v)
        with record.attempt(f"gdn_post_conv {name}"):
            results = fused_post_conv_prep(conv, a, b, A_log, dt_bias, heads_k, dim_k, dim_v)
            record.case("gdn_post_conv", name, "fused_post_conv_prep (Triton, interpreted)",
                        {"num_k_heads": heads_k, "head_k_dim": dim_k, "eps": 1e-6},
                        {"conv": conv, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias},
                        dict(zip(("q", "k", "v", "g", "beta"), results)))  # fmt: skip


def gates(record: Record) -> None:
    with torch.no_grad():
        for part in (sigmoid_gates, gating, post_conv):
            part(record)


if __name__ == "__main__":
    run("gates", __file__, gates)
