"""Every op of the CPU tier against the bytes that its contract names for a CPU, on the cases of the CUDA kernels."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import ops
from vtlab.device.cpu import threads
from vtlab.ops import providers
from vtlab.ops.table import lookup

from .cpu_run import Cpu, cpu_cases, cpu_ops
from .device_run import check_case, tupled

CASES = list(cpu_cases())


@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_kernels_give_the_bytes_of_the_mirror(op):
    device = Cpu()
    for case in CASES:
        if case.op == op:
            check_case(device, case)


def test_every_op_of_the_tier_has_cases():
    assert set(cpu_ops()) == {case.op for case in CASES}


def test_the_tier_serves_and_the_oracle_stands_behind_it():
    x, w = np.ones((2, 8), np.float32), np.ones(8, np.float32)
    ops.rms_norm(x, w)
    assert [providers.op_provider_name_at("rms_norm", "cpu", i) for i in range(2)] == ["numba", "oracle"]
    assert providers.op_provider_stats("rms_norm", "cpu").last_selected == "numba"


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_threads_change_no_byte(op, count, monkeypatch):
    """Every call is cut as finely as it can be."""
    monkeypatch.setattr(threads, "_WORTH_IT", 0)
    device = Cpu()
    for case in [case for case in CASES if case.op == op and not case.special][:6]:
        arguments, again = case.arguments(), case.arguments()
        with threads.using(1):
            want = tupled(device.call(op, arguments))
        with threads.using(count):
            got = tupled(device.call(op, again))
        updated = [name for name in lookup(op).contract.mutates if isinstance(arguments[name], np.ndarray)]
        for a, b in [*zip(got, want), *((again[name], arguments[name]) for name in updated)]:
            assert a.tobytes() == b.tobytes(), case
