// Products with SiLU or a sigmoid in generated kernels: where a result stands alone, what the fast functions leave open is
// stored as it was guessed, and stored again at the end, decided in one loop for all that a thread holds. Decided turn by
// turn, by choices among registers, it took a tenth longer. Results that others are made of: chain_words.cuh.
#pragma once
#include "silu_guess.cuh"

#define EACH(index, count) _Pragma("unroll") for (int index = 0; index < count; ++index)

// The least of a thread's gates, as numbers or as they lie in memory, for `Middles`; NaN are passed over.
VT_FN float least_of(const float (&g)[8]) {
    float least = VT_INF;
    EACH(j, 8) least = fminf(least, g[j]);
    return least;
}
VT_FN float least_of(const Raw<8>& raw) { return least_of_bf16(raw); }
VT_FN float least_of(const float (&)[1]) { return 0.0f; }
VT_FN float least_of(const Raw<1>&) { return 0.0f; }
template <int TURNS, class G> VT_FN float least_of_turns(const G (&gates)[TURNS]) {
    float least = VT_INF;
    EACH(t, TURNS) least = fminf(least, least_of(gates[t]));
    return least;
}

// gate_products of bfloat16 results, one by one as ever.
template <bool SILU> VT_FN void gated(float (&out)[1], const float (&g)[1], const float (&u)[1], int act_kind) {
    gate_products<SILU>(out, g, u, act_kind, BF16);
}
// Eight products, and which of them are open: bits of those that MIRROR's functions have to decide.
template <bool SILU>
VT_FN unsigned guessed(float (&out)[8], const float (&g)[8], const float (&u)[8], int act_kind, Middles& middles) {
    const bool rounded = act_kind == BF16;
    float decided[8];
    unsigned left = 0;
    middles.nearest = 0xffffffffu;
    EACH(j, 8) {
        const float act = fast_act<SILU>(g[j]);
        out[j] = (rounded ? through(act, BF16) : act) * u[j];
        decided[j] = rounded ? act : out[j];
        if (j & 1) middles.see(decided[j - 1], decided[j]);
    }
    if (middles.any())
        EACH(j, 8)
            if (middles.near(decided[j])) left |= 1u << j;
    return left;
}
template <int TURNS> VT_FN float picked(const float (&x)[TURNS], int t) {
    float found = x[0];
    EACH(s, TURNS)
        if (t == s) found = x[s];
    return found;
}
template <int TURNS, int V> VT_FN float picked(const float (&x)[TURNS][V], int t, int j) {
    float found = x[0][0];
    EACH(s, TURNS) EACH(k, V)
        if (t * V + j == s * V + k) found = x[s][k];
    return found;
}
