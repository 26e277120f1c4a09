"""The gate that can fail: every registered mutation must be caught by the checks of its op."""

from __future__ import annotations

import pytest

from vtlab.ops.table import table

from .harness import CHECKS, MUTATIONS, load_checks, survives

load_checks()
ALL = [mutation for op in sorted(MUTATIONS) for mutation in MUTATIONS[op].values()]


@pytest.mark.mutation
@pytest.mark.parametrize("mutation", ALL, ids=str)
def test_mutation_is_caught(mutation):
    assert not survives(mutation), f"no check of {mutation.op} notices: {mutation.name}"


@pytest.mark.parametrize("name", sorted(table()))
def test_every_op_has_checks_and_mutations(name):
    assert CHECKS.get(name), f"{name} has no check against an independent reference"
    assert len(MUTATIONS.get(name, {})) >= 3, f"{name} has {len(MUTATIONS.get(name, {}))} mutations, want at least 3"
