"""Every op of the table through the generic checks, and the table's own promises."""

from __future__ import annotations

import pytest

from vtlab.ops.rows import ROWS
from vtlab.ops.table import table
from vtlab.parity.generic import generic_checks

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
