"""The harness itself: mutations are planted and removed, survivors are seen, the ledger only shrinks truthfully."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vtlab import oracle

from . import gate, harness
from .harness import Mutation, case
from .ledger import Ledger, Miss, load_ledger

DROP_ROOT = Mutation("rms_norm", "drop the square root", "nx.sqrt(", "(", "inverse_rms")


def _norm():
    return oracle.rms_norm(np.array([[3, 4]], np.float32), np.ones(2, np.float32))


def test_a_mutation_changes_the_op_and_goes_away_again():
    before = _norm()
    with harness.planted(DROP_ROOT):
        assert not np.allclose(_norm(), before)
    np.testing.assert_array_equal(_norm(), before)


def test_a_mutation_goes_away_after_an_exception():
    before = _norm()
    with pytest.raises(RuntimeError), harness.planted(DROP_ROOT):
        raise RuntimeError
    np.testing.assert_array_equal(_norm(), before)


@pytest.mark.parametrize("text", ["no such text", "nx."])
def test_a_mutation_must_name_one_place(text):
    with pytest.raises(ValueError, match="stands"), harness.planted(Mutation("rms_norm", "vague", text, "")):
        pass


def test_a_mutation_that_changes_nothing_survives():
    harness.load_checks()
    renamed = Mutation("rms_norm", "nothing", "eps=1e-6", "eps=0.000001")
    assert harness.survives(renamed)
    assert not harness.survives(DROP_ROOT)


def test_a_mutation_that_merely_breaks_the_code_is_no_proof():
    harness.load_checks()
    with pytest.raises(NameError):
        harness.survives(Mutation("rms_norm", "nonsense", "nx.sqrt(", "undefined_name(", "inverse_rms"))


def test_case_reads_as_attributes_and_prints_short():
    item = case(T=1, H=128, dtype="bfloat16")
    assert item.H == 128 and str(item) == "T1-H128-bfloat16"
    with pytest.raises(AttributeError):
        _ = item.missing


def _verdict(monkeypatch, run, ledger):
    monkeypatch.setattr(gate, "load_ledger", lambda: ledger)
    monkeypatch.setattr(gate, "generic_checks", lambda found: iter([("planted", run)]))
    monkeypatch.setitem(harness.CHECKS, "rms_norm", {})
    return gate.judge("rms_norm")


def _fail():
    raise AssertionError("wrong")


KNOWN = Ledger((Miss("rms_norm", "planted", 7, "waits for a decision"),))


@pytest.mark.parametrize(
    ("run", "ledger", "red", "known"),
    [
        (_fail, Ledger(()), True, 0),
        (_fail, KNOWN, False, 1),
        (lambda: None, KNOWN, True, 0),
        (lambda: None, Ledger(()), False, 0),
    ],
    ids=["failure", "known miss", "known miss that passes", "pass"],
)
def test_the_gate_judges_by_the_ledger(monkeypatch, run, ledger, red, known):
    verdict = _verdict(monkeypatch, run, ledger)
    assert bool(verdict.failures) is red and len(verdict.known) == known


@pytest.mark.parametrize(
    "entry",
    [
        {"op": "rms_norm", "check": "x", "issue": 0, "reason": "none"},
        {"op": "rms_norm", "check": "x", "issue": 3, "reason": " "},
        {"op": "", "check": "x", "issue": 3, "reason": "r"},
    ],
)
def test_a_miss_needs_issue_and_reason(tmp_path, entry):
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps([entry]))
    with pytest.raises(ValueError, match="needs"):
        load_ledger(path)


def test_the_committed_ledger_reads_and_names_real_checks():
    harness.load_checks()
    for miss in load_ledger().misses:
        assert miss.op in harness.CHECKS
