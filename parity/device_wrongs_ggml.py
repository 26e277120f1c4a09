"""Small wrongs in the kernels of GGML blocks, by family; those of their headers stand where they show."""

from __future__ import annotations

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "ggml": {
        "halves to even": ("nearest_away(x[i] * inverse)", "nearest_even(x[i] * inverse)"),
        "a NaN is passed over": ("larger(peak, vt_abs(x[i]))", "(vt_abs(x[i]) > peak ? vt_abs(x[i]) : peak)"),
        "sums of eight codes": ("c.total + __shfl_xor_sync(0xffffffffu, c.total, 1)", "c.total"),
    },
    "ggml_matmul": {
        "words as they lie": ("bool apart = ((unsigned long long)p & 2) != 0;", "bool apart = false;"),
        "the code times both scales": ("term = (i * k.d) * d;", "term = i * (k.d * d);"),
        "lanes in pairs": ("permute(low, low2, 0x5410)", "permute(low, high2, 0x5410)"),
        "do not wait for copies": ("copies_wait<STAGES - 2>();", ""),
        "terms in one place": ("terms[turn / TURNS & 1][warp][m]", "terms[0][warp][m]"),
        "a row alone does not wait": ("copies_wait<P::DEPTH - 2>();", ""),
        "teams do not wait for copies": ("copies_wait<T::STAGES - 2>();  // what", "// what"),
        "teams do not meet": ("team_meets(team, 32 * team_size);", ""),
        "the other round's terms": ("terms + half * CREW * TERMS + thread", "terms + !half * CREW * TERMS + thread"),
        "warps do not meet": ("""            warp_meets();
            if (lane < rows) {""", "            if (lane < rows) {"),
        "codes less seven": ("TYPE == Q5_0 ? 16 : 8", "TYPE == Q5_0 ? 16 : 7"),
        "the fifth bits of others": ("fifth >> 16 + first", "fifth >> 12 + first"),
        "zeros left out beside codes": ("halves[-i] = 0;", "halves[-i] = 1;"),
        "the first tile for all": ("top += rows;", "top += 0;"),
        "the tail past a row": ("2 * lane; i < end; i += 64", "2 * lane; i < end - 2; i += 64"),
        "lanes of the other four": ("g < 4 ? 0u : mine", "g < 4 ? mine : 0u"),
        "the other row's minimums": ("other = t & 1 ? head[1] : head[0]", "other = t & 1 ? head[0] : head[1]"),
        "Q6_K's bits as they lie": ("f.q[5][r] ^= 0xaaaaaaaau;", ""),
        "Q3_K's scales as they lie": ("^ 0x0a0a0a0au", ""),
        "Q2_K's places": ("part[2 * r + 1] >> 2 * t", "part[2 * r + 1]"),
        "an odd number of signs": ("seven + ((unsigned)ones_of(seven) << 7)", "seven"),
        "units in one column": ("g == u ? x.y : 0u", "x.y"),
        "minimums join at the end": ("float total = B::LANES ? low[m] :", "float total = B::LANES ? 0.0f :"),
    },
}  # fmt: skip
"""Family: name of the wrong: (text that stands once in the sources, what stands there instead)."""
