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
_TILES = {
    "a block less": ("(job.depth + K_TILE - 1) / K_TILE", "job.depth / K_TILE"),
    "k beyond the end": ("k + 16 * v < job.depth", "true"),
    "the second group's weights": ("here + group * 64 * K_TILE", "here"),
    "sums that stay": ("multiply(part, here, false)", "multiply(part, here, block > 0)"),
    "one step of k": ("further(tokens, s)", "further(tokens, 0)"),

    "full too early": ("barrier_wait(full + stage, parity);\n                    stores", "stores"),
    "empty too early": ("barrier_wait(empty + stage, parity ^ 1);", ""),
    "results while others write": ("some_meet(128 * GROUPS);\n            job.write", "job.write"),
    "the first tiles alone": ("rest % high", "rest % TILES_DOWN"),
}  # fmt: skip

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "fp8_matmul": _EXACT | {
        "azp of the first token": ("azp ? azp[token] : 1", "azp ? azp[0] : 1"),
        "scales of the first row": ("scale_a[by_row ? token : 0]", "scale_a[0]"),
        "scales of the first column": ("scale_b[by_column ? column : 0]", "scale_b[0]"),
        "the bias before the scale": ("vt_fma(row, scaled, addend[0])", "row * (scaled + addend[0])"),
        "one rounding": ("through_bf16 ? through(scaled, BF16) : scaled", "scaled"),
        "eight columns at the edge": ("tile.columns - first < 8 ? tile.columns - first : 8", "8"),
    },
    "fp8_blocks": _TILES | {
        "scales of the first block": ("(packed ? block >> 2 : block) * scale_block", "0"),
        "the first exponent of a word": ("word >> 8 * (block & 3)", "word"),
        "rows that fill up": ("(kind != CONTIGUOUS || experts[token] >= 0)", "true"),
        "the first expert's scales": ("(tile.expert * ((columns + height - 1) / height) + column", "(column"),
        "the first expert's weights": ("((expert < 0 ? 0 : expert) * columns + column)", "column"),
        "rows beyond the mask": ("if (real < tokens)", "if (false)"),
        "scales in the other order": ("first ? vt_fma(row * weights", "true ? vt_fma(row * weights"),
        "scales of the neighbour": ("own_words[2 * i + 1]", "own_words[2 * i]"),
    },
}  # fmt: skip
