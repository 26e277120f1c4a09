"""A GPU's memory, queues, events and graphs through CuPy, as `backend.HostBackend` has the CPU's."""

from __future__ import annotations

import numpy as np

from .backend import Block, Queue, new_queue, within
from .caps import device_caps
from .cupy_runtime import import_cupy
from .errors import DeviceError

_TO_DEVICE, _TO_HOST, _ON_DEVICE, _ON_HOST = 1, 2, 3, 0  # cudaMemcpyKind


class CudaBackend:
    """GPU number `ordinal`. Work on a queue that is being captured runs when its graph is replayed, and not before."""

    def __init__(self, ordinal: int = 0):
        self._cupy = import_cupy()
        self._caps, self._ordinal = device_caps(ordinal), ordinal
        self._graphs: dict[int, object] = {}
        self._capturing: set[int] = set()

    def alloc(self, size: int) -> Block:
        """Device memory; of a size of 0 too, so that its address is one."""
        self._refuse_in_capture("alloc")
        with self._here():
            memory = self._cupy.cuda.alloc(max(size, 1))
        return Block(memory.ptr, size, True, memory)

    def alloc_pinned(self, size: int) -> Block:
        """Host memory that the device reads and writes by itself."""
        self._refuse_in_capture("alloc_pinned")
        raw = np.frombuffer(self._cupy.cuda.alloc_pinned_memory(max(size, 1)), np.uint8)[:size]
        return Block(raw.ctypes.data, size, False, raw)

    def free(self, block: Block | None) -> None:
        """Memory goes with its last block; in a capture even that is refused."""
        self._refuse_in_capture("free")

    free_pinned = free

    def memset(self, block: Block, byte: int, count: int, queue: Queue) -> None:
        within("memset", count, block)
        with self._here():
            self._cupy.cuda.runtime.memsetAsync(block.address, byte, count, queue.stream.ptr)

    def copy(self, target: Block, source: Block, count: int, queue: Queue) -> None:
        """In order with the queue's work. Wait before the host reads, and before it changes pinned memory."""
        within("copy", count, target, source)
        kinds = {(True, False): _TO_DEVICE, (False, True): _TO_HOST, (True, True): _ON_DEVICE, (False, False): _ON_HOST}
        kind = kinds[target.on_device, source.on_device]
        with self._here():
            self._cupy.cuda.runtime.memcpyAsync(target.address, source.address, count, kind, queue.stream.ptr)

    def create_queue(self) -> Queue:
        with self._here():
            return new_queue(self._cupy.cuda.Stream(non_blocking=True))

    def destroy_queue(self, queue: Queue) -> None:
        """Its work is done first; its graph goes with it."""
        queue.stream.synchronize()
        self._graphs.pop(queue.id, None)

    def synchronize(self, queue: Queue) -> None:
        queue.stream.synchronize()

    def unified_memory(self) -> bool:
        return self._caps.unified_memory

    def device_capability(self) -> tuple[int, int]:
        return self._caps.sm_major, self._caps.sm_minor

    def create_event(self) -> object:
        with self._here():
            return self._cupy.cuda.Event(disable_timing=True)

    def record_event(self, event: object, queue: Queue) -> None:
        event.record(queue.stream)

    def synchronize_event(self, event: object) -> None:
        self._refuse_in_capture("synchronize_event")
        event.synchronize()

    def query_event(self, event: object) -> bool:
        return event.done

    def queue_wait_event(self, queue: Queue, event: object) -> None:
        queue.stream.wait_event(event)

    def supports_aux_stream(self) -> bool:
        return True

    def supports_graph_capture(self) -> bool:
        return True

    def begin_capture(self, queue: Queue) -> None:
        if queue.id in self._capturing:
            raise DeviceError(f"queue {queue.id} is being captured already")
        queue.stream.begin_capture()
        self._capturing.add(queue.id)

    def end_capture_graph(self, queue: Queue) -> object:
        """What was recorded, as a graph of its own."""
        if queue.id not in self._capturing:
            raise DeviceError(f"queue {queue.id} is not being captured")
        self._capturing.discard(queue.id)
        return queue.stream.end_capture()

    def end_capture(self, queue: Queue) -> None:
        """Keep what was recorded as the queue's one graph, for `replay`."""
        self._graphs[queue.id] = self.end_capture_graph(queue)

    def replay(self, queue: Queue) -> None:
        if queue.id not in self._graphs:
            raise DeviceError(f"queue {queue.id} has no graph")
        self._graphs[queue.id].launch(queue.stream)

    def replay_graph(self, graph: object, queue: Queue) -> None:
        graph.launch(queue.stream)

    def destroy_graph(self, graph: object) -> None:
        """A graph goes with its last reference; work that it started must be done by then."""

    def _here(self):
        return self._cupy.cuda.Device(self._ordinal)

    def _refuse_in_capture(self, what: str) -> None:
        if self._capturing:
            raise DeviceError(f"{what} while queue {min(self._capturing)} is captured: do it before")
