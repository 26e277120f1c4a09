"""The device cases on the CPU tier: NumPy arrays through the public ops, served by the Numba provider alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vtlab import ops
from vtlab.device.cpu.launch import PROVIDER
from vtlab.ops import providers
from vtlab.ops.dispatch import bring_in
from vtlab.ops.table import table

from .device_cases import EDGES, DeviceCase, cases


class Cpu:
    """A device, as the device cases want one, whose arrays are the host's."""

    place = "cpu"

    def __init__(self, provider: str = PROVIDER):
        self.provider = provider

    def send(self, value):
        return np.array(value) if isinstance(value, np.ndarray) else value

    def fetch(self, value) -> np.ndarray:
        return value

    def raw(self, count: int):
        return np.empty(count, np.uint8)

    def call(self, op: str, arguments: dict):
        with ops.using(self.provider):
            return getattr(ops, op)(**arguments)


def cpu_ops() -> list[str]:
    """The ops that the CPU tier serves."""
    bring_in("cpu")
    return [name for name in table() if PROVIDER in _names(name)]


def _names(op: str) -> list[str]:
    return [providers.op_provider_name_at(op, "cpu", i) for i in range(providers.op_provider_count(op, "cpu"))]


def cpu_cases() -> Iterator[DeviceCase]:
    """The device cases of those ops, but for the calls that the tier declines: float8, Q8_K, int8."""
    for case in cases([op for op in cpu_ops() if op in EDGES]):
        arguments = case.arguments()
        declined = arguments.get("quant_type") == "Q8_K" or str(arguments.get("quant_dtype")) == "int8"
        if arguments.get("output_scale") is None and not declined:
            yield case
