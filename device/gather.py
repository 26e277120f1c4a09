"""Reading tokens of a paged cache by block table on a GPU: the host's side of cuda/gather.cuh."""

from __future__ import annotations

from vtlab.ops.errors import ContractError

from .early import EARLY
from .faults import first_fault
from .launch import start
from .runtime import current
from .units import heads_of, unit_of

_THREADS, MOST_ROWS, _BLOCKS, _UNITS = 256, 32, 1024, 4096
"""Rows a block: so many that about 1024 blocks or 4096 units of 16 bytes each are left, at most 32 (gather.cuh)."""

_FAULTS = (
    ("cu_seq_lens", "0, then ascending, within the rows of dst"),
    ("token_to_seq", "requests of block_table"),
    ("token_to_seq", "a request whose first token is not after this one"),
    ("seq_starts", "multiples of the page size"),
    ("block_table", "the token's page within its row of the table, in pages of at least 1 row"),
    ("block_table", "blocks of the cache"),
)


def gather(op, family, kernel, rows, src, dst, table, bounds, owners, starts) -> None:
    """dst[i] = the cache's entry of token i, for i < rows; `owners` names each token's request, None: by bounds.

    Outside of a capture a bad request, start, page or block raises before anything is written; in one its tokens are
    left out.
    """
    item, size = src.dtype.itemsize, src.shape[1]
    requests = [
        table, table.strides[0] // 4, table.shape[1], bounds, starts, owners, len(table), src.shape[0], size,
    ]  # fmt: skip
    check_requests(op, family, f"check_{kernel}", rows, requests)
    for offsets, (heads, head_steps), run in heads_of(
        list(zip(src.shape[2:], src.strides[2:], dst.strides[1:])), item, 2
    ):
        steps = src.strides[0], src.strides[1], head_steps[0], dst.strides[0], head_steps[1]
        unit = unit_of((src, dst), (run, *steps, *offsets))
        src_block, src_row, src_head, dst_row, dst_head = (step // unit for step in steps)
        head_lanes = run // unit
        lanes = heads * head_lanes
        if not lanes * rows * size:
            return
        each = max(1, min(MOST_ROWS, rows // _BLOCKS, _UNITS // lanes))
        runtime = current()
        args = [
            rows, each, lanes, head_lanes, runtime.pointer(src) + offsets[0], src_block, src_row, src_head,
            runtime.pointer(dst) + offsets[1], dst_row, dst_head, *requests,
        ]  # fmt: skip
        start(op, family, f"{kernel}_{unit}{EARLY}", -(-rows // each), (_THREADS, 1), args)


def check_requests(op, family, kernel, rows, requests) -> None:
    """Refuse what `kernel` finds wrong with the kernels' REQUESTS of `rows` tokens, where the call may wait for it."""
    bounds, starts = requests[3:5]
    fault = first_fault(op, family, kernel, max(rows, len(bounds)), [rows, *requests])
    if fault is not None:
        argument, want = _FAULTS[fault >> 56]
        raise ContractError(op, argument, _got(argument, fault & (1 << 56) - 1, bounds, starts), want)


def _got(argument, number, bounds, starts) -> str:
    if argument == "cu_seq_lens":
        return str(current().read(bounds).tolist())
    return str(current().read(starts).tolist()) if argument == "seq_starts" else f"token {number}"
