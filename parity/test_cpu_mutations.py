"""Every small wrong in the source of a CPU kernel turns the gate red."""

from __future__ import annotations

import pytest

from .compare import ParityError
from .cpu_run import Cpu, cpu_cases
from .cpu_wrongs import WRONGS, planted
from .device_run import check_case


def noticed(wrong) -> bool:
    device = Cpu()
    for case in cpu_cases():
        if case.op in wrong.ops and wrong.quant_type in (None, case.arguments().get("quant_type")):
            try:
                check_case(device, case)
            except ParityError:
                return True
    return False


@pytest.mark.kernel_mutation
@pytest.mark.parametrize("wrong", WRONGS, ids=str)
def test_wrongs_are_noticed(wrong, tmp_path, monkeypatch):
    with planted(wrong, tmp_path, monkeypatch):
        assert noticed(wrong)


def test_a_planted_wrong_is_taken_out_again(tmp_path, monkeypatch):
    """The first of them, in the plain run too: noticed while it stands, forgotten afterwards."""
    wrong = next(wrong for wrong in WRONGS if wrong.module == "logits")
    with planted(wrong, tmp_path, monkeypatch):
        assert noticed(wrong)
    assert not noticed(wrong)
