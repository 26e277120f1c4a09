"""Small wrongs for the sources of attention's kernels."""

from __future__ import annotations

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "attention": {
        "hide the newest key": ("if (r.causal && position < last) last = position;",
                                "if (r.causal && position <= last) last = position - 1;"),
        "softcap without its factor": ("s = softcap * vt_tanh(s / softcap)", "s = vt_tanh(s / softcap)"),
        "the maximum of a lane's own keys": ("row = join_lanes<16, N / 2>(tops, lane, Larger());",
                                             "row = join_lanes<16, N / 2>(totals, lane, Larger());"),
        "sums that lose a half": ("s[i] = join(keep, any_lane(give, DISTANCE));", "s[i] = keep;"),
        "parts of another score": ("any_lane(upper ? s[i] : s[i | m], m)", "any_lane(upper ? s[i | m] : s[i], m)"),
        "forget old values": ("vt_exp(state.top - base), vt_exp(chunk.top - base)}", "0.0f, vt_exp(chunk.top - base)}"),
        "values that ignore the sink": ("return (x * sink) * inverse + 0.0f;", "return x * inverse + 0.0f;"),
        "pages of another request": ("a.table[request * a.pages + at]", "a.table[at]"),
        "do not wait for keys": ("copies_wait<COUNT - 2>();\n        warp_meets();", "warp_meets();"),
        "the step before": ("return ring + (sent & (COUNT - 1)) * BYTES;",
                            "return ring + ((sent - 1) & (COUNT - 1)) * BYTES;"),
        "a round's first maximum": ("if (thread / GT == here - 1) next[h].top", "if (thread / GT == 0) next[h].top"),
        "overlapping shares": ("begin += split * share;", "begin += split * (share - 1);"),
        "join from the second chunk on": ("if (i >= here) continue;", "if (i >= here || i < 1) continue;"),
        "lanes joined twice": ("sums[i][n] += own[i][n];", "sums[i][n] += own[i][n] + own[i][n];"),
        "unmasked tiles": ("if (full) weigh(No{});\n            else weigh(Yes{});", "weigh(No{});"),
        "leave the last rows": ("row_first + rows_each - 1 : request.count - 1;",
                                "row_first + rows_each - 1 : request.count - 2;"),
    },
    "attention_merge": {
        "keep +inf": ("suffix = suffix_lse == VT_INF ? -VT_INF : suffix_lse;", "suffix = suffix_lse;"),
        "one token too few": ("bool both = token < merged;", "bool both = token + 1 < merged;"),
        "heads before tokens": ("(unsigned)at.row / (unsigned)heads), head",
                                "(unsigned)at.row % (unsigned)heads), head"),
        "divide the sum": ("x[j] * w.prefix + y[j] * w.suffix", "(x[j] * w.prefix + y[j] * w.suffix) / 1.0000001f"),
    },
}  # fmt: skip
