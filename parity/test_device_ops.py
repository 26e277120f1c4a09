"""Every CUDA kernel against the mirror: on the GPU with ``--device cuda``, on the emulated one otherwise."""

from __future__ import annotations

import pytest

from vtlab.device.source import families

from .chain_cases import generated_chains
from .device_cases import EDGES, cases, device_ops
from .device_run import Emulated, check_case
from .emulation import compiler, kernels
from .test_device_calls_w4a8 import older

OPS = device_ops()
CASES = list(cases(OPS))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_device_gives_the_bytes_of_the_mirror_or_the_norm_of_its_contract(case, device, record_case):
    record_case(str(case), check_case(device, case))


def test_every_op_with_a_kernel_has_edge_shapes():
    assert set(OPS) == set(EDGES)


@pytest.mark.skipif(compiler() is None, reason="emulation needs a C++ compiler")
def test_every_kernel_runs():
    """A kernel that no case launches is unproven; some are for GPUs before Hopper."""
    written = {name: family for family in set(families()) - set(generated_chains()) for name in kernels(family)}
    launched = _launched(Emulated(), CASES)
    unused = {written[name] for name in written.keys() - launched}
    for capability in ((8, 0), (8, 9)):
        launched |= _launched(older(capability=capability), [case for case in CASES if case.family in unused])
    assert launched == written.keys()


def _launched(device, some) -> set[str]:
    """The kernels that cases start."""
    for case in some:
        if not case.special:
            device.call(case.op, {name: device.send(value) for name, value in case.arguments().items()})
    return set(device.runtime.launched)
