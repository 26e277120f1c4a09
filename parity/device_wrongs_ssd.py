"""Small wrongs for the sources of Mamba-2's kernels."""

from __future__ import annotations

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "ssd": {
        "steps clamped before softplus": (
            "if (softplus) x = vt_softplus(x);\n        return vt_minimum(vt_maximum(x, low), high);",
            "x = vt_minimum(vt_maximum(x, low), high);\n        return softplus ? vt_softplus(x) : x;",
        ),
        "sums of steps alone": ("total += step * own;", "total += step;"),
        "decays to the chunk's start": ("between(last, sums[row + i])", "between(sums[row + i], sums[row])"),
        "keys never rounded": ("through(key * weights[i], (int)kind)", "key * weights[i]"),
        "states pass without their decay": ("S = S * vt_exp(sums[(head * chunks + c) * size + size - 1]) +", "S = S +"),
        "a chunk of the next sequence": ("first; c < end; ++c)", "first; c <= end && c < chunks; ++c)"),
    },
    "ssd_loop": {
        "a state that does not decay": ("vt_fma(b[j], put, S[s][j] * fade);", "vt_fma(b[j], put, S[s][j]);"),
        "the product rounded": ("y[0] = vt_fma(S[s][j], c[j], y[0]);", "y[0] += S[s][j] * c[j];"),
        "the next token's input": ("widen(own, now.x, l.kind);", "widen(own, next.x, l.kind);"),
        "channels of one skip": ("return skip_step ? D[head * skip_step + row] : D[head];", "return D[head];"),
        "the first group for all": ("group = head / (l.steps.heads / l.groups);", "group = 0;"),
    },
    "ssd_scan": {
        "weights before themselves alone": ("j <= own ? between", "j < own ? between"),
        "states of the sequence before": ("owner[chunk] != owner[chunk - 1];", "false;"),
        "the state before never rounded": ("through(S, (int)kind)", "S"),
        "no wait for the state": ("copies_wait<1>();\n    __syncthreads();\n\n    unsigned", "\n\n    unsigned"),
        "sums of the first 32 tokens": ("total += carried;", ""),
        "keys of the chunk's end": ("fade_of(asked.last, asked.own) * asked.step : 0.0f", "asked.step : 0.0f"),
        "a state that does not decay": ("S[b][j] *= keep;", ";"),
        "the mask a token late": ("(n & 1) > r0 + 8 * i + row)", "(n & 1) > r0 + 8 * i + row + 1)"),
        "all is quiet": ("const int any = __any_sync(WARP_LANES, zero != zero);", "const int any = 0;"),
        "the warp's last columns": ("if (!whole && j0 + h > r0) break;", "if (!whole && j0 + h >= r0) break;"),
    },
}  # fmt: skip
