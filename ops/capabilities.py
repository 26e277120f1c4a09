"""What a device can do, in words that no vendor owns: the record that a provider's `supports` predicate reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .errors import ContractError


class Device(StrEnum):
    """The kinds of device an op can run on. A member equals its name, so that ``"cuda"`` may stand for it."""

    CPU = "cpu"
    CUDA = "cuda"
    METAL = "metal"
    VULKAN = "vulkan"
    XPU = "xpu"

    @classmethod
    def _missing_(cls, value: object):
        raise ContractError("Device", "", repr(value), "one of " + ", ".join(cls))


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of `device`; `valid` stays False until the device was really probed.

    compute_major, compute_minor : version of the instruction set (CUDA: the compute capability).
    compute_unit_count : multiprocessors, cores or execution units.
    features : set of 64 bits, whose meaning belongs to the device's own module.

    Raises ContractError on an unknown device, a negative number, or features outside 64 bits.
    """

    device: Device
    valid: bool = False
    compute_major: int = 0
    compute_minor: int = 0
    compute_unit_count: int = 0
    features: int = 0

    def __post_init__(self):
        object.__setattr__(self, "device", Device(self.device))
        for name in ("compute_major", "compute_minor", "compute_unit_count"):
            if getattr(self, name) < 0:
                raise ContractError("Capabilities", name, getattr(self, name), ">= 0")
        if not 0 <= self.features < 2**64:
            raise ContractError("Capabilities", "features", self.features, "a set of 64 bits")

    def at_least(self, major: int, minor: int = 0) -> bool:
        """valid and (compute_major, compute_minor) >= (major, minor): an unprobed device never qualifies."""
        return self.valid and (self.compute_major, self.compute_minor) >= (major, minor)

    def has(self, features: int) -> bool:
        """valid and every bit of `features` is set: an unprobed device never qualifies."""
        return self.valid and self.features & features == features
