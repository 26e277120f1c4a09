"""Which GPU architectures kernels are built for, and which build serves a device."""

from __future__ import annotations

from dataclasses import dataclass

from vtlab.ops.errors import ContractError


@dataclass(frozen=True)
class Arch:
    """One target of the compiler: `name` as in ``sm_90a``, and the chips it stands for.

    A plain target's cubin runs on every device of its major version and at least its minor one; a target with the
    suffix "a" uses instructions of one chip generation and runs on exactly that compute capability.
    """

    name: str
    chips: str

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor): the last digit is the minor version."""
        digits = self.name.removeprefix("sm_").rstrip("a")
        return int(digits[:-1]), int(digits[-1])

    @property
    def specific(self) -> bool:
        """Whether it serves one compute capability alone."""
        return self.name.endswith("a")

    def serves(self, major: int, minor: int) -> bool:
        """Whether its cubin runs on a device of this compute capability."""
        own = self.capability
        return own == (major, minor) if self.specific else own[0] == major and own[1] <= minor


ARCHS = (
    Arch("sm_80", "A100, A30"),
    Arch("sm_86", "A10, A40, RTX 30"),
    Arch("sm_89", "L4, L40, RTX 40"),
    Arch("sm_90a", "H100, H200, GH200"),
    Arch("sm_100a", "B200, GB200"),
    Arch("sm_103a", "B300, GB300"),
    Arch("sm_120a", "RTX 50, RTX PRO Blackwell"),
    Arch("sm_121a", "GB10 (DGX Spark)"),
)
"""What `vtlab build` makes when it is not told otherwise."""

PTX = "compute_80"
"""The virtual architecture whose PTX the driver compiles for a device that no cubin serves."""

OLDEST = (8, 0)


def lookup(name: str) -> Arch:
    """The arch called `name`; ContractError with those that exist."""
    for arch in ARCHS:
        if arch.name == name:
            return arch
    raise ContractError("build", "arch", repr(name), "one of " + ", ".join(arch.name for arch in ARCHS))


def serving(major: int, minor: int) -> str:
    """The target for a device: the most specific arch whose cubin it runs, else the PTX target.

    Raises ContractError for a device older than compute capability 8.0.
    """
    if (major, minor) < OLDEST:
        raise ContractError("device", "compute capability", f"{major}.{minor}", "8.0 or newer")
    fitting = [arch for arch in ARCHS if arch.serves(major, minor)]
    return max(fitting, key=lambda arch: (arch.capability, arch.specific)).name if fitting else PTX
