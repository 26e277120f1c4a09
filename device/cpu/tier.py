"""The instruction sets that kernels are compiled for: this processor's, or fewer of them by `VTLAB_CPU_TIER`.

Every tier gives the same bytes; they differ in speed. Numba compiles for one processor in a process, so the tier is
chosen once, before the first kernel.
"""

from __future__ import annotations

import os
import platform
from functools import cache

from vtlab.ops.errors import ContractError

# Numba's (CPU name, features) of the tiers that leave instructions of the processor unused.
_FORCED = {
    "avx2": ("x86-64-v3", ""),
    "portable": ("x86-64", ""),
}
TIERS = ("auto", "avx512", "avx2", "neon", "portable")


@cache
def tier() -> str:
    """The tier of this process: "avx512", "avx2", "neon" or "portable"; ContractError for one that cannot run here."""
    wanted, best = os.environ.get("VTLAB_CPU_TIER", "auto") or "auto", _best()
    if wanted == "auto":
        return best
    possible = {"avx512": ("avx512", "avx2", "portable"), "avx2": ("avx2", "portable"), "neon": ("neon",)}
    possible = possible.get(best, ("portable",))
    if wanted not in possible:
        raise ContractError("", "VTLAB_CPU_TIER", repr(wanted), "one of auto, " + ", ".join(possible))
    return wanted


def configure() -> None:
    """Tell Numba, which must not have compiled anything yet, what to compile for."""
    from numba.core import config

    chosen = tier()
    if chosen != _best() and chosen in _FORCED:
        config.CPU_NAME, config.CPU_FEATURES = _FORCED[chosen]
    elif chosen == "avx512":
        from llvmlite import binding

        # LLVM would take vpdpwssd apart, for processors on which its latency counts more than its throughput
        config.CPU_NAME = binding.get_host_cpu_name()
        config.CPU_FEATURES = binding.get_host_cpu_features().flatten() + ",+fast-dpwssd"


@cache
def _best() -> str:
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "neon"
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    if all(features.get(name) for name in ("avx512f", "avx512bw", "avx512dq", "avx512vl")):
        return "avx512"
    return "avx2" if features.get("avx2") and features.get("fma") else "portable"
