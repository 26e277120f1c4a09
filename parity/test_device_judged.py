"""Calls that are judged by a norm: what passes, and each way not to."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab.device import judged
from vtlab.device.judged import judged_by_norm, parity_of

from . import device_run
from .compare import ParityError
from .device_cases import cases
from .device_run import Emulated, check_case
from .emulation import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="emulation needs a C++ compiler")
CASE = next(case for case in cases(["attention"]) if not case.special and case.arguments()["q"].shape[0] > 2)


class Spoiled(Emulated):
    """The emulated GPU; `spoil(result, number of the call)` changes what comes out."""

    def __init__(self, spoil):
        super().__init__()
        self.spoil, self.calls = spoil, 0

    def call(self, op, arguments):
        results = super().call(op, arguments)
        first = results[0] if isinstance(results, tuple) else results
        self.spoil(first, self.calls)
        self.calls += 1
        return results


@pytest.fixture
def by_norm(monkeypatch):
    """Attention on tensor cores, as far as the check knows; its rows once more stand for a smaller batch."""
    monkeypatch.setattr(device_run, "halves", lambda op, arguments: (arguments, len(arguments["q"])))
    monkeypatch.setattr(judged, "_judged", dict(judged._judged))
    judged_by_norm("attention")


def test_the_kernels_own_results_pass_with_their_error(by_norm):
    error = check_case(Emulated(), CASE)
    assert 0 <= error <= parity_of("attention", {}).bound


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda out, call: out.__imul__(1.05), "bound"),
        (lambda out, call: out.__setitem__(..., np.nextafter(out, 9) * np.float32(1.0003)), "more than twice as far"),
        (lambda out, call: out.__setitem__((0,) * out.ndim, np.nan), "nan|NaN|special"),
        (lambda out, call: call == 1 and out.__setitem__((0,) * out.ndim, 0), "again"),
        (lambda out, call: call == 2 and out.__setitem__((0,) * out.ndim, 0), "in a batch of"),
    ],
    ids=["beyond the bound", "beyond twice the mirror", "NaN", "other bytes again", "other bytes in a smaller batch"],
)
def test_what_does_not_pass(by_norm, spoil, message):
    with pytest.raises(ParityError, match=message):
        check_case(Spoiled(spoil), CASE)


def test_a_norm_needs_a_contract_that_has_one(by_norm):
    judged_by_norm("rms_norm", lambda arguments: arguments["eps"] > 1)
    assert parity_of("rms_norm", {"eps": 0.5}).kind == parity_of("relu", {}).kind == "bytes"
    with pytest.raises(ValueError, match="contract says bytes"):
        parity_of("rms_norm", {"eps": 2.0})
