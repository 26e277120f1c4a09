"""Calls of launchers past the checks at an op's door, which see an emulated device's arrays and refuse what only a
device can know.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from vtlab.device import runtime
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .device_run import Emulated


def past_the_door(device, module: ModuleType, op: str, arguments: dict):
    """The launcher `module.op` itself on the emulated GPU; on a real one the op, whose door cannot look."""
    if isinstance(device, Emulated):
        with runtime.using(device.runtime):
            return getattr(module, op)(**arguments)
    return device.call(op, arguments)


def assert_refused(device, module: ModuleType, op: str, host: dict, argument: str) -> None:
    """The call raises ContractError about the argument, and every array is as it was."""
    sent = {name: device.send(value) for name, value in host.items()}
    with pytest.raises(ContractError) as refusal:
        past_the_door(device, module, op, dict(sent))
    assert (refusal.value.op, refusal.value.argument) == (op, argument)
    for name, value in sent.items():
        if isinstance(host[name], np.ndarray):
            assert_bytes(device.fetch(value), host[name], name)
