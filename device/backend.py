"""Memory, queues, events and capture of a device as plain calls: the host's, and the types that both share.

What CuPy and NumPy offer already, behind the names of vt::'s backend, with its promises: queues are numbered for the
life of the process and no number comes twice, so that a cache by queue never finds what a destroyed one left.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from vtlab.ops.errors import ContractError

from .errors import DeviceError

ALIGNMENT = 64
_ids = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Block:
    """`size` bytes of memory at `address`, kept by `owner`; on the device, or on the host."""

    address: int
    size: int
    on_device: bool
    owner: object = field(repr=False)


@dataclass(frozen=True, eq=False)
class Queue:
    """An order of work. `stream` is the library's own object."""

    id: int
    stream: object = field(repr=False)


def host_block(size: int) -> Block:
    """Host memory, 64-byte aligned; a block of no bytes has an address too."""
    if size < 0:
        raise ContractError("alloc", "size", size, ">= 0")
    raw = np.empty(size + ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT
    return Block(raw.ctypes.data + first, size, False, raw[first : first + size])


def new_queue(stream: object) -> Queue:
    """A queue with a number that none had before."""
    return Queue(next(_ids), stream)


def within(op: str, count: int, *blocks: Block) -> None:
    """Refuse a count of bytes that a block does not have."""
    for block in blocks:
        if not 0 <= count <= block.size:
            raise ContractError(op, "count", count, f"0 ... {block.size}, the size of the block")


class HostBackend:
    """The CPU: every call is done when it returns, and nothing can be captured."""

    def alloc(self, size: int) -> Block:
        return host_block(size)

    alloc_pinned = alloc

    def free(self, block: Block | None) -> None:
        """Nothing to do: memory goes with its last block."""

    free_pinned = free

    def memset(self, block: Block, byte: int, count: int, queue: Queue) -> None:
        within("memset", count, block)
        block.owner[:count] = byte

    def copy(self, target: Block, source: Block, count: int, queue: Queue) -> None:
        within("copy", count, target, source)
        target.owner[:count] = source.owner[:count]

    def create_queue(self) -> Queue:
        return new_queue(None)

    def destroy_queue(self, queue: Queue) -> None:
        """Nothing waits on a host's queue."""

    def synchronize(self, queue: Queue) -> None:
        """Its work is done."""

    def unified_memory(self) -> bool:
        return True

    def device_capability(self) -> tuple[int, int]:
        """(0, 0): a CPU has none."""
        return 0, 0

    def create_event(self) -> object:
        return object()

    def record_event(self, event: object, queue: Queue) -> None:
        """What came before is done already."""

    def synchronize_event(self, event: object) -> None:
        """It has come."""

    def query_event(self, event: object) -> bool:
        return True

    def queue_wait_event(self, queue: Queue, event: object) -> None:
        """There is nothing to wait for."""

    def supports_aux_stream(self) -> bool:
        return False

    def supports_graph_capture(self) -> bool:
        return False

    def begin_capture(self, queue: Queue) -> None:
        raise DeviceError("a CPU's queue cannot be captured")
