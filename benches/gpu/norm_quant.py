"""Norms and SiLU-and-mul that quantise, at the hidden and the intermediate width."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_empty, torch_normal, vllm_ops
from .bench import HIDDEN, INTERMEDIATE, OTHER_HIDDEN, TOKENS, Bench
from .quant_fp8 import U8, given_scale, torch_scale


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        for residual in (False, True):
            yield norm_static(T, residual)
            yield norm_per_token(T, residual)
            yield norm_per_block(T, residual)
        yield gated(T)
        for rounding in ("vt", "vllm"):
            yield silu_static(T, rounding)
            yield silu_per_block(T, rounding)
    for H in OTHER_HIDDEN:
        yield norm_per_token(TOKENS[-1], False, H)
        if H % 128 == 0:  # vLLM's op knows no part of a group
            yield norm_per_block(TOKENS[-1], False, H)


def _norm(name: str, op: str, T: int, H: int, residual: bool, scales: tuple | None, vllm) -> Bench:
    """A norm's bench; `scales`: the shape of its dynamic scales, None where the scale is given."""

    def make():
        args = (cupy_normal(T, H), cupy_normal(H), *(() if scales else (given_scale(),)))
        options = {"residual": cupy_normal(T, H)} if residual else {}
        out = (cupy_empty(T, H, dtype=U8), *((cupy_empty(*scales, dtype=F32),) if scales else ()))
        out += (cupy_empty(T, H),) if residual else ()
        return args, options, out if len(out) > 1 else out[0]

    size = (7 if residual else 3) * T * H + (4 * scales[0] * scales[1] if scales else 0)
    text = f"{name}{' + residual' * residual} {T}x{H}"
    return Bench("norm_quant", text, ours(op, make), {"vllm": vllm}, size, 6 * T * H)


def norm_static(T: int, residual: bool, H: int = HIDDEN) -> Bench:
    def vllm():
        c, x, w, r, scale = vllm_ops(), torch_normal(T, H), torch_normal(H), torch_normal(T, H), torch_scale()
        out = torch_empty(T, H, dtype="float8_e4m3fn")
        if residual:
            return lambda: c.fused_add_rms_norm_static_fp8_quant(out, x, r, w, scale, 1e-6)
        return lambda: c.rms_norm_static_fp8_quant(out, x, w, scale, 1e-6)

    return _norm("rms_norm static", "rms_norm_quant_fp8", T, H, residual, None, vllm)


def norm_per_token(T: int, residual: bool, H: int = HIDDEN) -> Bench:
    def vllm():
        call, x, w = vllm_ops().rms_norm_dynamic_per_token_quant, torch_normal(T, H), torch_normal(H)
        out, scale = torch_empty(T, H, dtype="float8_e4m3fn"), torch_empty(T, 1, dtype="float32")
        r = torch_normal(T, H) if residual else None
        return lambda: call(out, x, w, scale, 1e-6, None, r)

    return _norm("rms_norm per token", "rms_norm_dynamic_per_token_quant", T, H, residual, (T, 1), vllm)


def norm_per_block(T: int, residual: bool, H: int = HIDDEN) -> Bench:
    def vllm():
        call, x, w = vllm_ops().rms_norm_per_block_quant, torch_normal(T, H), torch_normal(H)
        out, scale = torch_empty(T, H, dtype="float8_e4m3fn"), torch_empty(T, H // 128, dtype="float32")
        r = torch_normal(T, H) if residual else None
        return lambda: call(out, x, w, scale, 1e-6, None, r, 128, False)

    return _norm("rms_norm per 128", "rms_norm_per_block_quant", T, H, residual, (T, H // 128), vllm)


def gated(T: int, heads: int = 48, D: int = 128) -> Bench:
    def make():
        x, gate, weight = cupy_normal(T, heads, D), cupy_normal(T, heads, D), cupy_normal(D)
        return (x, gate, weight, given_scale()), {}, cupy_empty(T, heads, D, dtype=U8)

    size = 5 * T * heads * D
    return Bench("norm_quant", f"rms_norm_gated static {T}x{heads}x{D}", ours("rms_norm_gated_quant_fp8", make), {},
                 size, 10 * T * heads * D)  # fmt: skip


def silu_static(T: int, rounding: str, D: int = INTERMEDIATE) -> Bench:
    def vllm():
        call, x, scale = vllm_ops().silu_and_mul_quant, torch_normal(T, 2 * D), torch_scale()
        out = torch_empty(T, D, dtype="float8_e4m3fn")
        return lambda: call(out, x, scale)

    def make():
        return (cupy_normal(T, 2 * D), given_scale()), {"rounding": rounding}, cupy_empty(T, D, dtype=U8)

    return Bench("norm_quant", f"silu_and_mul static {rounding} {T}x{D}", ours("silu_and_mul_quant", make),
                 {"vllm": vllm}, 5 * T * D, 6 * T * D)  # fmt: skip


def silu_per_block(T: int, rounding: str, D: int = INTERMEDIATE) -> Bench:
    G = D // 128

    def vllm():
        call, x = vllm_ops().silu_and_mul_per_block_quant, torch_normal(T, 2 * D)
        out, scale = torch_empty(T, D, dtype="float8_e4m3fn"), torch_empty(T, G, dtype="float32")
        return lambda: call(out, x, scale, 128, None, False)

    def make():
        out = cupy_empty(T, D, dtype=U8), cupy_empty(T, G, dtype=F32)
        return (cupy_normal(T, 2 * D),), {"rounding": rounding}, out

    return Bench("norm_quant", f"silu_and_mul per 128 {rounding} {T}x{D}", ours("silu_and_mul_per_block_quant", make),
                 {"vllm": vllm}, 5 * T * D + 4 * T * G, 8 * T * D)  # fmt: skip
