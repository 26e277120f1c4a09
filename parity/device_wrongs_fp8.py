"""Small wrongs for the sources of the 8-bit products."""

from __future__ import annotations

_EXACT = {
    "the other sign": (
        "return code & 0x80u ? -size : size;\n}\nVT_FN float value_of(unsigned code, int)",
        "return size;\n}\nVT_FN float value_of(unsigned code, int)",
    ),
    "subnormals are normal": ("exponent ? vt_float((int)((exponent", "true ? vt_float((int)((exponent"),
    "codes are never NaN": ("if ((code & 0x7fu) == 0x7fu) size = VT_NAN;", ""),
    "a chain too few": ("chain < CHAINS &&", "chain < CHAINS - 1 &&"),
    "chains side by side": ("k += CHAINS * PIECE", "k += PIECE"),
}
_WHOLE = {
    "int8 sums begin anew": ("multiply(total[w], here, w, block > 0)", "multiply(total[w], here, w, false)"),
    "stages let go unasked": ("if (block > 0) release(before)", "if (block > 1) release(before)"),
    "the first tiles alone": ("rest % left", "rest % high"),
    "halves as bfloat16": ("return out_kind == F16", "return out_kind == F32"),
}  # fmt: skip
_LOADED = {
    "a block less of k": ("(job.depth + 127) / K_TILE", "job.depth / K_TILE"),
    "full too early": ("barrier_wait(full + stage, parity);\n                    int here", "int here"),
    "empty too early": ("barrier_wait(empty + stage, parity ^ 1);\n                        bring_weights",
                        "bring_weights"),
    "half of the bytes expected": ("barrier_expect(full + stage, STAGE)", "barrier_expect(full + stage, STAGE / 2)"),
    "the first half of the tokens": ("(int)tile.token + first,", "(int)tile.token,"),
    "the first half of the weights": ("row + first, across", "row, across"),
    "the weights of the first stage ahead": ("++stage) bring_weights(tile, stage)", "++stage) bring_weights(tile, 0)"),
    "weights that came ahead anew": ("if (--ahead < 0) {", "if (--ahead < -1) {"),
    "the first wave's rows": ("from * STAGE + wave * 64 * K_TILE", "from * STAGE"),
    "the first group's rows": ("+ group * WAVES * 64 * K_TILE", ""),
    "one step of k": ("further(b, s)", "further(b, 0)"),
    "the place of the neighbour": ("place(row, j) + 4 * (lane & 3)", "place(row, j) + 4 * (lane & 1)"),
    "results while others write": ("group_meets(group);\n#pragma unroll\n                        for (int i = 0; i < 4",
                                   "\n#pragma unroll\n                        for (int i = 0; i < 4"),
    "rows beyond the last": ("top + row < tile.rows && column", "column"),
    "other tokens' upper scales": ("i & 2 ? lower : upper", "upper"),
    "the weights' scale of the first block": ("weights + block", "weights"),
    "scales before they are there": ("JOB::SCALED ? 2 + SCALERS : 1", "1"),
}  # fmt: skip
_NARROW = {
    "narrow sums forget those before": ("total[i] += part[i];", "total[i] = part[i];"),
    "narrow stages before they are there": ("[&] { barrier_wait(full + stage, parity); }", "[&] {}"),
    "narrow stages before they are read": (
        "barrier_wait(empty + stage, parity);\n                lanes_meet();", "lanes_meet();",
    ),
    "half of a narrow stage": ("barrier_expect(full + stage, brought);", "barrier_expect(full + stage, brought / 2);"),
    "every stage's first 128 k": ("int k = (step * DEEP + d) * K_TILE;", "int k = step * DEEP * K_TILE;"),
    "the first narrow tile's rows": ("full + stage, k, (int)tile.token);", "full + stage, k, 0);"),
    "narrow tiles of the first tokens": ("below = number - beside * down;", "below = 0;"),
    "ends of the first column": ("job.column_ends(tile, own)", "job.column_ends(tile, 0)"),
    "ends of the first rows": ("job.row_end(tile, group * 64 + own - 64)", "job.row_end(tile, own - 64)"),
    "columns beyond the last": ("if (room > 0) *(unsigned*)", "*(unsigned*)"),
    "a column beyond the last": ("if (room > 1) to", "to"),
    "ends of the tile before": ("group_meets(group);\n            if (top", "if (top"),
}  # fmt: skip

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "fp8_matmul": _EXACT | _WHOLE | _NARROW | {
        "azp of the first token": ("azp ? azp[token] : 1", "azp ? azp[0] : 1"),
        "scales of the first row": ("scale_a[by_row ? token : 0]", "scale_a[0]"),
        "scales of the first column": ("scale_b[by_column ? column : 0]", "scale_b[0]"),
        "the bias before the scale": ("vt_fma(row.scale, scaled, ends.addend)", "row.scale * (scaled + ends.addend)"),
        "one rounding": ("through_bf16 ? through(scaled, BF16) : scaled", "scaled"),
        "eight columns at the edge": ("tile.columns - first < 8 ? tile.columns - first : 8", "8"),
        "scales of the first tile's columns": ("column < tile.columns ? tile.column + column : 0", "column"),
        "scales of the first tile's rows": ("row < tile.tokens ? tile.token + row : 0", "row"),
    },
    "fp8_blocks": _LOADED | {
        "scales of the first block": ("(packed ? block >> 2 : block) * scale_block", "0"),
        "the first exponent of a word": ("word >> 8 * (block & 3)", "word"),
        "rows that fill up": ("(kind != CONTIGUOUS || experts[tile.token + row] >= 0)", "true"),
        "the first expert's scales": ("(tile.expert * ((columns + height - 1) / height) + column", "(column"),
        "the first expert's weights": ("tile.expert * job.columns + tile.column", "tile.column"),
        "rows beyond the mask": ("if (real < tokens)", "if (false)"),
        "scales in the other order": ("first ? vt_fma(row * weights", "true ? vt_fma(row * weights"),
        "scales of the neighbour": ("mine[8 * i + 1]", "mine[8 * i]"),
    },
}  # fmt: skip
