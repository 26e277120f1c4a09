"""The sigmoid gate of attention, and the post-convolution step of the gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_normal
from .bench import TOKENS, Bench


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield sigmoid_gate(T)
        yield gdn_post_conv(T)


def sigmoid_gate(T: int, N: int = 8192) -> Bench:
    def torch():
        import torch

        a, g = torch_normal(T, N), torch_normal(T, N, dtype="float32")
        return lambda: (a * torch.sigmoid(g)).to(torch.bfloat16)

    make = ours("sigmoid_gate_bf16", lambda: ((cupy_normal(T, N), cupy_normal(T, N, dtype=F32)), {}, cupy_empty(T, N)))
    return Bench("gates", f"sigmoid_gate_bf16 {T}x{N}", make, {"torch": torch}, 8 * T * N, 5 * T * N)


def gdn_post_conv(T: int, Hk: int = 16, Hv: int = 48, D: int = 128) -> Bench:
    C = (2 * Hk + Hv) * D

    def fla():
        from vllm.third_party.flash_linear_attention.ops.fused_gdn_prefill_post_conv import fused_post_conv_prep

        conv, a, b = torch_normal(T, C), torch_normal(T, Hv), torch_normal(T, Hv)
        A_log, bias = torch_normal(Hv, dtype="float32"), torch_normal(Hv, dtype="float32")
        return lambda: fused_post_conv_prep(conv, a, b, A_log, bias, Hk, D, D)

    def make():
        heads = cupy_normal(Hv, dtype=F32), cupy_normal(Hv, dtype=F32)
        gates = cupy_empty(T, Hv, dtype=F32), cupy_empty(T, Hv, dtype=F32)
        out = cupy_empty(T, Hk, D), cupy_empty(T, Hk, D), cupy_empty(T, Hv, D), *gates
        arguments = (cupy_normal(T, C), cupy_normal(T, Hv), cupy_normal(T, Hv), *heads)
        return arguments, {"num_k_heads": Hk, "head_k_dim": D}, out

    size = 4 * T * C + 12 * T * Hv
    return Bench("gates", f"gdn_post_conv {T}x{C}", ours("gdn_post_conv", make), {"fla": fla}, size, 3 * T * C)
