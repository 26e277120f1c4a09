"""Small wrongs for the sources of the quantised caches' kernels."""

from __future__ import annotations

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "kv_quant": {
        "negative slots wrap": ("if (slot < 0 || slot >= room) return;", "if (slot >= room) return;"),
        "multiply by the reciprocal": ("largest_of(x, false), false).divide", "largest_of(x, false), true).divide"),
        "the first head's scale": ("return scales[h * step];", "return scales[0];"),
        "the key's scale for both": ("second ? v_scale.scales : k_scale.scales", "k_scale.scales"),
        "half of sixteen": ("larger_pair<false>(largest_pair<false>(low.a), largest_pair<false>(high.a))",
                            "largest_pair<false>(low.a)"),
        "eight codes twice": ("    widen(x, high, BF16);\n    divisor", "    widen(x, low, BF16);\n    divisor"),
        "the first sixteen of a head": ("+ within) = codes;", ") = codes;"),
        "halves of e5m2 away from zero": ("0xfffffu + (bits >> 21 & 1u)", "0x100000u"),
        "every page's first row": ("page * block + offset * row + h * head", "page * block + h * head"),
        "read under the first head's scale": ("o * scale_token + h * scale_head", "o * scale_token"),
    },
    "kv_quant_heads": {
        "halves to even": ("return y + vt_float((vt_bits(y)", "return rintf(y) + 0 * vt_float((vt_bits(y)"),
        "the other side's factor": ("put(k, keys, odd ? other : inverse);", "put(k, keys, odd ? inverse : other);"),
        "the first quarter four times": ("*(const uint2*)(x + p * step)", "*(const uint2*)x"),
        "a lane's own size": (
            "pair = larger_pair<false>(pair, __shfl_xor_sync(FULL_WARP, pair, m));\n    if (!inside",
            "__shfl_xor_sync(FULL_WARP, pair, m);\n    if (!inside",
        ),
        "keys and values under the key's scale": ("*(second ? values.scale(page", "*(false ? values.scale(page"),
        "the scale not stripped": ("(vt_bits(scale) & ~15) | (int)zero", "vt_bits(scale) | (int)zero"),
        "half a row's least element": (
            "larger_signed_pair(w.z ^ 0x80008000u, w.w ^ 0x80008000u)",
            "larger_signed_pair(w.x ^ 0x80008000u, w.y ^ 0x80008000u)",
        ),
        "the zero point read twice": ("- (bits & 15)) * scale", "- 2 * (bits & 15)) * scale"),
        "a stage less": ("        butterflies<8 * Q, 16>(v);\n", ""),
        "the signs of the first eight": ("words >> 8 * (group & 7)", "words"),
    },
    "kv_quant_latent": {
        "tiles in another order": ("4 * (2 * (lane & 1) + (lane >> 4))", "4 * (2 * (lane >> 4) + (lane & 1))"),
        "a lane's own scale for both tiles": ("bool mine = (lane & 1) == c;", "bool mine = true;"),
        "the rotated part stays": ("    put_word(entry + LATENT + 4 * TILES + 4 * lane, pair, unit);\n", ""),
        "scales of the first token": ("block + page_size * KEY + offset * 4", "block + page_size * KEY"),
        "never a power of two": ("if (ue8m0) scale = power_of_two(scale);", ""),
        "scales from among codes": ("size * KEY + row * 4", "row * 4"),
        "scales of sixteen bytes from among codes": ("from + size * KEY + 4 * row", "from + 4 * row"),
        "lanes of another row": ("(from + row * KEY))[lane]", "(from + row * KEY))[lane ^ 1]"),
    },
    "kv_quant_fp4": {
        "scales of values under their own token": ("to.offset - t + turn", "to.offset"),
        "the key's scale for both": ("(odd ? v_scale : k_scale)[0]", "k_scale[0]"),
        "the value's factor for the key": ("k, odd ? other : factor", "k, odd ? factor : other"),
        "half a block's maximum": ("lane_maximum<BRAIN>(v, kind) : 0u, 2)", "lane_maximum<BRAIN>(v, kind) : 0u, 1)"),
        "multiply by the scale": ("float global = 1.0f / (", "float global = ("),
        "the key's scale for both sixteens": ("(second ? v_scale : k_scale)[0]", "k_scale[0]"),
        "half of sixteen": ("larger_pair<KEEP>(largest_pair<KEEP>(a), largest_pair<KEEP>(b))", "largest_pair<KEEP>(a)"),
        "sixteen with a NaN": ("(vt_float((int)largest_of_sixteen<true>(", "(vt_float((int)largest_of_sixteen<false>("),
        "ties of sixteens go up": ("is_middling(step, scale) && !may_tie(step)", "is_middling(step, scale)"),
        "sixteens under their own token": ("steps_of(offset - t + turn, side", "steps_of(offset, side"),
    },
}  # fmt: skip
