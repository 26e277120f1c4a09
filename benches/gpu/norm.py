"""Norms of hidden states, and of the heads of attention and of the gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import cupy_empty, cupy_normal, ours, torch_empty, torch_normal, vllm_ops
from .bench import HIDDEN, TOKENS, Bench


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield rms_norm(T)
        yield rms_norm_with_residual(T)
        yield layer_norm(T)
        yield rms_norm_gated(T)
        yield l2norm(T)


def rms_norm(T: int, H: int = HIDDEN) -> Bench:
    def torch():
        from torch.nn import functional as F

        x, w = torch_normal(T, H), torch_normal(H)
        return lambda: F.rms_norm(x, (H,), w, 1e-6)

    def vllm():
        call, x, w, out = vllm_ops().rms_norm, torch_normal(T, H), torch_normal(H), torch_empty(T, H)
        return lambda: call(out, x, w, 1e-6)

    make = ours("rms_norm", lambda: ((cupy_normal(T, H), cupy_normal(H)), {}, cupy_empty(T, H)))
    return Bench("norm", f"rms_norm {T}x{H}", make, {"torch": torch, "vllm": vllm}, 4 * T * H, 4 * T * H)


def rms_norm_with_residual(T: int, H: int = HIDDEN) -> Bench:
    def torch():
        import torch
        from torch.nn import functional as F

        x, w, r = torch_normal(T, H), torch_normal(H), torch_normal(T, H)
        return lambda: F.rms_norm(torch.add(x, r), (H,), w, 1e-6)

    def vllm():
        call, x, w, r = vllm_ops().fused_add_rms_norm, torch_normal(T, H), torch_normal(H), torch_normal(T, H)
        return lambda: call(x, r, w, 1e-6)

    def make():
        arguments = (cupy_normal(T, H), cupy_normal(H)), {"residual": cupy_normal(T, H)}
        return *arguments, (cupy_empty(T, H), cupy_empty(T, H))

    peers = {"torch": torch, "vllm": vllm}
    return Bench("norm", f"rms_norm + residual {T}x{H}", ours("rms_norm", make), peers, 8 * T * H, 5 * T * H)


def layer_norm(T: int, H: int = HIDDEN) -> Bench:
    def torch():
        from torch.nn import functional as F

        x, w, b = torch_normal(T, H), torch_normal(H), torch_normal(H)
        return lambda: F.layer_norm(x, (H,), w, b)

    make = ours("layer_norm", lambda: ((cupy_normal(T, H), cupy_normal(H), cupy_normal(H)), {}, cupy_empty(T, H)))
    return Bench("norm", f"layer_norm {T}x{H}", make, {"torch": torch}, 4 * T * H, 8 * T * H)


def rms_norm_gated(T: int, heads: int = 48, D: int = 128) -> Bench:
    def torch():
        from torch.nn import functional as F

        x, z, w = torch_normal(T, heads, D), torch_normal(T, heads, D), torch_normal(D)
        return lambda: F.rms_norm(x, (D,), w, 1e-6) * F.silu(z)

    def fla():
        from vllm.third_party.flash_linear_attention.ops.layernorm_guard import layernorm_fn

        x, z, w = torch_normal(T * heads, D), torch_normal(T * heads, D), torch_normal(D)
        return lambda: layernorm_fn(x, w, None, z=z, eps=1e-6, norm_before_gate=True, is_rms_norm=True)

    def make():
        return (cupy_normal(T, heads, D), cupy_normal(T, heads, D), cupy_normal(D)), {}, cupy_empty(T, heads, D)

    size = T * heads * D
    peers = {"torch": torch, "fla": fla}
    return Bench("norm", f"rms_norm_gated {T}x{heads}x{D}", ours("rms_norm_gated", make), peers, 6 * size, 9 * size)


def l2norm(T: int, heads: int = 32, D: int = 128) -> Bench:
    def torch():
        from torch.nn import functional as F

        x = torch_normal(T, heads, D)
        return lambda: F.normalize(x, dim=-1)

    def fla():
        from vllm.third_party.flash_linear_attention.ops.l2norm import l2norm_fwd

        x = torch_normal(T, heads, D)
        return lambda: l2norm_fwd(x)

    make = ours("l2norm", lambda: ((cupy_normal(T, heads, D),), {}, cupy_empty(T, heads, D)))
    size = T * heads * D
    return Bench("norm", f"l2norm {T}x{heads}x{D}", make, {"torch": torch, "fla": fla}, 4 * size, 3 * size)
