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
        "blocks before their bytes": ("phase_over(w.full + slot, parity);", ""),
        "terms before they are there": ("phase_over(w.done + slot, parity);", ""),
        "slots before they are free": ("phase_over(w.empty + slot, parity);", ""),
        "codes before they are there": ("team_meets(1, 32 * CREW);", ""),
        "terms of other lanes": ("lane % 8 * 4", "lane % 4 * 4"),
        "warps do not meet": ("""            warp_meets();
            if (lane < rows) {""", "            if (lane < rows) {"),
        "codes less seven": ("TYPE == Q5_0 ? 16 : 8", "TYPE == Q5_0 ? 16 : 7"),
        "the fifth bits of others": ("fifth >> 16 + first", "fifth >> 12 + first"),
        "zeros left out beside codes": ("halves[-i] = 0;", "halves[-i] = 1;"),
        "the first tile for all": ("top += 16;", "top += 0;"),
        "the tail of the weight": ("i = whole; i < end; i += 2", "i = whole; i < end - 2; i += 2"),
        "the second stretch where the first would go on": ("(item ? 32 : 0)", "0"),
        "lanes of the other four": ("g < 4 ? 0u : mine", "g < 4 ? mine : 0u"),
        "the other row's minimums": ("other = t & 1 ? head[1] : head[0]", "other = t & 1 ? head[0] : head[1]"),
        "Q6_K's bits as they lie": ("f.q[5][r] ^= 0xaaaaaaaau;", ""),
        "Q3_K's scales as they lie": ("^ 0x22222222u", ""),
        "Q3_K's sums of other lanes": ("dot2_low(lanes, 0x8100u, 0)", "dot2_low(lanes, 0x0081u, 0)"),
        "Q2_K's places": ("fourfold[r] >> 2", "fourfold[r]"),
        "an odd number of signs": ("seven | (ones_of(seven) & 1u) << 7", "seven"),
        "one block for a whole warp": ("item = 4 * item + (lane >> 3);", "item = 4 * item;"),
        "minimums join at the end": ("float total = B::LANES ? low[m] :", "float total = B::LANES ? 0.0f :"),
    },
}  # fmt: skip
"""Family: name of the wrong: (text that stands once in the sources, what stands there instead)."""
