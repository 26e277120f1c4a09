"""Spills that are declared: what a kernel may lose to memory for want of registers, and why that is no fault."""

from __future__ import annotations

from collections.abc import Mapping

_FOUR_BLOCKS = "two registers of 64: four blocks a multiprocessor are worth more to a memory-bound kernel"

DECLARED: Mapping[tuple[str, str], tuple[int, str]] = {
    (target, kernel): (16, _FOUR_BLOCKS)
    for target in ("sm_80", "sm_86")
    for kernel in ("silu_and_mul_quant_fp8_bf_v8", "silu_mul_quant_fp8_bbf_v8")
}
"""(target, kernel) -> (bytes stored and loaded at most, the reason)."""


def spilling(target: str, kernels: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The kernels that spill more than they declare for the target."""
    return [name for name, usage in kernels.items() if usage["spills"] > DECLARED.get((target, name), (0, ""))[0]]
