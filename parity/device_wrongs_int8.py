"""Small wrongs for the sources of the int8 quantisers' kernels and of FP8 under given scales."""

from __future__ import annotations

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "quant_int8": {
        "sums wrap": ("azp >= -SMALL_AZP && azp <= SMALL_AZP", "true"),
        "small zero points forgotten": ("-32768, 32767) + azp;", "-32768, 32767);"),
        "one warp's range": ("lane < count ? words[lane] : NO_RANGE", "lane < 1 ? words[lane] : NO_RANGE"),
        "to nearest where codes are cut": ("c[j] = whole_int(q[j])", "c[j] = nearest_int(q[j])"),
        "one warp's extrema": ("lane < count ? tops[lane] : -VT_INF", "lane < 1 ? tops[lane] : -VT_INF"),
        "a lane's own range": (
            "for (int m = lanes >> 1; m >= 1; m >>= 1)\n        range =",
            "for (int m = 0; m >= 1;)\n        range =",
        ),
        "the CPU's zero point forgotten": ("q[j] += (float)zero", "q[j] += 0.0f"),
        "one value alone": ("azp = none ? -128 : nearest_int(", "azp = nearest_int("),
    },
    "fp8_weights": {
        "the first rows' reciprocals": ("if (row_of_groups != known) inverses", "if (known == 0xffffffffu) inverses"),
        "vectors of rows side by side": ("place = place * across + whole_quotient", "place = place + whole_quotient"),
        "the first group of every row": ("whole_quotient(at - row * per_row, magic[2]", "whole_quotient(0u, magic[2]"),
        "the first rows of a band": ("raw[r].a = from[r * (stride >> 3)]", "raw[r].a = from[0]"),
        "scales of rows side by side": ("row_of_groups * groups.across", "row_of_groups"),
        "never through float16": (
            "e4m3_pair(widen_f16(halves & 0xffffu) * inverse, widen_f16(halves >> 16) * inverse)",
            "e4m3_pair(v[2 * j] * scale * inverse, v[2 * j + 1] * scale * inverse)",
        ),
        "neighbours for each other": (
            "narrow_f16(v[2 * j] * scale, v[2 * j + 1] * scale)",
            "narrow_f16(v[2 * j + 1] * scale, v[2 * j] * scale)",
        ),
        "the first scale for the largest": ("largest = largest_scale(of.scales, of.count)", "largest = of.scales[0]"),
        "whatever the last scale": ("stay = of.scales[of.count - 1] <= UNSET", "stay = false"),
        "shards that begin late": ("shard += at >= of.end[s]", "shard += at > of.end[s]"),
        "the first shards' scales again": ("of.scales[of.first + shard]", "of.scales[shard]"),
        "the largest scale never stored": ("if (of.most != nullptr && begin == 0)", "if (false)"),
    },
}  # fmt: skip
