"""Comparators: each raises `ParityError` at the first mismatch, with index, got, want and the distance in ulps.

In every class NaNs must stand at the same places, and infinities at the same places with the same sign.
"""

from __future__ import annotations

import numpy as np

_INFINITE = 1 << 62


class ParityError(AssertionError):
    """Two results differ more than their parity class allows."""


def ordered(values: np.ndarray) -> np.ndarray:
    """Float codes as int64 that ascend with the value, so that neighbours differ by 1; -0 and +0 are both 0."""
    bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").astype(np.int64)
    sign = np.int64(1) << np.int64(8 * values.dtype.itemsize - 1)
    if values.dtype.itemsize == 8:
        bits = np.ascontiguousarray(values).view(np.int64)
        return np.where(bits < 0, np.int64(-(2**63)) - bits, bits)
    return np.where(bits & sign, sign - bits, bits)


def ulp_distance(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Distance in units of the last place of the storage dtype; enormous where only one of the two is NaN."""
    with np.errstate(over="ignore"):
        distance = np.abs(ordered(got) - ordered(want))
    nan_got, nan_want = _isnan(got), _isnan(want)
    return np.where(nan_got & nan_want, 0, np.where(nan_got ^ nan_want, _INFINITE, distance))


def assert_bytes(got, want, what: str = "") -> None:
    """Every byte equal: NaN payloads and signs of zero count."""
    got, want = _same_form(got, want, what)
    raw_got, raw_want = (np.ascontiguousarray(a).view(f"V{a.dtype.itemsize}") for a in (got, want))
    _raise_at(raw_got != raw_want, got, want, what, "bytes differ")


def assert_ids(got, want, what: str = "") -> None:
    """Integer results equal."""
    got, want = _same_form(got, want, what)
    if got.dtype.kind not in "iub":
        raise ParityError(f"{what}: ids must be integers, got {got.dtype}")
    _raise_at(got != want, got, want, what, "ids differ")


def assert_ulp(got, truth, ulps: int, inexact_share: float = 1.0, what: str = "") -> None:
    """At most `ulps` storage ulps from `truth` everywhere, and at most `inexact_share` of the elements off at all."""
    got, truth = _same_form(got, truth, what)
    _same_special(got, truth, what)
    distance = ulp_distance(got, truth)
    _raise_at(distance > ulps, got, truth, what, f"more than {ulps} ulp")
    share = float(np.mean(distance > 0)) if distance.size else 0.0
    if share > inexact_share:
        _raise_at(distance > 0, got, truth, what, f"{share:.2%} of elements inexact, {inexact_share:.2%} allowed")


def assert_within(got, truth, bound, what: str = "") -> None:
    """|got - truth| <= bound elementwise (`bound` broadcasts), both taken to float64."""
    got, truth = np.asarray(got), np.asarray(truth)
    if got.shape != truth.shape:
        raise ParityError(f"{what}: shape {got.shape}, want {truth.shape}")
    _same_special(got, truth, what)
    wide_got, wide_truth = got.astype(np.float64), truth.astype(np.float64)
    with np.errstate(invalid="ignore"):
        excess = np.isfinite(wide_truth) & ~(np.abs(wide_got - wide_truth) <= bound)
    if excess.any():
        at = tuple(int(i) for i in np.argwhere(excess)[0])
        allowed = float(np.broadcast_to(bound, truth.shape)[at])
        _raise_at(excess, got, truth, what, f"further than {allowed:.3g} allowed there")


def nmse(got, truth) -> float:
    """Normalised mean squared error: sum((got - truth)^2) / sum(truth^2)."""
    got, truth = np.asarray(got).astype(np.float64), np.asarray(truth).astype(np.float64)
    power = float(np.sum(truth * truth))
    error = float(np.sum((got - truth) ** 2))
    return error / power if power else (0.0 if error == 0 else float("inf"))


def assert_nmse(got, truth, bound: float, what: str = "") -> None:
    """nmse(got, truth) <= bound over the finite elements."""
    _assert_norm(got, truth, bound, what, "nmse", nmse)


def assert_rel_l2(got, truth, bound: float, what: str = "") -> None:
    """||got - truth|| / ||truth|| <= bound over the finite elements."""
    _assert_norm(got, truth, bound, what, "rel_l2", lambda a, b: nmse(a, b) ** 0.5)


def _assert_norm(got, truth, bound: float, what: str, name: str, measure) -> None:
    got, truth = np.asarray(got), np.asarray(truth)
    if got.shape != truth.shape:
        raise ParityError(f"{what}: shape {got.shape}, want {truth.shape}")
    _same_special(got, truth, what)
    finite = np.isfinite(truth.astype(np.float64))
    found = measure(got[finite], truth[finite])
    if not found <= bound:
        error = np.where(finite, np.abs(got.astype(np.float64) - truth.astype(np.float64)), 0)
        _raise_at(
            error == error.max(), got, truth, what, f"{name} {found:.3g}, bound {bound:.3g}; the largest error is"
        )


def _same_form(got, want, what: str) -> tuple[np.ndarray, np.ndarray]:
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        raise ParityError(f"{what}: got {got.dtype} {got.shape}, want {want.dtype} {want.shape}")
    return got, want


def _isnan(values: np.ndarray) -> np.ndarray:
    return np.isnan(values.astype(np.float32) if values.dtype.itemsize < 4 else values)


def _same_special(got: np.ndarray, want: np.ndarray, what: str) -> None:
    with np.errstate(invalid="ignore"):  # a signalling NaN says so when it is widened
        wide_got, wide_want = got.astype(np.float64), want.astype(np.float64)
    _raise_at(np.isnan(wide_got) != np.isnan(wide_want), got, want, what, "NaN on one side")
    inf_got = np.where(np.isinf(wide_got), np.sign(wide_got), 0)
    inf_want = np.where(np.isinf(wide_want), np.sign(wide_want), 0)
    _raise_at(inf_got != inf_want, got, want, what, "infinity on one side")


def _raise_at(wrong: np.ndarray, got: np.ndarray, want: np.ndarray, what: str, fault: str) -> None:
    if not np.any(wrong):
        return
    places = np.argwhere(np.reshape(wrong, got.shape))
    lines = [f"{what}: {fault}: {len(places)} of {wrong.size} elements"]
    for place in places[:5]:
        at = tuple(int(i) for i in place)
        g, w = got[at], want[at]
        line = f"  [{', '.join(map(str, at))}] got {g!s}, want {w!s}"
        if got.dtype == want.dtype and got.dtype.kind not in "iub":
            line += f", {int(ulp_distance(np.asarray(g)[None], np.asarray(w)[None])[0])} ulp"
        lines.append(line)
    raise ParityError("\n".join(lines))
