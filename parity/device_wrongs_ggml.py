"""Small wrongs in the kernels of GGML blocks, by family; those of their headers stand where they show."""

from __future__ import annotations

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "ggml": {
        "halves to even": ("found.code[i] = nearest_away(x[i] * inverse)", "found.code[i] = nearest_even(x[i] * inverse)"),
        "a NaN is passed over": ("larger(peak, vt_abs(x[i]))", "(vt_abs(x[i]) > peak ? vt_abs(x[i]) : peak)"),
        "sums of eight codes": ("c.total + __shfl_xor_sync(0xffffffffu, c.total, 1)", "c.total"),
    },
    "ggml_matmul": {
        "words as they lie": ("bool apart = ((unsigned long long)p & 2) != 0;", "bool apart = false;"),
        "the code times both scales": ("term = (i * k.d) * d;", "term = i * (k.d * d);"),
        "lanes in pairs": ("permute(low, low2, 0x5410)", "permute(low, high2, 0x5410)"),
        "do not wait for copies": ("copies_wait<STAGES - 2>();", ""),
        "terms in one place": ("terms[turn / TURNS & 1][warp][m]", "terms[0][warp][m]"),
        "minimums join at the end": ("float total = B::LANES ? low[m] :", "float total = B::LANES ? 0.0f :"),
    },
}  # fmt: skip
"""Family: name of the wrong: (text that stands once in the sources, what stands there instead)."""
