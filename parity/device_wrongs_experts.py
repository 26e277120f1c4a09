"""Small wrongs for the sources of experts' products with packed weights and of products in groups."""

from __future__ import annotations

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "moe_wna16": {
        "zero points of even columns": ("zero_ahead[c] >> 4 * odd & 15u", "zero_ahead[c] & 15u"),
        "a pair of neighbours": ("return w >> 4 * i & 0x000f000fu;",
                                 "return (w >> 8 * i & 15u) | (w >> (8 * i + 4) & 15u) << 16;"),
        "the eighth bit is a sign": ("(q & 0x00800080u) ^ 0xc380c380u", "0xc300c300u"),
        "zero points of even columns in large tiles": ("zero_ahead[h] >> 4 * odd & 15u", "zero_ahead[h] & 15u"),
        "chains of neighbouring turns": ("turn = turn + TEAM < turns", "turn = turn + 1 < turns"),
        "a row for each choice in large tiles": ("pairs[row] / choices * vectors", "pairs[row] * vectors"),
        "steps of rows exchanged": ("at / 4 * 16 + at % 4;", "at / 4 * 16 + 3 - at % 4;"),
        "scales of the turn's first group": ("scales[at_scale[c] + g]",
                                             "scales[at_scale[c] + (i64)turn * DEEP / group]"),
        "rows go on behind their end": ("uint4 y = k < depth ?", "uint4 y = true ?"),
        "a chain is left out": ("other < TEAM; ++other", "other < TEAM - 1; ++other"),
        "a row for each choice": ("/ choices * depth * 2", "* depth * 2"),
        "the first pair's factor": ("factors == nullptr ? total : total * factors[pair]",
                                    "factors == nullptr ? total : total * factors[0]"),
    },
    "moe_marlin": {
        "the first group for all": ("if (s != 0 && k % size != 0) return;", "if (turn != 0 || s != 0) return;"),
        "the first expert's bias": ("load(y, biases, expert * columns + single(n), KIND);",
                                    "load(y, biases, single(n), KIND);"),
        "the weight in float32": ("through(factors[pair], KIND)", "factors[pair]"),
        "the sum unrounded before the weight": ("through(x, KIND) * through(factors", "x * through(factors"),
        "halves of k exchanged": ("raw[0] = w, raw[2] = w >> 4, raw[1]", "raw[2] = w, raw[0] = w >> 4, raw[1]"),
        "the first expert's order": ("perms + expert * depth", "perms"),
        "the first expert's words in large tiles": ("words + tile.expert * (depth * columns / 2)", "words"),
        "scales of neighbours": ("return 8 * g + 2 * warp + h;", "return 8 * g + 2 * warp;"),
        "pairs in order": ("{ return own.pairs[row]; }", "{ return row; }"),
    },
    "fp8_groups": {
        "the stretches before are not counted": ("begin += sizes[e];", "begin += 0 * sizes[e];"),
        "chains backwards": ("(i64 k = block; k < block + 128; k += PIECE)",
                             "(i64 k = block + 112; k >= block; k -= PIECE)"),
        "a product and a sum": ("vt_fma(row[y + 16 * i] * column[x + 16 * j], dot[i][j], total[i][j])",
                                "row[y + 16 * i] * column[x + 16 * j] * dot[i][j] + total[i][j]"),
        "forget c": ("c == nullptr ? total[i][j]", "true ? total[i][j]"),
        "threads do not wait for the tile": ("            }\n            __syncthreads();\n            float sum",
                                             "            }\n            float sum"),
        "the first head's scales": ("tile.expert * scale_head + ", ""),
        "exponents of the first block": ("word >> 8 * (block & 3)", "word"),
    },
}  # fmt: skip
