"""Small wrongs for the sources of the experts' kernels."""

from __future__ import annotations

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "moe": {
        "no wait for the counts": ("atomicAdd(&next[bucket_of(ids[pair], (int)experts)], 1);\n    __syncthreads();\n",
                                   "atomicAdd(&next[bucket_of(ids[pair], (int)experts)], 1);\n"),
        "the last tile of an expert is full": ("(rows - row < high ? rows - row : high)", "high"),
        "pairs of the parts before forgotten": ("next[b] + own[b] + before[pair]", "next[b] + before[pair]"),
        "a part counts one too many": ("if (part == (int)blockIdx.x) here = sum;", "here = sum + 1;"),
        "buckets of earlier warps forgotten": ("if (w < warp) before += warps[w];", ""),
        "chains backwards": ("total += sums[warp][lane][l];", "total += sums[warp][lane][CHAINS - 1 - l];"),
        "round the product": ("vt_fma(z[j], y[r][j], sum[r][m])", "z[j] * y[r][j] + sum[r][m]"),
        "do not wait for the stage": ("        copies_wait<STAGES - 2>();\n", ""),
        "threads do not wait for each other": ("__syncthreads();  // this stage", "// this stage"),
        "halves of k exchanged": ("sum[e + 1][t], a[t], b[2], b[3]", "sum[e + 1][t], a[t], b[3], b[2]"),
        "the first pair's factor": ("? factor[row] : 0.0f", "? factor[0] : 0.0f"),
        "the upper pairs for all warps": ("int right_row = ACROSS + top + turn", "int right_row = ACROSS + turn"),
        "a row for each choice": ("pairs[line + i * PASS] / choices", "pairs[line + i * PASS]"),
        "rows without an expert left as they are": ("tile.expert == NO_EXPERT ? 0.0f : VT_NAN", "VT_NAN"),
    },
    "moe_routing": {
        "the last of equals in a lane": ("if (held.code[i] > own_best.code)", "if (held.code[i] >= own_best.code)"),
        "the last of equals among lanes": ("warp_least(own.code == code ? own.number : ALL_LANES)",
                                           "warp_largest(own.code == code ? own.number : 0)"),
        "NaN before numbers": ("if (x != x) return CODE_NAN;", "if (x != x) return ALL_LANES;"),
        "the bias weighs": ("own_score = held.score[i];", "own_score = choice(i);"),
        "a group's best with a bias": ("code_of(both ? high + low : high)", "code_of(high)"),
        "the second best of one lane": ("        low = vt_maximum(low, other_low);\n", ""),
        "other groups' experts stay": ("held.code[i] = CODE_MINUS_INF;", ";"),
        "half a warp's exponentials": ("m = 16; m >= 1; m >>= 1) sum +=", "m = 16; m >= 2; m >>= 1) sum +="),
        "divide by nothing": ("total = total > 0.0f ? total : 1.0f;", ""),
        "the last choice is lost": ("if (first + r >= choices) continue;", "if (first + r + 1 >= choices) continue;"),
    },
}  # fmt: skip
