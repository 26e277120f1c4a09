"""Small wrongs for the sources of the recurrent kernels."""

from __future__ import annotations

_RULE = {
    "the state before its decay": ("S[r][s][j] *= decay[j];", ";"),
    "beta forgotten": ("p[r] = (v[r] - p[r]) * given.beta;", "p[r] = v[r] - p[r];"),
    "the old state's output": (
        "o[r] = vt_fma(S[r][s][j], q[j], o[r]);",
        "o[r] = vt_fma(S[r][s][j] - p[r] * k[s][j], q[j], o[r]);",
    ),
    "the first row's place for all": (
        "base + r * RULE_GROUPS * WIDTH + STRIP_TURN * s, S[r][s], kind",
        "base + STRIP_TURN * s, S[r][s], kind",
    ),
    "no wait for what is shared": ("        __syncthreads();\n        float v[R], o[R];", "        float v[R], o[R];"),
}

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "gdn": _RULE
    | {
        "a level less of the tree": ("for (int m = STRIP_LANES / 2; m >= 1;", "for (int m = STRIP_LANES / 2; m >= 2;"),
        "beta never rounded": ("through(vt_sigmoid(y), rule.b_kind) : y;\n        }", "vt_sigmoid(y) : y;\n        }"),
        "the key head of another group": ("head / share * Dk", "head % share * Dk"),
        "the factor before the scale": (
            "return of_q ? factor * scale : factor;",
            "return of_q ? scale / root : factor;",
        ),
        "null slots wrap": ("return found < count ? found : -1;", "return found < 0 ? 0 : found;"),
    },
    "kda": _RULE
    | {
        "one decay": (
            "float decay = CHANNELS ? vt_exp(((const float*)rule.a)[channels + at]) : shared;",
            "float decay = CHANNELS ? vt_exp(((const float*)rule.a)[channels]) : shared;",
        ),
        "channels of the first turn": (
            "if (CHANNELS) strip(decay, given.decay, s);",
            "if (CHANNELS) strip(decay, given.decay, 0);",
        ),
        "never a line": ("if (!(scaled > threshold))", "if (true)"),
        "never divided by the slope": ("if (slope != 1.0f) y[j] = y[j] / slope;", ""),
        "a low part without its power": ("g.lo * vt_float((int)(power + 0x3f800000u));", "g.lo;"),
        "powers out of reach": ("(y[j] > -18.0f) & (y[j] <= most)", "(y[j] <= most)"),
        "multiply by the root's inverse": (
            "if (flags & DIVIDED) x = x / norm;",
            "if (flags & DIVIDED) x = x * (1.0f / norm);",
        ),
    },
    "state_cache": {
        "every state is fresh": ("if (flags == nullptr) return true;", "return false;"),
        "flags of one size": ("return flag_size == 1 ?", "return flag_size == 0 ?"),
        "rows in their order": ("store(cache, slot * width + at.column", "store(cache, at.row * width + at.column"),
    },
    "causal_conv": {
        "the newest tap first": (
            "total[v] = vt_fma(f.w[v * K + j], x[v], total[v]);",
            "total[v] = vt_fma(f.w[v * K + K - 1 - j], x[v], total[v]);",
        ),
        "the upper product twice": (
            "total[2 * p] += vt_float((int)(products << 16));",
            "total[2 * p] += vt_float((int)(products & 0xffff0000u));",
        ),
        "the product rounded": ("else total = vt_fma(w, tap, total);", "else total += w * tap;"),
        "products never rounded": ("if (HOW == ROUNDED || (HOW == EITHER", "if ((HOW == EITHER"),
        "fresh states are read": ("return begun ? load_one(", "return slot >= 0 ? load_one("),
        "fresh states are read by tiles": ("if (begun) load_fours(held", "if (slot >= 0) load_fours(held"),
        "heads are everybody's": ("heads > begin ? heads : begin, last", "begin, last"),
        "heads are every tile's": ("mine || begin < heads_end ? heads_end", "mine ? heads_end"),
        "every run keeps its state": (
            "if (mine && start < stop && slot >= 0) keep",
            "if (start < stop && slot >= 0) keep",
        ),
        "the state of the first token": (
            "const int place = stop - start - (K - 1) + j;",
            "const int place = j - (K - 1) + 1;",
        ),
        "a tile keeps its first inputs": ("far_input(stop - RING + j)", "far_input(start + j)"),
        "a tile keeps what stood before": ("if (stop - start > RING) {", "if (false) {"),
        "the sequence after": ("(bits_of(before) - 1) * step", "bits_of(before) * step"),
        "a quotient that is one too few": ("if (blockIdx.x - whole * by >= by) ++whole;", ""),
        "no wait for a stage": ("copies_wait<STAGES - 1>();", ""),
        "a turn before it is there": ("arrive(now + TURN);", ""),
        "results that are left stay undecided": ("if constexpr (ACT) settle();", ""),
        "every lane settles its own": ("(int)(list[i] & 31u) * V", "lane() / V * V"),
        "the first token of a pair twice": ("(int)(list[i] >> 5) + lane() % LANES / V;", "(int)(list[i] >> 5);"),
        "fast functions out of their reach": ("return largest >= SILU_ROOM_BITS;", "return false;"),
        "middles out of sight": ("(2 * SILU_NEAR + 1)) &", "1) &"),
        "a neighbour's reciprocal": ("x[v + 1] * (inverse * first)", "x[v + 1] * vt_fma(inverse, e, inverse)"),
        "the gate of B for that of C": ("gated(part<1>(at), raw)", "gated(part<0>(at), raw)"),
        "a row's state stays": (
            "part[e] = j + 2 < K ? past[v * (K - 1) + (j + 1) % (K - 1)] : token[v];",
            "part[e] = past[v * (K - 1) + j];",
        ),
        "the neighbour's newest": ("past[1] = halves(token, c, 0, 2);", "past[1] = halves(token, c, 1, 2);"),
        "the first pair of taps twice": (
            "w.z, w.w, halves(b, c, 1, 2), newest",
            "w.z, w.z, halves(b, c, 1, 2), newest",
        ),
    },
    "causal_conv_spec": {
        "everything was accepted": ("accepted[at.row] - 1;", "tokens - 1;"),
        "the history keeps its oldest": ("line(i + 1), (int)state_kind);", "line(i), (int)state_kind);"),
        "the first token's taps for all": ("line(m + j)", "line(j)"),
    },
    "ssm": {
        "the decayed input": (
            "S[j] = vt_fma(B[j], puts[r], S[j] * (TIED ? fades[r] : LENGTH == 16 ? fade[j] : vt_exp(dts[r] * A[j])));",
            "S[j] = (S[j] + B[j] * puts[r]) * (TIED ? fades[r] : LENGTH == 16 ? fade[j] : vt_exp(dts[r] * A[j]));",
        ),
        "exponentials beyond their range": ("vt_abs(x[j]) < NEAR_EXP ? 0u", "true ? 0u"),
        "the first row's step for all": (
            "dts[r] = __shfl_sync(VT_ALL_LANES, dt, begin + r);",
            "dts[r] = __shfl_sync(VT_ALL_LANES, dt, begin);",
        ),
        "the first group for all": ("(unsigned)head / ((unsigned)heads / (unsigned)groups)", "0"),
        "rows lie side by side": ("mine = first + own * GROUPS;", "mine = first + own;"),
        "a plain gate": ("return y * vt_silu(gate[0]);", "return y * gate[0];"),
        "null rows have a state": ("return found < slots ? found : -1;", "return found < 0 ? 0 : found;"),
        "a scan's lanes in turn": ("(odd ? half[1] : half[0]) + other", "(odd ? half[0] : half[1]) + other"),
        "what follows a scan's last tokens": ("for (int i = 0; i < 4; ++i) S[i] = before[i];", ""),
        "a scan's exponentials by a rough ln 2": ("x[i] = vt_fma(n, -VT_LN2_LO, whole);", "x[i] = whole;"),
        "scanned states always begin": ("flag_size == 1 ? ((const signed", "flag_size == 0 ? ((const signed"),
    },
    "linear_attention": {
        "the product unrounded": ("through(key * own[i], dtype)", "key * own[i]"),
        "no wait for the sums": ("    __syncthreads();\n    if (lane != 0", "    if (lane != 0"),
        "lanes of four turns": (
            "const int at = begin + turn * STRIP_TURN + j;\n                    if (at < size) {",
            "const int at = begin + j;\n                    if (at < size) {",
        ),
    },
    "mamba_norm": {
        "one group's weight for all": ("row % groups * width", "0"),
        "one group's weight for all blocks": ("blockIdx.x % (unsigned)groups * width", "0"),
        "always rounded": (
            "return rounded ? through(x * inverse, kind) : x * inverse;",
            "return through(x * inverse, kind);",
        ),
        "the gate alone": (
            "widen(gate, raw.other, kind);\n        multiply",
            "widen(gate, raw.x, kind);\n        multiply",
        ),
        "an eager range": ("vt_abs(gate[j]) < NEAR_SILU ? 0u", "true ? 0u"),
        "an unrefined reciprocal's sign": ("vt_fma(y, -vt_fma(d, y, -1.0f), y)", "vt_fma(y, -vt_fma(d, y, 1.0f), y)"),
        "a table of positive gates": (" | (from >> 4 & TABULATED)", ""),
        "gates outside of the table": ("far |= from & 0x7800u ? 1u << j : 0u;", ""),
    },
}
