"""Which ops' kernels are judged by a norm against truth, because tensor cores sum in an order of their own.

The class and its bound are the contract's; kernels of all other ops give the mirror's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vtlab.ops.contract import Parity
from vtlab.ops.table import lookup

NORMS = ("nmse", "rel_l2")
_judged: dict[str, Callable[[Mapping], bool]] = {}


def judged_by_norm(op: str, when: Callable[[Mapping], bool] = lambda arguments: True) -> None:
    """Declare, beside its launcher, that the calls of `op` for which `when(arguments)` holds run on tensor cores."""
    _judged[op] = when


def by_norm(op: str) -> bool:
    """Whether some call of the op is judged by a norm."""
    return op in _judged


def parity_of(op: str, arguments: Mapping) -> Parity:
    """How a call's results are judged; ValueError where the contract has no norm for a kernel that needs one."""
    if not by_norm(op) or not _judged[op](arguments):
        return Parity("bytes")
    parity = lookup(op).contract.parity
    if parity.kind not in NORMS:
        raise ValueError(f"{op}: its kernels are judged by a norm, its contract says {parity.kind}")
    return parity
