"""Which ops' kernels are judged by a norm against truth, because tensor cores sum in an order of their own.

The class and its bound are the contract's; kernels of all other ops give the mirror's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vtlab.ops.contract import Parity
from vtlab.ops.table import lookup

NORMS = ("nmse", "rel_l2")
_judged: dict[str, Callable[[Mapping], bool]] = {}
_coarse: set[str] = set()
_steps: dict[str, Callable[[Mapping], int]] = {}


def judged_by_norm(
    op: str,
    when: Callable[[Mapping], bool] = lambda arguments: True,
    *,
    coarse: bool = False,
    steps: Callable[[Mapping], int] = lambda arguments: 0,
) -> None:
    """Declare, beside its launcher: calls of `op` run on tensor cores if `when(all arguments, defaults included)`.

    coarse : the tensor cores' sums have fewer bits than float32, though more than the result's dtype. steps : how many
    products of tensor cores a sum goes through one after the other, in the longest chain, where one cut would say too
    little: each cuts it at 2^-23, always towards zero, where the mirror's steps round to the nearest, either way.
    """
    _judged[op], _steps[op] = when, steps
    if coarse:
        _coarse.add(op)


def by_norm(op: str) -> bool:
    """Whether some call of the op is judged by a norm."""
    return op in _judged


def is_coarse(op: str) -> bool:
    """Whether the op's sums on tensor cores have fewer bits than float32."""
    return op in _coarse


def cut_of(op: str, arguments: Mapping) -> float:
    """How far tensor cores may leave a sum of the call from its own, relative to its largest part."""
    return max(2.0**-24, _steps[op](arguments) * 2.0**-23)


def parity_of(op: str, arguments: Mapping) -> Parity:
    """How a call's results are judged; ValueError where the contract has no norm for a kernel that needs one."""
    if not by_norm(op):
        return Parity("bytes")
    found = lookup(op)
    defaults = {name: given.default for name, given in found.__signature__.parameters.items()}
    if not _judged[op](defaults | dict(arguments)):
        return Parity("bytes")
    parity = found.contract.parity
    if parity.kind not in NORMS:
        raise ValueError(f"{op}: its kernels are judged by a norm, its contract says {parity.kind}")
    return parity
