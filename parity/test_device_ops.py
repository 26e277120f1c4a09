"""Every CUDA kernel against the mirror: on the GPU with ``--device cuda``, on the emulated one otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab.device.source import families

from .chain_cases import generated_chains
from .device_cases import EDGES, cases, device_ops
from .device_run import Emulated, check_case
from .emulation import compiler, kernels
from .test_device_calls_w4a8 import older

NO_FAULT = np.int64(2**63 - 1)
OPS = device_ops()
CASES = list(cases(OPS))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_device_gives_the_bytes_of_the_mirror_or_the_norm_of_its_contract(case, device, record_case):
    record_case(str(case), check_case(device, case))


def test_every_op_with_a_kernel_has_edge_shapes():
    assert set(OPS) == set(EDGES)


@pytest.mark.skipif(compiler() is None, reason="emulation needs a C++ compiler")
@pytest.mark.parametrize("family", sorted(set(families()) - set(generated_chains())))
def test_every_kernel_is_launched(family):
    """A kernel that no case launches is unproven; some are for GPUs before Hopper, some for families of like names.

    Kernels are noted, not run, which the cases above do.
    """
    missing, plain = set(kernels(family)), [case for case in CASES[::-1] if not case.special]
    own = [case for case in plain if case.family == family]
    akin = [case for case in plain if any(word in case.family for word in family.split("_")) and case not in own]
    akin.sort(key=lambda case: len(case.family))
    rounds = zip(map(noting, ((9, 0), (8, 0), (8, 9), (9, 0))), (own, own, own, akin))
    for device, case in ((device, case) for device, some in rounds for case in some):
        if not missing:
            break
        device.call(case.op, {name: device.send(value) for name, value in case.arguments().items()})
        missing -= set(device.runtime.launched)
    assert not missing


def noting(capability: tuple[int, int]) -> Emulated:
    """A GPU that notes kernels and runs none; those that look for faults have found none."""
    device = older(capability=capability)
    runtime, read = device.runtime, device.runtime.read
    runtime.launch = lambda family, kernel, *_: runtime.launched.append(kernel)
    runtime.read = lambda a: np.full(1, NO_FAULT) if a.dtype == np.int64 and a.size == 1 else read(a)
    return device
