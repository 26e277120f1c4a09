"""Spills that are declared: what a kernel may lose to memory for want of registers, and why that is no fault."""

from __future__ import annotations

from collections.abc import Mapping

DECLARED: Mapping[tuple[str, str], tuple[int, str]] = {}
"""(target, kernel) -> (bytes stored and loaded at most, the reason)."""


def spilling(target: str, kernels: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The kernels that spill more than they declare for the target."""
    return [name for name, usage in kernels.items() if usage["spills"] > DECLARED.get((target, name), (0, ""))[0]]
