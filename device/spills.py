"""Spills that are declared: what a kernel may lose to memory for want of registers, and why that is no fault."""

from __future__ import annotations

from collections.abc import Mapping

_DRAFTS = "six words a thread, once a token of a draft, by a compiler that keeps 40 registers; other targets lose none"

DECLARED: Mapping[tuple[str, str], tuple[int, str]] = {
    ("sm_120a", "conv_rows_v1"): (48, _DRAFTS),
    ("sm_121a", "conv_rows_v1"): (48, _DRAFTS),
}
"""(target, kernel) -> (bytes stored and loaded at most, the reason)."""


def spilling(target: str, kernels: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The kernels that spill more than they declare for the target."""
    return [name for name, usage in kernels.items() if usage["spills"] > DECLARED.get((target, name), (0, ""))[0]]
