"""Mamba's selective scan on a GPU: launchers of cuda/selective_scan.cuh, which cuda/ssm.cu includes."""

from __future__ import annotations

from vtlab.ops import providers

from .launch import PROVIDER, kind, results, start
from .slots import check_slots, check_starts
from .strips import LANES, lanes_of

_THREADS = 128
_CHANNELS, _STATE = 32, 16
"""Channels of a block and elements of a state of the kernel that holds states in registers, as in the .cuh file."""
_MANY, _FEW = 16, 4
"""Channels of a block of the other one: fewer of them where states are long."""
_SHARED = 48 << 10


@providers.provider("selective_scan", "cuda", PROVIDER)
def selective_scan(
    u, delta, A, B, C, state, query_start_loc, D=None, z=None, delta_bias=None, state_idx=None,
    has_initial_state=None, *, delta_softplus=False, out=None,
):  # fmt: skip
    """oracle.ssm.selective_scan."""
    op, (dim, tokens), length, groups = "selective_scan", u.shape, A.shape[1], B.shape[0]
    inputs = (u, delta, A, B, C, state, query_start_loc, D, z, delta_bias, state_idx, has_initial_state)
    (target,) = results(op, out, inputs, (u.shape, u.dtype))
    check_slots(op, state_idx, len(state))
    check_starts(op, query_start_loc, tokens)
    if not target.size:
        return target
    flags = 0 if has_initial_state is None else has_initial_state.dtype.itemsize
    fast = length == _STATE and dim // groups % _CHANNELS == 0
    rows = _CHANNELS if fast else _MANY if 4 * _MANY * length <= _SHARED else _FEW
    args = [
        rows, state, kind(state), len(state), u, delta, kind(u), A, B, C, groups, D, z, delta_bias, query_start_loc,
        state_idx, has_initial_state, flags, target, dim, tokens, length, int(delta_softplus), lanes_of(length),
    ]  # fmt: skip
    blocks = (len(query_start_loc) - 1) * -(-dim // rows)
    if fast:
        start(op, "ssm", "scan_16", blocks, (_THREADS, 1), args)
    else:
        start(op, "ssm", "scan_any", blocks, (rows * LANES, 1), args, 4 * rows * length)
    return target
