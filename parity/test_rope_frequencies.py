"""Rotary caches against mpmath, a scalar float32 loop, and vLLM's get_rope."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.oracle import rope_frequencies

from .compare import ParityError, assert_bytes, assert_within
from .goldens import op_cases
from .harness import case, checks, mutations
from .scalar import rounded

mp = mpmath.mp.clone()
mp.dps = 40

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
DEEPSEEK = {**YARN, "rope_type": "deepseek_yarn", "mscale": 0.707, "mscale_all_dim": 0.5, "attn_factor": 1.1}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 16, "short_factor": [1.0, 1.25, 2.0, 3.5],
        "long_factor": [1.0, 4.0, 9.5, 33.0]}  # fmt: skip
NTK = {"rope_type": "dynamic", "rope_theta": 1e4}


def ramp(p, width, length):
    """YaRN's share of interpolation for pair i."""
    ends = []
    for key, default, cut in (("beta_fast", 32, mp.floor), ("beta_slow", 1, mp.ceil)):
        turns = p.get(key, default)
        at = width * mp.log(mp.mpf(length) / (2 * mp.pi * turns)) / (2 * mp.log(p["rope_theta"]))
        ends.append(cut(at) if p.get("truncate", True) else at)
    low, high = max(ends[0], 0), min(ends[1], width - 1)
    return lambda i: min(max((i - low) / ((high - low) or mp.mpf("0.001")), 0), 1)


def temperature(s, m=1):
    return 1 if s <= 1 else 1 + mp.mpf(m) * mp.log(s) / 10


def reference(p, head_size, P):
    """[(rows, inv(i), divisor, mscale)] of the family, straight from the row page's formulas."""
    kind, b = p.get("rope_type", "default"), mp.mpf(p.get("rope_theta", 10000))
    r = p.get("rope_dim") or int(head_size * p.get("partial_rotary_factor", 1))
    s, L = p.get("factor"), p.get("original_max_position_embeddings")
    plain = lambda i, base=b: 1 / base ** (mp.mpf(2 * i) / r)
    if kind in ("default", "mrope"):
        return [(4 * P if "mrope_section" in p else P, plain, 1, 1)]
    if kind == "linear":
        return [(math.ceil(P * f), plain, f, 1) for f in (s if isinstance(s, list) else [s])]
    if kind == "dynamic":
        growth = p["alpha"] if "alpha" in p else s * mp.mpf(P) / p.get("max_trained_positions", P) - s + 1
        return [(P, lambda i: plain(i, b * mp.mpf(growth) ** (mp.mpf(r) / (r - 2))), 1, 1)]
    if kind == "ntk":
        if "mixed_b" not in p:
            return [(P, lambda i: plain(i, b * s) / mp.mpf(s) ** (mp.mpf(2) / r), 1, 1)]
        slope = mp.log(s) / (mp.mpf(r) / 2) ** p["mixed_b"]
        return [(P, lambda i: plain(i) / mp.exp(slope * mp.mpf(i + 1) ** p["mixed_b"]), 1, 1)]
    if kind == "proportional":
        return [(P, lambda i: 1 / b ** (mp.mpf(2 * i) / head_size) if i < r // 2 else mp.mpf(0), 1, 1)]
    if kind == "llama3":
        low, high = p["low_freq_factor"], p["high_freq_factor"]

        def banded(i):
            turns = L * plain(i) / (2 * mp.pi)
            if turns > high:
                return plain(i)
            if turns < low:
                return plain(i) / s
            m = (turns - low) / (high - low) if high != low else 0
            return (1 - m) * plain(i) / s + m * plain(i)

        return [(P, banded, 1, 1)]
    if kind in ("longrope", "su"):
        gain = mp.sqrt(1 + mp.log(mp.mpf(P) / L) / mp.log(L)) if P > L else 1
        return [(rows, lambda i, f=p[f"{name}_factor"]: plain(i) / f[i], 1, p.get(f"{name}_mscale", gain))
                for name, rows in (("short", L), ("long", P))]  # fmt: skip
    L = 4 * L if "mrope_section" in p else L
    mix, extra = ramp(p, r, L), p.get("extrapolation_factor", 1)

    def blended(i):
        kept = (1 - mix(i)) * extra
        return plain(i) / s * (1 - kept) + plain(i) * kept

    if kind == "yarn":
        gain = temperature(s) if "mrope_section" in p or p.get("apply_yarn_scaling", True) else 1
    else:
        gain = temperature(s, p.get("mscale", 1)) / temperature(s, p.get("mscale_all_dim", 0))
    return [(math.ceil(L * s), blended, 1, gain * p.get("attn_factor", 1))]


FAMILIES = {
    "default": ({"rope_theta": 1e6}, 64, 40),
    "no keys": ({}, 8, 3),
    "partial": ({"rope_theta": 1e7, "partial_rotary_factor": 0.25}, 256, 40),
    "rope_dim": ({"rope_dim": 6}, 16, 9),
    "linear": ({"rope_type": "linear", "factor": 4}, 16, 9),
    "linear_several": ({"rope_type": "linear", "factor": [1.0, 2.5]}, 16, 9),
    "dynamic_factor": ({**NTK, "factor": 4.0, "max_trained_positions": 32}, 32, 96),
    "dynamic_trained": ({**NTK, "factor": 4.0}, 32, 20),
    "dynamic_alpha": ({**NTK, "alpha": 1000.0}, 32, 20),
    "ntk": ({"rope_type": "ntk", "factor": 4.0}, 32, 20),
    "ntk_mixed": ({"rope_type": "ntk", "factor": 4.0, "mixed_b": 0.7}, 32, 20),
    "llama3": (LLAMA3, 128, 40),
    "llama3_equal": ({**LLAMA3, "high_freq_factor": 1.0}, 128, 40),
    "yarn": (YARN, 128, 7),
    "yarn_untruncated": ({**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2}, 64, 7),
    "yarn_unscaled": ({**YARN, "factor": 2.5, "original_max_position_embeddings": 33, "apply_yarn_scaling": False,
                       "attn_factor": 0.8, "extrapolation_factor": 0.9}, 64, 7),
    "yarn_one_pair": ({**YARN, "beta_fast": 100, "beta_slow": 100, "truncate": False}, 16, 7),
    "yarn_shrinks": ({**YARN, "factor": 0.5}, 16, 7),
    "deepseek": (DEEPSEEK, 64, 7),
    "deepseek_untruncated": ({**DEEPSEEK, "rope_type": "deepseek_llama_scaling"}, 64, 7),
    "longrope": (LONG, 8, 64),
    "longrope_mscale": ({**LONG, "short_mscale": 1.1, "long_mscale": 1.3}, 8, 64),
    "longrope_short": ({**LONG, "rope_type": "su"}, 8, 12),
    "proportional": ({"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}, 64, 40),
    "mrope": ({"rope_type": "mrope", "mrope_section": [3, 3, 2]}, 16, 9),
    "mrope_yarn": ({**YARN, "mrope_section": (11, 11, 10)}, 64, 7),
}  # fmt: skip


@checks("rope_build_cache", cases=[case(family=name) for name in FAMILIES])
def test_cache_against_mpmath(case):
    """float64 rounds a dozen times before the angle: 2^-49 of it; then the store rounds by half an ulp, 2^-24."""
    p, head_size, P = FAMILIES[case.family]
    cache = oracle.rope_build_cache(p, head_size=head_size, max_position=P)
    tables = reference(p, head_size, P)
    assert cache.dtype == np.float32 and len(cache) == sum(rows for rows, *_ in tables)
    start, half = 0, cache.shape[1] // 2
    assert 2 * half == head_size if case.family == "proportional" else True
    for rows, inv, divisor, mscale in tables:
        for t in {0, 1, rows // 3, rows - 1}:
            angles = [mp.mpf(t) / divisor * inv(i) for i in range(half)]
            want = np.float64([mp.cos(a) * mscale for a in angles] + [mp.sin(a) * mscale for a in angles])
            slack = np.float64([2.0**-49 * a * mscale for a in angles] * 2)
            assert_within(cache[start + t], want, np.abs(want) * 2.0**-24 + slack + 1e-30, f"{case.family} row {t}")
        start += rows


@checks("rope_build_cache")
def test_cache_rounds_once_to_bfloat16():
    p, head_size, P = FAMILIES["yarn"]
    tables = rope_frequencies.tables(p, head_size, P, np.float64)
    angle = np.arange(50)[:, None] * tables[0].inv
    exact = np.concatenate([np.cos(angle), np.sin(angle)], -1) * tables[0].mscale
    cache = oracle.rope_build_cache(p, head_size=head_size, max_position=P, dtype="bfloat16")
    assert_bytes(cache[:50].astype(np.float32), np.float32([[rounded(v, "bfloat16") for v in row] for row in exact]))


def scalar_f32_cache(width, base, rows):
    """The default family with every step rounded to float32, in Python floats."""
    f = lambda value: rounded(value, "float32")
    inv = [f(1 / f(base ** f(2 * i / width))) for i in range(width // 2)]
    angles = [[f(f(t) * v) for v in inv] for t in rows]
    return np.float32([[f(math.cos(a)) for a in row] + [f(math.sin(a)) for a in row] for row in angles])


@checks("rope_build_cache")
@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.sampled_from([1e4, 5e5, 1e6, 1e7]), st.integers(1, 60))
def test_emulated_cache_against_scalar_float32(half, base, P):
    found = oracle.rope_build_cache({"rope_theta": base}, head_size=2 * half, max_position=P, emulate="f32")
    assert_bytes(found, scalar_f32_cache(2 * half, base, range(P)))


@checks("rope_build_cache", cases=[case(family=name) for name in FAMILIES])
def test_emulation_stays_near_the_definition(case):
    """A dozen float32 roundings of the frequency (three times that where YaRN blends), one of the angle."""
    p, head_size, P = FAMILIES[case.family]
    exact, emulated = (
        oracle.rope_build_cache(p, head_size=head_size, max_position=P, emulate=e) for e in (None, "f32")
    )
    tables = rope_frequencies.tables(p, head_size, P, np.float64)
    angle = np.concatenate([np.arange(t.rows)[:, None] / t.divisor * t.inv * t.mscale for t in tables])
    assert_within(emulated, exact, np.tile(40 * 2.0**-24 * angle, 2) + 2.0**-22)


def near_get_rope(found, want, parameters, head_size, max_position):
    """The number of columns whose frequency is a neighbour of ours; everything else equals torch's up to an ulp.

    torch's vectorised float32 pow, exp, cos and sin are within an ulp, not correctly rounded. A power that is an ulp
    off moves its whole column, which must then equal the column of a neighbouring inverse frequency.
    """
    wide, target = found.astype(np.float64), want.astype(np.float64)
    ulp = max(1.0, float(np.abs(target).max())) * 2.0 ** (-8 if found.dtype.itemsize == 2 else -23)
    off = np.abs(wide - target).max(axis=0) > ulp
    half = found.shape[1] // 2
    tables, columns, start = rope_frequencies.tables(parameters, head_size, max_position, np.float32), 0, 0
    for table in tables:
        for i in np.flatnonzero(off[:half] | off[half:]):
            t = np.float32(np.arange(table.rows)) / np.float32(table.divisor)
            best = np.inf
            for steps in range(-4, 5):
                inv = table.inv[i] + np.float32(steps) * np.spacing(table.inv[i])
                angle = np.float64(t * inv)
                both = np.stack([np.cos(angle), np.sin(angle)]) * table.mscale
                mine = target[start : start + table.rows, [i, half + i]].T
                best = min(best, np.abs(both - mine).max())
            if best > ulp:
                raise ParityError(f"column {i}: {best:.3g} away from every neighbouring frequency")
            columns += 1
        start += table.rows
    return columns


@checks("rope_build_cache")
def test_cache_against_get_rope():
    cases = [*op_cases("rope_frequencies", "rope_build_cache"), *op_cases("rope", "rope_build_cache", "cpu")]
    assert len(cases) >= 90
    for golden in cases:
        found = oracle.rope_build_cache(**golden.arguments)
        want = golden.outputs["cos_sin_cache"]
        assert found.dtype == want.dtype and found.shape == want.shape, golden.name
        names = ("rope_parameters", "head_size", "max_position")
        moved = near_get_rope(found, want, *(golden.arguments[name] for name in names))
        assert moved <= (8 if "mixed" in golden.name else 2), f"{golden.name}: {moved} columns moved"


@checks("rope_cos_sin_cache", cases=[case(rotary_dim=2), case(rotary_dim=64, llama3=True), case(rotary_dim=20)])
def test_token_rows_against_mpmath(case):
    positions = np.int64([0, 1, 7, 4096, 131071, 1 << 20])
    llama3 = LLAMA3 if "llama3" in case else None
    found = oracle.rope_cos_sin_cache(positions, base=5e5, rotary_dim=case.rotary_dim, llama3=llama3)
    inv = reference(LLAMA3 if llama3 else {"rope_theta": 5e5}, case.rotary_dim, 1)[0][1]
    angles = [[int(t) * inv(i) for i in range(case.rotary_dim // 2)] for t in positions]
    want = np.float64([[mp.cos(a) for a in row] + [mp.sin(a) for a in row] for row in angles])
    slack = np.tile(np.float64(angles) * 2.0**-49, 2)
    assert_within(found, want, np.abs(want) * 2.0**-24 + slack)
    again = oracle.rope_cos_sin_cache.mirror(
        positions.astype(np.int32), base=5e5, rotary_dim=case.rotary_dim, llama3=llama3
    )
    assert_bytes(again, found)


@checks("rope_cos_sin_cache")
def test_token_rows_are_rows_of_the_cache():
    cache = oracle.rope_build_cache({"rope_theta": 1e6}, head_size=32, max_position=50)
    positions = np.int32([49, 0, 3, 3])
    assert_bytes(oracle.rope_cos_sin_cache(positions, base=1e6, rotary_dim=32), cache[positions])
    assert oracle.rope_cos_sin_cache(positions[:0], base=1e6, rotary_dim=32).shape == (0, 32)


BROKEN = {
    "an unknown type": {"rope_type": "xdrope"},
    "FoPE": {"use_fope": True},
    "no factor": {"rope_type": "linear"},
    "factor 0": {"rope_type": "linear", "factor": 0},
    "a factor that is text": {"rope_type": "linear", "factor": "4"},
    "a bool": {"rope_type": "yarn", "factor": True, "original_max_position_embeddings": 8},
    "no original length": {"rope_type": "yarn", "factor": 2.0},
    "no low factor": {
        "rope_type": "llama3",
        "factor": 2.0,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 8,
    },
    "dynamic without either": {"rope_type": "dynamic"},
    "dynamic that shrinks below 0": {"rope_type": "dynamic", "factor": 4.0, "max_trained_positions": 4096},
    "short list": {**LONG, "short_factor": [1.0]},
    "no list": {**LONG, "long_factor": 3.0},
    "partial above 1": {"partial_rotary_factor": 1.5},
    "odd width": {"rope_dim": 5},
    "too wide": {"rope_dim": 10},
    "negative theta": {"rope_theta": -1.0},
    "infinite theta": {"rope_theta": math.inf},
    "sections that do not add up": {"mrope_section": [1, 1, 1]},
    "mrope without sections": {"rope_type": "mrope"},
    "sections of text": {"mrope_section": ["1", "2", "1"]},
    "a width of text": {"rope_dim": "4"},
    "no width": {"partial_rotary_factor": 0.1},
    "theta 1 for YaRN": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0, "original_max_position_embeddings": 8},
    "two lanes for dynamic NTK": {"rope_type": "dynamic", "alpha": 2.0, "rope_dim": 2},
    "no mapping": [1],
}


@pytest.mark.parametrize("parameters", BROKEN.values(), ids=BROKEN)
def test_bad_parameters_are_refused(parameters):
    with pytest.raises(ContractError) as refusal:
        oracle.rope_build_cache(parameters, head_size=8, max_position=16)
    assert (refusal.value.op, refusal.value.argument) == ("rope_build_cache", "rope_parameters")


@pytest.mark.parametrize("argument, wrong", [
    ("positions", {"positions": np.int32([3, -1])}), ("rotary_dim", {"rotary_dim": 7}),
    ("rotary_dim", {"rotary_dim": 0}),
    ("base", {"base": 0.0}), ("llama3", {"llama3": {"factor": 8.0}}), ("llama3", {"llama3": 8.0}),
])  # fmt: skip
def test_bad_token_rows_are_refused(argument, wrong):
    with pytest.raises(ContractError) as refusal:
        oracle.rope_cos_sin_cache(**{"positions": np.int32([0]), "base": 1e4, "rotary_dim": 8, **wrong})
    assert (refusal.value.op, refusal.value.argument) == ("rope_cos_sin_cache", argument)


mutations("rope_build_cache", {
    "exponents over the half": ("/ real(denominator)", "/ real(denominator / 2)", "vtlab.ops.rotary.powers"),
    "a sine less": ("(half, np.sin)", "(half, np.cos)", "rope_frequencies.fill"),
    "mscale forgotten": ("* real(part.mscale)", "", "rope_frequencies.fill"),
    "positions not divided": ("/ real(part.divisor)", "", "rope_frequencies.fill"),
    "chunks restart at 0": ("np.arange(row, stop)", "np.arange(stop - row)", "rope_frequencies.fill"),
    "cosine of the float32 angle in float32": (".astype(np.float64)\n", "\n", "rope_frequencies.fill"),
    "bands swapped": ("wavelength < length / high", "wavelength < length / low", "vtlab.ops.rotary.llama3"),
    "blend reversed": ("(1 - blend) * inv / factor + blend * inv", "blend * inv / factor + (1 - blend) * inv",
                       "vtlab.ops.rotary.llama3"),
    "ramp not clipped": ("(high - low), 0, 1)", "(high - low), -9, 9)", "rope_frequencies.yarn"),
    "ramp over all lanes": ("np.arange(width // 2, dtype=real)", "2 * np.arange(width // 2, dtype=real)",
                            "rope_frequencies.yarn"),
    "always truncate": ("if truncate:", "if True:", "rope_frequencies.yarn"),
    "interpolate the fast pairs": ("* (1 - kept) + 1.0 / power * kept", "* kept + 1.0 / power * (1 - kept)",
                                   "rope_frequencies.yarn"),
    "temperature with log10": ("math.log(scale)", "math.log10(scale)", "rope_frequencies.magnitude"),
    "sections ignored": ("longer = 4", "longer = 1", "rope_frequencies.tables"),
    "YaRN's rows from max_position": ("math.ceil(length * factor)", "max_position", "rope_frequencies.tables"),
    "dynamic rows times factor": ("width, max_position), width, real), max_position)",
                                  "width, max_position), width, real), 4 * max_position)", "rope_frequencies.tables"),
    "dynamic exponent r / (r - 1)": ("growth ** (width / (width - 2))", "growth ** (width / (width - 1))",
                                     "rope_frequencies._dynamic_base"),
    "long before short": ('(("short", length), ("long", max_position))', '(("long", max_position), ("short", length))',
                          "rope_frequencies._long_and_short"),
    "proportional over the rotary width": ("width // 2, head_size, real", "width // 2, width, real",
                                           "rope_frequencies.proportional"),
    "NTK without its division": ("/ factor ** (2 / width)", "", "rope_frequencies.ntk"),
    "V4's cache in bfloat16": ('"float32" if rope_parameters.get("is_deepseek_v4") else dtype', "dtype"),
    "emulation off": ("np.float64 if emulate is None else np.float32", "np.float64"),
})  # fmt: skip
mutations("rope_cos_sin_cache", {
    "angles in float32": ("positions.astype(np.float64)[:, None] * inv",
                          "(positions[:, None] * inv).astype(np.float32)", "_token_cos_sin"),
    "frequencies in float32": ("rotary_dim, np.float64)", "rotary_dim, np.float32)",
                               "vtlab.ops.rotary.token_frequencies"),
    "llama3 ignored": ("inv if llama3_parameters is None else", "inv if True else",
                       "vtlab.ops.rotary.token_frequencies"),
    "sines first": ("base, rotary_dim, llama3), axis", "base, rotary_dim, llama3)[::-1], axis"),
})  # fmt: skip
