"""Small wrongs in the sources of the low-bit kernels, by family; those of the shared headers stand where they show."""

from __future__ import annotations

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "wna16": {
        "the largest alone": ("vt_abs(point(lowest / (float)low))", "0.0f"),
        "zero points in one rounding": ("point((float)q * scale) - point((float)zero * scale)",
                                        "((float)q - (float)zero) * scale"),
        "a dead group divides": ("scale == 0.0f ? -1024.0f : ", ""),
        "half of the rows' maximum": ("int half = DOWN / 2; half;", "int half = DOWN / 4; half;"),
        "no least range": ("fmaxf(point(highest - lowest), point(1e-5f))", "point(highest - lowest)"),
        "places in sequence": ("(even_first ? (unsigned)parted((int)i, COUNT) : i) * BITS", "i * BITS"),
        "the first four columns alone": ("column = unit % PARTS * 4;", "column = 0;"),
        "the first four codes twice": ("(i64)(first + 256 * g) * PARTS + p]", "(i64)(first + 256 * g) * PARTS]"),
        "rows of words for rows of codes": ("(i64)row * COUNT * across", "(i64)row * across"),
        "a code in two words cut short": ("found |= words[bit / 32 + 1] << (32 - shift);", ""),
    },
    "act_order": {
        "rows in place": ("(unsigned long long)perm[k] < (unsigned long long)to.k ? perm[k] : 0;", "k;"),
        "a code of a row's place for its number": ("bit_of<BITS, FROM>(k % COUNT)", "bit_of<BITS, FROM>(i)"),
        "exllama's halves": ("i % 2 * 16 + i / 2 * BITS", "i / 4 * 16 + i % 4 * BITS"),
        "later rows of a group first": ("&& other < row", "&& other > row"),
        "exllama's last codes": ("(16 * (code - 30) + 15)", "(16 * (31 - code) + 15)"),
    },
    "marlin": {
        "scales of one group": ("run == 64 ? p / 8 + p % 8 * 8", "false ? p / 8 + p % 8 * 8"),
        "the next rows are the next columns": ("e % 2 + e / 2 % 2 * 8 : e % 4", "e % 2 + e / 4 * 8 : e % 4"),
        "a permuted row's code": (">> k % COUNT * BITS & MASK", ">> tile.k % COUNT * BITS & MASK"),
        "AWQ's columns in sequence": ("parted((int)(tile.n % COUNT), (int)COUNT) * BITS", "tile.n % COUNT * BITS"),
        "zero points of 8 bits interleaved": ("if (c.layout == ZEROS) at = at / count * count + joined",
                                              "at = at / count * count + joined"),
    },
    "w4a8": {
        "a sixteenth": ("* 0.125f", "* 0.0625f"),
        "zeros become eight": ("(0x88888888u - (w & 0x77777777u)) & 0x77777777u", "(0x88888888u - (w & 0x77777777u))"),
        "a code too few": ("* (float)(i - 8)", "* (float)(i - 7)"),
        "halves turned round": ("4 + 2 * half + t / 2", "4 + 2 * (1 - half) + t / 2"),
        "the upper columns' nibbles": ("k % 4 + n % 16 / 8 * 4", "k % 4"),
    },
    "w4a8_matmul": {
        "zero from the table": ("(negative.x ^ 0x80808080u) & 0xffffff00u", "negative.x ^ 0x80808080u"),
        "signs turned round": ("0x7654u ^ (w >> 1 & 0x4444u)", "0x3210u ^ (w >> 1 & 0x4444u)"),
        "parts forgotten": ("*at = part ? *at + sum[j][e][i] : sum[j][e][i];", "*at = sum[j][e][i];"),
        "another expert's channels": ("channel[expert * columns + left + c + i]", "channel[left + c + i]"),
        "do not wait for copies": ("copies_wait<STAGES - 2>();", ""),
        "rows beyond the expert's": ("if (top + m >= own.count) break;", ""),
    },
    "machete": {
        "zeros left out": ("W::ZEROS_ADDED ? zero[p] : N::MINUS_ZERO", "N::MINUS_ZERO"),
        "the sign of the eighth bit": ("bias ? N::MINUS_ZERO : 0x43004300u", "N::MINUS_ZERO"),
        "blocks overlap": ("(block - row * across) * 128", "(block - row * across) * 64"),
        "the upper half of a block": ("(n & 64) * (8 * BITS)", "0"),
    },
    "gptq": {
        "zeros of the first format": ("int zero = (int)bias + (zeros", "int zero = (zeros"),
        "neighbours' groups": ("? groups[row] : 0;", "? row / (k / group_count) : 0;"),
        "a pair of codes apart": ("(order ? 8 : 4) * (lane & 3)", "4 * (lane & 3)"),
        "scales of the first group of a chunk": ("take(groups == 4 ? s : s / 2)", "take(0)"),
    },
    "awq": {
        "a part is not rounded": ("rounding == BY_PARTS ? through(sum[r], KIND)", "rounding == BY_PARTS ? sum[r]"),
        "scales of places": ("return 8 * g + place(p, order);", "return 8 * g + p;"),
        "rows meet": ("(k ^ (k >> 2 & 1)) * 32", "(k ^ (k >> 3 & 1)) * 16"),
    },
    "marlin_matmul": {
        "do not wait for copies": ("copies_wait<STAGES - 2>();", ""),
        "warps do not wait for each other": ("            meet();", ""),
        "chains meet": ("turn < EIGHTS + teams - 1", "turn < EIGHTS"),
        "the sum of 4 bits is not rounded": ("BITS == 4 ? through(x, KIND) : x", "x"),
        "the other rows of the operand": ("fetch_matrices(b, sixteen + q * 1024);", "fetch_matrices(b, sixteen);"),
        "chain sums of the first part": ("sums[((part * teams + c) * rows", "sums[((0 * teams + c) * rows"),
        "the first tile's words for all warps": ("s * 512 + lane * 16 + warp * 4", "s * 512 + lane * 16"),
        "one scale for two columns": ("pick<0x3232>(both, 0)", "pick<0x1010>(both, 0)"),
        "the neighbours' zero points": ("word >> 4 * (warp + 4 * h)", "word >> 4 * (2 * warp + h)"),
        "operands before they are there": ("barrier_wait(full + stage, parity);", ""),
        "chains that go on": ("at > 0 || s > 0", "chunk > 0 || s > 0"),
        "the first rows once more": ("chunk * 128, top + first)", "chunk * 128, top)"),
    },
}  # fmt: skip
"""Family: name of the wrong: (text that stands once in the sources, what stands there instead)."""
