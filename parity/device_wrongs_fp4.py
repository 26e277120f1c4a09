"""Small wrongs in the sources of FP4 products; those of the shared header stand where they show."""

from __future__ import annotations

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "fp4_matmul": {
        "scales of tiles that nobody fills": ("two[i] = inside ? ", "two[i] = true ? "),
        "do not wait for copies": ("copies_wait<STAGES - 2>();", ""),
        "columns past the last one": ("if (left + c >= columns) continue;", ""),
        "no scale is NaN": ("return bits | (nan >> 7) * 0x7fc0u;", "return bits;"),
        "another row's values": ("tiled_place<i64>(row, column,", "tiled_place<i64>(row, column ^ 1,"),
        "one scale for 32 k": ("held.template weights<true>(small, half)", "held.template weights<true>(small, 0)"),
        "halves of 128 k exchanged": ("half ? (j ? q[h].w : q[h].z) :", "!half ? (j ? q[h].w : q[h].z) :"),
        "no float16": ("kind == BF16 ? pair<BF16>(x, 0.0f) : pair<F16>(x, 0.0f)", "pair<BF16>(x, 0.0f)"),
        "the next 256 k too early": ("if (second || last) {", "if (second) {"),
        "scales of the first 128 k": ("(scales_at + second * F::HALF)", "(scales_at)"),
        "scales of other columns": ("((int)(left >> 5 & 3) + (warp >> 1)) * 4", "(warp >> 1) * 4"),
        "what a scale leaves": ("pair_by_half<BF16, UPPER>(small, rest[half])", "0x80008000u"),
        "chains from lane to lane": ("part[i] = mine[i * 128] + part[i];", "part[i] = part[i];"),
        "all chains in one place": ("seam[(i64)chain * (SUMS * 32) + i * 32]", "seam[i * 32]"),
        "the last chain of a seam": ("if (c < chains) x[0].x +=", "if (c + 1 < chains) x[0].x +="),
        "rows that are not there": ("m >= ROWS || top + m >= rows ||", "m >= ROWS ||"),
        "values as they lie": ("pair<BF16>(v[i], v[i + 4]);", "pair<BF16>(v[2 * i], v[2 * i + 1]);"),
        "rows as they lie": ("low[t] = from[4 * t];", "low[t] = from[t];"),
    },
    "marlin_fp4": {
        "chains backwards": ("for (int turn = 0; turn < teams; ++turn) {",
                             "for (int turn = teams - 1; turn >= 0; --turn) {"),
        "one matrix for four": ("place(row, 4 * j + (lane >> 3))", "place(row, 4 * j)"),
        "scales as they lie": ("two[0] = q.x & 0x00ff00ffu, two[1] = q.x >> 8",
                               "two[1] = q.x & 0x00ff00ffu, two[0] = q.x >> 8"),
        "the global scale of bfloat16": ("KIND == BF16 ? 0x1p-119f : 0x1p-7f", "0x1p-119f"),
        "scales of the first tiles": ("(first / 2 + i) * 4", "i * 4"),
        "one scale for 64 k": ("s % EVERY == 0", "s == 0"),
        "k for columns": ("small_pair<KIND>(w, 8 * (r & 1) + 4 * (r >> 1))",
                          "small_pair<KIND>(w, 4 * (r & 1) + 8 * (r >> 1))"),
        "columns for k": ("raw[i], 8 * (r & 1) + 4 * (r >> 1)", "raw[i], 4 * (r & 1) + 8 * (r >> 1)"),
        "scales of every second tile": ("(j & 1 ? bytes_below_signs<1>", "(j & 1 ? bytes_below_signs<0>"),
        "upper halves of scales for both": ("times_half<KIND, false>(code", "times_half<KIND, true>(code"),
        "the first part's largest": ("for (i64 at = threadIdx.x; at < parts; at += 256)",
                                     "for (i64 at = threadIdx.x; at < 1; at += 256)"),
    },
}  # fmt: skip
"""Family: name of the wrong: (text that stands once in the sources, what stands there instead)."""
