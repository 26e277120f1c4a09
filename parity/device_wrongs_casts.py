"""Small wrongs for the sources of casts, microscaling formats and DeepGEMM's experts."""

from __future__ import annotations

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "fp8_casts": {
        "one ulp is always more": ("unsigned most = n < 2 ? 0u : (22713u << k) >> 16;", "unsigned most = 0u;"),
        "exponents of both signs alike": ("n = e > 0 ? e : -e - 1;", "n = e > 0 ? e : -e;"),
        "ties to the even code": ("fma_up(size, 2.0f, 8388607.5f), -0.25f, 2097153.0f",
                                  "size + 6291456.0f, -0.5f, 3145729.0f"),
        "a lane's own reciprocal": ("__shfl_xor_sync(FULL_WARP, inverse, found.own ^ d)", "inverse"),
        "NaN is the largest code": ("codes &= ~((nans_of(codes) >> 7) * 0xffu);", ""),
        "tiles of one row": ("tile - down * across) * SIDE + (threadIdx.x & 15)", "tile) * SIDE + (threadIdx.x & 15)"),
        "exponents of the first group": ("(from[j] >> 23 & 0xffu) << 8 * j;", "(from[j] >> 23 & 0xffu);"),
    },
    "mxfp4": {
        "no step before the power": ("(top + 0x200000u) >> 23", "top >> 23"),
        "the least factor is no number": ("(int)larger((254u - byte) << 23, 0x00400000u)",
                                          "(int)((254u - byte) << 23)"),
        "the other lane's byte": ("unsigned found = __shfl_xor_sync(FULL_WARP, byte, own ^ d);",
                                  "unsigned found = byte;"),
        "signs of rows alone": ("(low ^ (row & 1u)) << 15", "low << 15"),
        "no wait between rounds": ("        if (!last) __syncthreads();\n", ""),
        "the last chain alone": ("total[m][c] += sum[c]", "total[m][c] = sum[c]"),
        "the deviation of a negative variance": ("variance < 0.0f ? 1.0f : sqrtf(variance)", "sqrtf(vt_abs(variance))"),
        "one third of the codes": ("method == ABS_MAX ? y[8 * i + j] * 3.0f : y[8 * i + j]", "y[8 * i + j]"),
        "half a block's scale for both": ("vt_abs(y[FIRST + j])", "vt_abs(y[j])"),
    },
    "deep_gemm_moe": {
        "segments without gaps": ("+ alignment - 1) / alignment * alignment : 0, sum", ") : 0, sum"),
        "choices in another order": ("before = same & ((1u << lane) - 1);\n        int row",
                                     "before = same & ~((2u << lane) - 1);\n        int row"),
        "the warps before forgotten": ("starts[expert] + mine[expert] + ones(before)",
                                       "starts[expert] + (step ? mine[expert] : 0) + ones(before)"),
        "chunks in one place": ("counts[c * experts + e] = row;", "counts[c * experts + e] = starts[e];"),
        "the first eight choices": ("first + r < choices ? inverse", "first + r < choices && !first ? inverse"),
        "a weight of its own": ("weights[at.row * choices + first + r]", "weights[at.row * choices + r]"),
        "the up half unclamped": ("u[j] = through(vt_minimum(vt_maximum(u[j], -limit), limit), kind);", ""),
        "the fast functions' largest": ("    decide(y, others, g, u, exact);\n", ""),
        "the fast functions' codes": ("    decide(q, others & ~some,", "    decide(q, 0u & some,"),
        "an empty expert's row": ("if (before[middle] <= row) low", "if (before[middle] < row || !row) low"),
        "words of three exponents": ("if (4 * p + j < count) word", "if (4 * p + j < count && j < 3) word"),
        "words beyond the groups": ("if (4 * p + j < count) word |= (unsigned)from[token * row + (4 * p + j) * group]",
                                    "word |= (unsigned)from[token * row + (4 * p + j) % count * group]"),
        "exponents from the high byte": ("<< 8 * j;\n        return (int)word;",
                                         "<< 8 * (3 - j);\n        return (int)word;"),
        "rows of the first expert": ("it.line = low * tokens + token;", "it.line = token;"),
    },
}  # fmt: skip
