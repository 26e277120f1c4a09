"""Cost of the provider registry on the hot path: at most 150 ns for `get_op`, 1 % of a 20 us kernel launch.

A direct call of the same function stands beside `call`, so that their difference is what dispatch costs.
"""

from __future__ import annotations

import pytest

from vtlab.ops.providers import Device, OpProvider, Registry, using

BUDGET_NS = 150
ROUNDS = {"rounds": 50, "iterations": 20_000, "warmup_rounds": 2}


def launcher(**arguments):
    return None


@pytest.fixture
def registry():
    registry = Registry(environ={})
    for name, priority in (("cupy-rawmodule", 10), ("numba-cuda", 0), ("cublas", -10)):
        assert registry.register_op_provider("rms_norm", "cuda", OpProvider(name, launcher, priority))
    return registry


@pytest.mark.parametrize("device", ["cuda", Device.CUDA], ids=["str", "enum"])
def test_get_op(benchmark, registry, device):
    benchmark.pedantic(registry.get_op, ("rms_norm", device), **ROUNDS)
    if benchmark.enabled:
        assert benchmark.stats.stats.min * 1e9 <= BUDGET_NS


def test_get_op_while_steered(benchmark, registry):
    with using("numba-cuda"):
        benchmark.pedantic(registry.get_op, ("rms_norm", "cuda"), **ROUNDS)


def test_get_op_while_counted(benchmark, registry):
    registry.enable_op_provider_call_stats(True)
    benchmark.pedantic(registry.get_op, ("rms_norm", "cuda"), **ROUNDS)


def test_call(benchmark, registry):
    benchmark.pedantic(registry.call, ("rms_norm", "cuda", {"eps": 1e-6}), **ROUNDS)


def test_direct_call(benchmark):
    benchmark.pedantic(launcher, kwargs={"eps": 1e-6}, **ROUNDS)
