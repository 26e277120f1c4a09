"""Digests of the CPU tier's results, for processes of different instruction sets and threads to agree on.

VTLAB_CPU_TIER=avx2 python -m vtlab.parity.cpu_tiers OP …
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence

import numpy as np

from vtlab.device.cpu.tier import tier

from .cpu_run import Cpu, cpu_cases
from .device_run import tupled


def digests(ops: Sequence[str]) -> dict[str, str]:
    """SHA-256 of each case's results, NaN as one of them."""
    device, found = Cpu(), {}
    for case in cpu_cases():
        if case.op in ops:
            results = tupled(device.call(case.op, case.arguments()))
            found[str(case)] = hashlib.sha256(b"".join(_canonical(result) for result in results)).hexdigest()
    return found


def _canonical(result: np.ndarray) -> bytes:
    if result.dtype.kind in "iu":
        return result.tobytes()
    return np.where(np.isnan(result.astype(np.float32)), result.dtype.type(np.nan), result).tobytes()


if __name__ == "__main__":
    print(json.dumps({"tier": tier(), "digests": digests(sys.argv[1:])}))
