"""Small wrongs for the sources of the chunked recurrences' kernels."""

from __future__ import annotations

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "gdn_chunks": {
        "sums of whole sequences": ("(t - begin(n)) / size", "0"),
        "the diagonal kept": ("if (other < t) {", "if (other <= t) {"),
        "beta of the other token": ("strength = beta[t * heads + head]", "strength = beta[other * heads + head]"),
        "the sum of a substitution added": ("== column ? 1.0f : 0.0f) - total", "== column ? 1.0f : 0.0f) + total"),
        "blocks below with the sign of A": ("= -chain(x + i * MOST + i, row, part, column)",
                                            "= chain(x + i * MOST + i, row, part, column)"),
        "factors never rounded": ("through(factor, (int)kind)", "factor"),
        "keys that do not decay": ("* strength[j] * decay[j]", "* strength[j]"),
    },
    "gdn_chunk_states": {
        "as many places as whole chunks": ("starts[n] / size + n;", "starts[n] / size;"),
        "a state that does not decay": ("S[d][i] *= keep;", "S[d][i] *= 1.0f;"),
        "a state read without its decay": ("before_it * decay * scale", "before_it * scale"),
        "do not wait for the stage": ("if (stages > 2) copies_wait<1>();\n        else copies_wait<0>();", ""),
        "weights before themselves alone": ("x[e] = j <= i ?", "x[e] = j < i ?"),
        "the sign of the block of 16": ("-x[m][2 * half], -x[m][2 * half + 1]", "x[m][2 * half], x[m][2 * half + 1]"),
        "the block of 32 forgotten": ("    below<2>(A, X, 32, 0, warp);\n", ""),
        "decays of the chunk after": ("walk.fades + (c & 1)", "walk.fades + (~c & 1)"),
    },
    "kda_chunks": {
        "natural logarithms": ("total * 1.4426950408889634f", "total"),
        "the diagonal of keys kept": ("of_k = j < i ?", "of_k = j <= i ?"),
        "no token between": ("bool apart = other < between;", "bool apart = false;"),
        "factors never rounded": ("= through(factor, (int)kind)", "= factor"),
        "keys that fade from the start": ("exp2_of(last - sum)", "exp2_of(sum)"),
    },
    "kda_chunk_states": {
        "a state that does not decay": ("S[d][i] *= keep[8 * d + (i & 1)];", ""),
        "decays of the chunk after": ("steps.keeps + (c & 1) * WIDTH", "steps.keeps + (~c & 1) * WIDTH"),
        "sums of 16 tokens": ("before[e] += totals[p * WIDTH + channel + e];", ";"),
        "through the later token": ("fade(f, between, others", "fade(f, own, others"),
        "neighbours are no pairs": ("triangle.put_near(c[0], block, later, later, 1);", ""),
        "weights above the diagonal": ("x[j] = v + j <= i ? x[j] : 0.0f;", "x[j] = x[j];"),
        "do not wait for the values": ("        copies_wait<0>();\n        each_vector", "        each_vector"),
        "the last token that is not there": ("rows(c) - 1) * step", "SIZE - 1) * step"),
    },
}  # fmt: skip
