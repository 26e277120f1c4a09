"""Spills that are declared: what a kernel may lose to memory for want of registers, and why that is no fault."""

from __future__ import annotations

from collections.abc import Mapping

_RESIDENT = "two words a thread, so that as many blocks are resident as hide the memory's time; other targets lose none"

DECLARED: Mapping[tuple[str, str], tuple[int, str]] = {
    (target, f"transform_{kind}_10"): (16, _RESIDENT) for target in ("sm_100a", "sm_103a") for kind in ("bf16", "f16")
}
"""(target, kernel) -> (bytes stored and loaded at most, the reason)."""


def spilling(target: str, kernels: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The kernels that spill more than they declare for the target."""
    return [name for name, usage in kernels.items() if usage["spills"] > DECLARED.get((target, name), (0, ""))[0]]
