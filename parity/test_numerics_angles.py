"""Float64 cosines and sines against mpmath, and their twin for device code against them, bit by bit."""

from __future__ import annotations

import ctypes
import math
import subprocess

import mpmath
import numpy as np
import pytest

from vtlab.device.source import FOLDER
from vtlab.ops.numerics.angles import COS, SIN, TWO_OVER_PI, cos_sin

from .emulation import HEADERS, compiler

WORST = 6381956970095103.0 * 2.0**797  # the float64 nearest to a multiple of pi/2 (Muller, Handbook, 11.3)
EDGES = np.array([
    0.0, 5e-324, 1e-300, 2.0**-27, np.nextafter(0.5, 0), 0.5, math.pi / 4, np.nextafter(math.pi / 4, 1), math.pi / 2,
    math.pi, 1.5 * math.pi, 2 * math.pi, 1e5 * math.pi, 2.0**31, 2.0**53, 2.0**63, WORST, 1.7976931348623157e308,
])  # fmt: skip


def angles(count: int) -> np.ndarray:
    """Every binade, a model's positions, all quadrants' borders, and what their neighbours make of them."""
    rng = np.random.Generator(np.random.PCG64(1))
    borders = np.arange(1, count // 2) * (math.pi / 2)
    return np.concatenate([
        EDGES, -EDGES, 10.0 ** rng.uniform(-12, 308, count), rng.uniform(0, 2e6, count), borders,
        np.nextafter(borders / 2, 0),
    ])  # fmt: skip


def test_within_one_unit_in_the_last_place():
    """Rounding the sum of r and its correction takes half a unit; polynomial and correction stay under another half."""
    x = angles(120)
    cos, sin = cos_sin(x)
    with mpmath.workprec(1300):
        for angle, *found in zip(x, cos, sin):
            for got, exact in zip(found, (mpmath.cos(mpmath.mpf(angle)), mpmath.sin(mpmath.mpf(angle)))):
                unit = float(np.spacing(abs(float(exact))))
                assert abs(mpmath.mpf(got) - exact) <= unit, (angle, got, float(exact))


def test_constants():
    with mpmath.workprec(1400):
        bits = int(mpmath.floor(2 / mpmath.pi * mpmath.mpf(2) ** 1216))
    assert TWO_OVER_PI.tolist() == [0] + [bits >> 64 * i & (1 << 64) - 1 for i in range(18, -1, -1)]
    assert [round(1 / c) for c in SIN[:3]] == [-6, 120, -5040] and [round(1 / c) for c in COS[:2]] == [24, -720]


def test_symmetry_and_what_is_no_angle():
    x = angles(40)
    for one, other, sign in zip(cos_sin(x), cos_sin(-x), (1, -1)):
        np.testing.assert_array_equal(one, sign * other)
    assert all(np.isnan(part).all() for part in cos_sin(np.array([np.inf, -np.inf, np.nan])))
    shaped = x[:60].reshape(3, 20)
    np.testing.assert_array_equal(cos_sin(shaped)[0].reshape(-1), cos_sin(x[:60])[0])


TWIN = """
#include "angles.cuh"
extern "C" void turn(const double* x, double* cos, double* sin, long long n) {
    for (long long i = 0; i < n; ++i) cos_sin(x[i], cos[i], sin[i]);
}
"""


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
def test_the_device_twin_makes_the_same_bits(tmp_path):
    (tmp_path / "twin.cpp").write_text(TWIN)
    made = tmp_path / "twin.so"
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", f"-I{FOLDER}", f"-I{HEADERS[0].parent}"]
    subprocess.run([compiler(), *flags, str(tmp_path / "twin.cpp"), "-o", str(made)], check=True)
    turn = ctypes.CDLL(str(made)).turn
    x = np.concatenate([angles(20_000), [np.inf, -np.inf, np.nan]])
    cos, sin = np.empty_like(x), np.empty_like(x)
    turn(*(ctypes.c_void_p(a.ctypes.data) for a in (x, cos, sin)), ctypes.c_longlong(x.size))
    for got, want in zip((cos, sin), cos_sin(x)):
        either = np.isnan(got) | np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_array_equal(got[~either].view(np.uint64), want[~either].view(np.uint64))
