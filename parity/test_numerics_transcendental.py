"""The float32 functions of MIRROR against mpmath, the record of the exhaustive proof, and vt_math.cuh."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest

from vtlab.ops.numerics import MIRROR, TRUTH, coefficients, transcendental

from . import prove_numerics as prove

PROOF = json.loads(prove.RECORD.read_text())
F = np.float32
REAL = {"log": (0, np.inf), "log1p": (-1, np.inf)}


def ulps(name: str, x: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Error in float32 ulps against TRUTH, whose own error these tests bound elsewhere; finite results only."""
    with np.errstate(all="ignore"):
        want = getattr(TRUTH, name)(x.astype(np.float64))
        unit = np.ldexp(1.0, np.maximum(np.frexp(want)[1] - 1, -126) - 23)
        error = np.abs(got.astype(np.float64) - want) / unit
        return np.where(np.isfinite(want.astype(F)) & np.isfinite(got), error, 0)


@pytest.mark.parametrize("name", prove.FUNCTIONS)
def test_record_covers_every_input_within_one_ulp(name):
    entry = PROOF["functions"][name]
    assert entry["inputs"] == 1 << 32 and entry["mirror_compared"] >= 1 << 24
    assert 0.5 <= entry["worst_ulp"] <= 1.0


@pytest.mark.parametrize("name", prove.FUNCTIONS)
def test_worst_input_of_the_record(name):
    entry = PROOF["functions"][name]
    x = np.array([int(entry["worst_at"], 16)], np.uint32).view(F)
    got = getattr(MIRROR, name)(x)
    assert got.view(np.uint32)[0] == int(entry["value_there"], 16)
    assert prove.exact_ulps(name, float(x[0]), float(got[0])) == pytest.approx(entry["worst_ulp"], abs=1e-6)


@pytest.mark.parametrize("name", prove.FUNCTIONS)
def test_sample_of_all_binades_has_the_bytes_of_the_record(name):
    x = prove.spread(1 << 17)
    y = getattr(MIRROR, name)(x)
    assert f"{prove.mix(x, y):#018x}" == PROOF["functions"][name]["sample_digest"]
    assert ulps(name, x, y).max() <= PROOF["functions"][name]["worst_ulp"] + 1e-6


@pytest.mark.parametrize("name", prove.FUNCTIONS)
def test_random_inputs_at_the_scale_of_a_model(name):
    rng = np.random.default_rng(7)
    x = np.concatenate([rng.standard_normal(60_000) * 3, rng.uniform(-120, 120, 60_000)]).astype(F)
    y = getattr(MIRROR, name)(x)
    low, high = REAL.get(name, (-np.inf, np.inf))
    np.testing.assert_array_equal(np.isnan(y), (x < low) | (x > high))
    assert ulps(name, x, y).max() <= PROOF["functions"][name]["worst_ulp"] + 1e-6


@pytest.mark.parametrize("name", prove.FUNCTIONS)
def test_mpmath_agrees_with_truth_and_bounds_the_mirror(name):
    """TRUTH is what the other tests measure with: it must be far more exact than what it measures."""
    rng = np.random.default_rng(8)
    low, high = {"log": (1e-44, 3e38), "log1p": (-0.999, 3e38)}.get(name, (-14, 14))
    x = np.concatenate([rng.uniform(max(low, -14), 14, 150), 10.0 ** rng.uniform(-40, 1, 50)]).astype(F)
    x = x[(x > low) & (x < high)]
    got, wide = getattr(MIRROR, name)(x), getattr(TRUTH, name)(x.astype(np.float64))
    for value, y, t in zip(x.tolist(), got.tolist(), wide.tolist()):
        exact = prove.exact(name, value)
        assert prove.exact_ulps(name, value, y) <= 1, value
        # exp magnifies the roundings of its exponent: up to 217 here, rounded five times in float64
        assert abs(t - exact) <= abs(exact) * 2**-43, value


INF, NAN, TINY = np.inf, np.nan, 2.0**-149
GATED = [(INF, INF), (-INF, NAN), (0.0, 0.0), (-0.0, -0.0), (2.0**127, 2.0**127), (-(2.0**127), -0.0), (-121.0, -0.0)]
ODD = [(INF, 1.0), (-INF, -1.0), (0.0, 0.0), (-0.0, -0.0), (30.0, 1.0), (-30.0, -1.0), (-TINY, -TINY)]
SPECIAL = {
    "exp": [(INF, INF), (-INF, 0.0), (0.0, 1.0), (-0.0, 1.0), (89.0, INF), (-104.0, 0.0), (-103.0, TINY)],
    "log": [(INF, INF), (0.0, -INF), (-0.0, -INF), (-1.0, NAN), (-INF, NAN), (1.0, 0.0), (-TINY, NAN)],
    "log1p": [(INF, INF), (0.0, 0.0), (-0.0, -0.0), (-1.0, -INF), (-2.0, NAN), (-INF, NAN), (TINY, TINY)],
    "tanh": ODD,
    "erf": ODD,
    "sigmoid": [(INF, 1.0), (-INF, 0.0), (0.0, 0.5), (-0.0, 0.5), (-103.0, TINY), (-105.0, 0.0), (200.0, 1.0)],
    "silu": GATED,
    "softplus": [(INF, INF), (-INF, 0.0), (-103.0, TINY), (2.0**127, 2.0**127), (-(2.0**127), 0.0)],
    "gelu_tanh": GATED,
    "gelu_erf": GATED,
}


@pytest.mark.parametrize("nx", [MIRROR, TRUTH], ids=str)
@pytest.mark.parametrize("name", prove.FUNCTIONS)
def test_special_values(name, nx):
    x, want = (np.array(column, F) for column in zip(*SPECIAL[name], (NAN, NAN)))
    got = nx.store(getattr(nx, name)(nx.load(x)), F)
    np.testing.assert_array_equal(got, want)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(want[number]))


def test_shapes_blocks_and_refusals():
    x = np.random.default_rng(9).standard_normal((3, 20_001)).astype(F)
    whole = MIRROR.tanh(x)
    np.testing.assert_array_equal(whole[1, ::7], MIRROR.tanh(x[1, ::7]))
    assert MIRROR.exp(x[0, 0]).shape == () and MIRROR.exp(x[:0]).shape == (0, 20_001)
    with pytest.raises(TypeError, match="float32"):
        MIRROR.exp(x.astype(np.float64))


# One wrong per kind of step; each must break a function where the record's sample lies.
MUTATIONS = {
    "a coefficient's last bit": ("exp", "EXP", lambda v: np.concatenate([v[:1], np.nextafter(v[1:2], F(1)), v[2:]])),
    "ln2 in one float32": ("exp", "LN2_LO", lambda v: F(0)),
    "a term of the logarithm missing": ("log", "LOG", lambda v: v[:-1]),
    "the table's low parts missing": ("gelu_erf", "MILLS", lambda v: v * (np.arange(8) < 7).astype(F)),
    "the slope of gelu in one float32": ("gelu_tanh", "GELU1_LO", lambda v: F(0)),
}


@pytest.mark.parametrize("wrong", MUTATIONS)
def test_a_small_wrong_changes_the_sample(wrong, monkeypatch):
    name, constant, change = MUTATIONS[wrong]
    monkeypatch.setattr(coefficients, constant, change(getattr(coefficients, constant)))
    x = prove.spread(1 << 17)
    assert f"{prove.mix(x, getattr(MIRROR, name)(x)):#018x}" != PROOF["functions"][name]["sample_digest"]


def test_an_fma_that_rounds_twice_changes_the_sample(monkeypatch):
    monkeypatch.setattr(transcendental, "fma", lambda a, b, c: a * b + c)
    x = prove.spread(1 << 17)
    for name in ("exp", "log", "gelu_erf"):
        assert f"{prove.mix(x, getattr(MIRROR, name)(x)):#018x}" != PROOF["functions"][name]["sample_digest"]


def test_the_proof_is_about_this_header():
    assert PROOF["source"] == prove.source_digest(), "vt_math.cuh changed: run python -m vtlab.parity.prove_numerics"


def test_header_and_mirror_hold_the_same_constants():
    text = re.sub(r"//[^\n]*", "", prove.HEADER.read_text())
    header = {F(v) for v in re.findall(r"-?\d+\.\d+(?:e-?\d+)?(?=f)", text)}
    for name, value in vars(coefficients).items():
        if name.isupper():
            assert set(np.ravel(value).tolist()) <= {float(v) for v in header}, name


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile vt_math.cuh with")
def test_header_compiled_for_this_machine_gives_the_bytes_of_the_mirror(tmp_path):
    library = prove.build(tmp_path)
    rng = np.random.default_rng(10)
    x = np.concatenate([prove.spread(1 << 16), (rng.standard_normal(1 << 15) * 4).astype(F)])
    for name in prove.FUNCTIONS:
        got, want = prove.compiled(library, name, x), getattr(MIRROR, name)(x)
        unlike = (got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))
        assert not unlike.any(), (name, x[unlike][:3])
