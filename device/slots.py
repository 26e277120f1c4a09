"""What recurrent launchers check of slots and starts, which lie on the device.

Outside of a capture a call waits for the device to look and raises ContractError before anything is written. A captured
call cannot: a slot that does not exist is a null one there, and two rows of one slot write it in any order.
"""

from __future__ import annotations

from vtlab.ops.errors import ContractError

from .faults import first_fault
from .runtime import current

_FAMILY = "state_cache"
_NEGATIVE = -(2**31)


def check_slots(op: str, state_idx, slots: int, *, name: str = "state_idx", null: bool = True, shared: bool = False):
    """Refuse slots beyond the last one and, unless `shared`, one of two rows; null: negative ones are no slots."""
    if state_idx is None:
        return
    args = [state_idx, _NEGATIVE if null else 0, slots, int(not shared)]
    fault = first_fault(op, _FAMILY, "state_slots_fit", len(state_idx), args)
    if fault is None:
        return
    given = current().read(state_idx).tolist()
    if fault >> 56:
        raise ContractError(op, name, given, "no slot twice")
    raise ContractError(op, name, given[fault], f"slots < {slots}" if null else f"slots from 0 to {slots - 1}")


def check_starts(op: str, query_start_loc, tokens: int) -> None:
    """Refuse starts that do not begin at 0, fall, or end elsewhere than at `tokens`."""
    count = len(query_start_loc)
    if first_fault(op, _FAMILY, "starts_fit", count, [query_start_loc, tokens]) is not None:
        got = current().read(query_start_loc).tolist()
        raise ContractError(op, "query_start_loc", got, f"0, never falling, up to {tokens}")
