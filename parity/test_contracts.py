"""Every op of the table through the generic checks, and the table's own promises."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.rows import ROWS
from vtlab.ops.table import table

from .generic import generic_checks

OPS = sorted(table())
GENERIC = [pytest.param(run, id=name) for op in OPS for name, run in generic_checks(table()[op])]


@pytest.mark.parametrize("run", GENERIC)
def test_generic(run):
    run()


@pytest.mark.parametrize("name", OPS)
def test_contract_is_complete(name):
    """Row, upstream, rounding points, NaN policy, examples and a docstring of all five parts are there."""
    contract = table()[name].contract
    assert contract.row in ROWS and contract.family in ROWS[contract.row].families
    assert contract.summary and contract.upstream and contract.nan and contract.examples
    assert contract.rounding and all(contract.rounding.values())
    text = table()[name].__doc__
    for part in ("Shapes", "Rounding points", "Errors", "Source"):
        assert f"{part}:" in text, f"{name}: the docstring lacks its {part} part"


@pytest.mark.parametrize("x", [np.ones((3, 60), np.float32), [[1.0] * 16]], ids=["a wrong size", "a list"])
def test_a_refusal_stands_alone(x):
    """Who reads a traceback sees what was wrong with the call, not what the door looked up before it checked."""
    with pytest.raises(ContractError) as refusal:
        oracle.scaled_fp4_quant(x, np.ones(1, np.float32))
    assert refusal.value.__cause__ is None and (refusal.value.__suppress_context__ or not refusal.value.__context__)
