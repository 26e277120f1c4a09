"""Small wrongs for the sources of the quantising kernels."""

from __future__ import annotations

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "quant_fp8": {
        "NaN is the largest": ("return size > 0x7f800000u && !keep_nan ? 0u : size;", "return size;"),
        "half the lanes": ("for (int m = lanes >> 1;", "for (int m = lanes >> 2;"),
        "one warp's maximum": ("w < count ? tops[w] : 0u", "w < 1 ? tops[w] : 0u"),
        "the bound forgotten": (
            "if (size_ub != nullptr) size = vt_minimum(size, size_ub[0]);\n    float scale = rule",
            "float scale = rule",
        ),
        "always multiply": ("rule == VLLM ? size * E4M3_RECIPROCAL : size / E4M3_LARGEST", "size * E4M3_RECIPROCAL"),
        "no least scale": (
            "return vt_maximum(scale, SCALE_FLOOR);\n}\n\nVT_FN float int8",
            "return scale;\n}\n\nVT_FN float int8",
        ),
        "products where a division decides": ("if (sure) return;", "return;"),
        "powers of two below": ("(bits + 0x7fffffu) & 0x7f800000u", "bits & 0x7f800000u"),
        "overflown reciprocals": ("bool fine = inverse < 0x1p126f", "bool fine = true"),
        "divide by zero": ("rule == VT && scale == 0.0f ? 0.0f : 1.0f / scale", "1.0f / scale"),
        "the last group": ("if (at + d * step < count) use(", "if (at + d * step < count - 1) use("),
        "the first block's maximum": ("for (i64 n = threadIdx.x; n < blocks; n += 256)", "for (i64 n = 0; n < 1; ++n)"),
        "scales side by side": ("group - row * per_row) * codes.group_step", "group - row * per_row)"),
        "whole groups alone": ("begin + group_size < width ? begin + group_size : width", "begin + group_size"),
        "codes of contiguous rows": ("row * stride + (number - row * per_row) * V", "number * V"),
        "a step of the code": ("0x7ffffu + (bits >> 20 & 1u)", "0x80000u"),
        "NaN keeps its sign": ("(lo != lo ? nan : low)", "low"),
    },
    "norm_quant": {
        "the residual stays": ("put(norm.residual_out, row * norm.width + at, rounded, BF16);", ""),
        "the unrounded sum": ("                widen(v, rounded, BF16);\n", ""),
        "never native": ("else if (flags & NATIVE)", "else if (false)"),
        "Gemma's weight without one": ("scaled * (w[j] + 1.0f)", "scaled * w[j]"),
        "the rounded sum in the native form": ("if (add && native) norm.sum(v, y[g], other[g]);\n        else ", ""),
        "a scale a lane": ("group_lanes < lanes ? group_lanes : lanes", "1"),
        "scales side by side": ("at / (8 * group_lanes) * group_step", "at / (8 * group_lanes)"),
        "multiply by the scale": ("MODE == STATIC ? 1.0f / scale[0] : 0.0f", "MODE == STATIC ? scale[0] : 0.0f"),
        "never rounded": ("for (int j = 0; j < V; ++j) y[j] = through(y[j], kind);", ""),
        "the act never rounded": ("rounded ? kind : F32", "F32"),
        "vLLM's y rounded": ("if (rule != VLLM) return silu_products", "if (true) return silu_products"),
        "the gate twice": (
            "b[d] = fetch<V>(x, at[d].row * 2 * width + width",
            "b[d] = fetch<V>(x, at[d].row * 2 * width",
        ),
        "bounded like the norms": (
            "(int)rule, nullptr, scale_ub);\n        if",
            "(int)rule, scale_ub, nullptr);\n        if",
        ),
        "the gate in other rows": ("row * gate_stride + first", "row * gate_stride"),
        "SiLU for the sigmoid": ("if (sigmoid) gate_products<false>", "if (sigmoid) gate_products<true>"),
        "the gated value never rounded": ("through(y[j], BF16) * factor", "y[j] * factor"),
        "int8 cut": ("rintf(x / scale)", "truncf(x / scale)"),
        "the token's other bound": ("return int8 ? int8_scale", "return false ? int8_scale"),
    },
}
