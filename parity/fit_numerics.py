"""Makes ops/numerics/coefficients.py and double_coefficients.py: the polynomials of the transcendental functions.

    python -m vtlab.parity.fit_numerics            # prints the modules; --write puts them in place

Each float32 polynomial is a weighted minimax fit on one interval: values from mpmath at 50 digits on Chebyshev nodes,
solved by Lawson's iteratively reweighted least squares. The coefficients are rounded to float32 one by one, lowest
order first, and the rest is fitted again around those already fixed, so that a rounding is repaired by its neighbours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import mpmath as mp
import numpy as np

mp.mp.dps = 50
_NODES = 600
_ROUNDS = 80
DOUBLE_POLE, DOUBLE_REACH = 3.75, 30.0  # erfc in float64: t = (x - POLE) / (x + POLE) for 0 <= x <= REACH


def fit(
    value: Callable, lo: float, hi: float, degree: int, weight: Callable, double_head: bool = False
) -> tuple[list[float], float]:
    """Float32 coefficients, lowest first, of the polynomial p with the least max |weight * (p - value)|; that maximum.

    double_head: coefficient 0 is a sum of two float32, given as the last (low) and the first (high) number.
    """
    middle, radius = (lo + hi) / 2, (hi - lo) / 2
    x = middle + radius * np.cos(np.pi * (np.arange(_NODES) + 0.5) / _NODES)
    exact = [value(mp.mpf(float(v))) for v in x]
    scale = np.array([float(weight(mp.mpf(float(v)))) for v in x])
    size = max(abs(lo), abs(hi))
    done: list[float] = []
    rest = exact
    for order in range(degree + 1):
        powers = np.stack([(x / size) ** k for k in range(order, degree + 1)], axis=1)
        target = np.array([float(v) for v in rest])
        lawson = np.full(_NODES, 1 / _NODES)
        for _ in range(_ROUNDS):
            root = np.sqrt(lawson) * scale
            solution = np.linalg.lstsq(powers * root[:, None], target * root, rcond=None)[0]
            error = np.abs(powers @ solution - target) * scale
            lawson = lawson * (error + 1e-3 * error.max())
            lawson /= lawson.sum()
        done.append(float(np.float32(solution[0] / size**order)))
        taken = mp.mpf(done[-1])
        if double_head and order == 0:
            tail = float(np.float32(solution[0] - done[0]))
            taken += mp.mpf(tail)
        rest = [v - taken * mp.mpf(float(t)) ** order for v, t in zip(rest, x)]
    if double_head:
        done.append(tail)
    return done, max(abs(float(r)) * s for r, s in zip(rest, scale))


def ratio(function: Callable, at_zero: object) -> Callable:
    """function, with its removable singularity at 0 filled in."""
    return lambda x: mp.mpf(at_zero) if x == 0 else function(x)


def split(value: object, bits: int) -> tuple[float, float]:
    """value = high + low: high with that many significant bits (so that small multiples are exact), low a float32."""
    unit = mp.mpf(2) ** (mp.floor(mp.log(abs(value), 2)) + 1 - bits)
    high = float(mp.nint(value / unit) * unit)
    return high, float(np.float32(float(value - mp.mpf(high))))


def constants() -> dict[str, float]:
    """The float32 constants; pairs _HI, _LO add up to theirs."""
    two = mp.mpf(2)
    out = {"LOG2E": float(np.float32(float(1 / mp.log(2))))}
    out["LN2_HI"], out["LN2_LO"] = split(mp.log(two), 15)
    slope = 2 * mp.sqrt(2 / mp.pi)
    out["GELU1_HI"], out["GELU1_LO"] = split(slope, 24)
    out["GELU3_HI"], out["GELU3_LO"] = split(slope * mp.mpf("0.044715"), 24)
    return out


def polynomials() -> dict[str, tuple[list[float], float]]:
    """name -> (coefficients, lowest first; the largest error it causes, relative to the function's result)."""
    one = mp.mpf(1)
    reach = float(mp.log(2)) / 2 + 2e-4
    return {
        "EXP": fit(ratio(lambda x: (mp.expm1(x) - x) / x**2, 0.5), -reach, reach, 4, lambda x: x**2 / mp.exp(x)),
        "LOG": fit(
            ratio(lambda x: (mp.log1p(x) - x + x**2 / 2) / x**3, one / 3),
            -0.2929,
            0.5,
            8,
            lambda x: abs(x**3 / mp.log1p(x)) if x else mp.mpf(0),
        ),
        "TANH": fit(ratio(lambda z: (mp.tanh(mp.sqrt(z)) / mp.sqrt(z) - 1) / z, -one / 3), 0, 0.3025, 4, lambda z: z),
        "ERF": fit(
            ratio(lambda z: mp.erf(mp.sqrt(z)) / mp.sqrt(z) - 1, 2 / mp.sqrt(mp.pi) - 1), 0, 0.766, 6, lambda z: one
        ),
        "ERFC": fit(lambda x: -mp.log(mp.erfc(x)), 0.875, 4, 8, mp.erfc),
    }


def mills() -> tuple[list[list[float]], float]:
    """Rows (c0 … c6, low part of c0) of exp(a^2/2) * Phi(-a) around a = 1/4, 3/4 … 59/4; the worst relative error."""
    rows, worst = [], 0.0
    value = lambda a: mp.exp(a * a / 2) * mp.erfc(a / mp.sqrt(2)) / 2
    for index in range(30):
        local = lambda d, centre=(2 * index + 1) / 4: value(centre + d)
        coefficients, error = fit(local, -0.25, 0.25, 6, lambda d, local=local: 1 / local(d), double_head=True)
        rows.append(coefficients)
        worst = max(worst, error)
    return rows, worst


def module() -> str:
    """The text of ops/numerics/coefficients.py."""
    lines = [
        '"""The float32 transcendental functions\' constants, made by parity/fit_numerics.py; lowest order first."""',
        "",
        "import numpy as np",
        "",
        "# fmt: off",
    ]
    lines += [f"{name} = np.float32({text(value)})" for name, value in constants().items()]
    for name, (values, error) in polynomials().items():
        lines += ["", f"# the approximation alone errs by 2**{np.log2(error):.1f}", f"{name} = np.array(["]
        lines += [f"    {row(values[start : start + 7])}," for start in range(0, len(values), 7)]
        lines += ["], np.float32)"]
    rows, error = mills()
    lines += ["", f"# the approximation alone errs by 2**{np.log2(error):.1f}", "MILLS = np.array(["]
    lines += [f"    [{row(values)}]," for values in rows]
    return "\n".join([*lines, "], np.float32)", ""])


def double_module() -> str:
    """The text of ops/numerics/double_coefficients.py: near-minimax by Chebyshev interpolation, highest order first."""
    pole = mp.mpf(DOUBLE_POLE)

    def scaled(t: mp.mpf) -> mp.mpf:
        y = pole * (1 + t) / (1 - t)
        return mp.exp(y * y) * mp.erfc(y) * (1 + 2 * y)

    series = ratio(lambda z: mp.erf(mp.sqrt(z)) / mp.sqrt(z), 2 / mp.sqrt(mp.pi))
    fits = {
        "ERFCX": mp.chebyfit(scaled, [-1, (DOUBLE_REACH - pole) / (DOUBLE_REACH + pole)], 23, error=True),
        "ERF": mp.chebyfit(series, [0, mp.mpf(1) / 4], 9, error=True),
    }
    lines = [
        '"""Constants of the float64 error functions, made by parity/fit_numerics.py; highest order first."""',
        "",
        "# fmt: off",
        f"POLE, REACH = {DOUBLE_POLE}, {DOUBLE_REACH}",
    ]
    for name, (values, error) in fits.items():
        lines += ["", f"# the approximation alone errs by 2**{float(mp.log(error, 2)):.1f}", f"{name} = ("]
        numbers = [repr(float(v)) for v in values]
        lines += [f"    {', '.join(numbers[start : start + 4])}," for start in range(0, len(numbers), 4)]
        lines += [")"]
    return "\n".join([*lines, ""])


def text(value: float) -> str:
    """The shortest decimal that reads back as this float32, in Python and in C++."""
    if 1e-3 < abs(value) < 1e6:
        return np.format_float_positional(np.float32(value), unique=True, trim="0")
    return np.format_float_scientific(np.float32(value), unique=True, trim="0", exp_digits=1)


def row(values: list[float]) -> str:
    """Numbers side by side."""
    return ", ".join(text(v) for v in values)


if __name__ == "__main__":
    for name, make in {"coefficients.py": module, "double_coefficients.py": double_module}.items():
        if "--write" in sys.argv:
            (Path(__file__).parents[1] / "ops" / "numerics" / name).write_text(make())
        else:
            print(make())
