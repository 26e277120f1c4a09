// Gated products of generated kernels whose results are asked for as bfloat16, where what follows sees all of a thread's
// turns: a turn's guesses are words before the next turn's are made, and what was left open is mended among these, at once.
#pragma once
#include "chain.cuh"
#include "mended.cuh"

// As `gated`; `gates`: as least_of_turns has them.
template <bool SILU, int TURNS, class G, class P>
VT_FN void gated_words(Raw<8> (&made)[TURNS], const float (&g)[TURNS][8], const float (&u)[TURNS][8], int act_kind,
                       const G (&gates)[TURNS], P&& pick) {
    static_assert(TURNS <= 4);
    uint4 words[TURNS];
    unsigned left = 0;
    EACH(t, TURNS) {
        float y[8];
        Middles middles(least_of(gates[t]));
        left |= guessed<SILU>(y, g[t], u[t], act_kind, middles) << 8 * t;
        words[t] = narrow(y, BF16).a;
    }
    mend(words, left, [&](int n) {
        float gate, up;
        pick(n >> 3, n & 7, gate, up);
        return exact_product<SILU>(gate, up, act_kind);
    });
    EACH(t, TURNS) made[t] = {words[t], words[t]};
}
template <bool SILU, int TURNS, class G, class P>
VT_FN void gated_words(Raw<1> (&made)[TURNS], const float (&g)[TURNS][1], const float (&u)[TURNS][1], int act_kind,
                       const G (&)[TURNS], P&&) {
    EACH(t, TURNS) {
        float y[1];
        gated<SILU>(y, g[t], u[t], act_kind);
        made[t] = narrow(y, BF16);
    }
}
