"""Ops that promise independent rows give the same bytes whole and in pieces of one row, in either arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab.ops import rowwise
from vtlab.ops.numerics import MIRROR, TRUTH, threads
from vtlab.ops.table import table

from .compare import ParityError, assert_bytes
from .generic import arguments_of, evaluate

CASES = [
    pytest.param(found, number, id=f"{name}-{number}")
    for name, found in sorted(table().items())
    if found.contract.rows is not None
    for number in range(len(found.contract.examples))
]


@pytest.mark.parametrize("nx", [TRUTH, MIRROR], ids=str)
@pytest.mark.parametrize(("found", "number"), CASES)
def test_pieces_have_the_bytes_of_the_whole(found, number, nx, monkeypatch):
    arguments = arguments_of(found, number)
    monkeypatch.setattr(rowwise, "_ELEMENTS", 1 << 40)
    whole = evaluate(found, nx, arguments)
    monkeypatch.setattr(rowwise, "_ELEMENTS", 1)
    monkeypatch.setattr(threads, "_WORTH_IT", 0)
    for one, two in zip(whole, evaluate(found, nx, arguments), strict=True):
        assert_bytes(two, one, found.contract.name)


def test_a_body_whose_rows_are_not_independent_is_seen(monkeypatch):
    """The check above can fail: a row that looks at its neighbours changes when it is alone."""
    found = table()["relu"]
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    with found.replaced(lambda nx, x: x - x.mean(axis=0, dtype=np.float32)):
        whole = found(x)
        monkeypatch.setattr(rowwise, "_ELEMENTS", 1)
        with pytest.raises(ParityError):
            assert_bytes(found(x), whole)


def test_an_error_in_a_piece_reaches_the_caller(monkeypatch):
    monkeypatch.setattr(rowwise, "_ELEMENTS", 1)
    monkeypatch.setattr(threads, "_WORTH_IT", 0)
    found = table()["relu"]

    def body(nx, x):
        if x[0, 0] == 3:
            raise FloatingPointError("in row 3")
        return x

    with found.replaced(body), pytest.raises(FloatingPointError, match="row 3"):
        found(np.arange(4, dtype=np.float32)[:, None])
