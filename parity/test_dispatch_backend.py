"""Backends: memory, queues, events and capture, on the CPU and with ``--device cuda`` on the GPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from vtlab.device import DeviceError
from vtlab.device.backend import ALIGNMENT, HostBackend
from vtlab.ops.errors import ContractError


@pytest.fixture(params=["host", "cuda"])
def backend(request):
    if request.param == "host":
        return HostBackend()
    if request.config.getoption("--device") != "cuda":
        pytest.skip("--device cuda")
    from vtlab.device.cupy_backend import CudaBackend

    return CudaBackend()


def write(block, data: bytes) -> None:
    ctypes.memmove(block.address, data, len(data))


def read(block) -> bytes:
    return ctypes.string_at(block.address, block.size)


@pytest.mark.parametrize("size", [1, 2, 3, 31, 64, 1000, 4099, 1 << 20])
def test_bytes_go_there_and_come_back(backend, size):
    data = np.random.default_rng(size).bytes(size)
    queue, up, down = backend.create_queue(), backend.alloc_pinned(size), backend.alloc_pinned(size)
    there, again = backend.alloc(size), backend.alloc(size)
    assert there.address % ALIGNMENT == 0
    write(up, data)
    backend.copy(there, up, size, queue)
    backend.copy(again, there, size, queue)
    backend.copy(down, again, size, queue)
    backend.synchronize(queue)
    assert read(down) == data
    backend.memset(again, 7, size // 2, queue)
    backend.copy(down, again, size, queue)
    backend.synchronize(queue)
    assert read(down) == b"\7" * (size // 2) + data[size // 2 :]


def test_no_bytes_and_too_many(backend):
    queue, none, some = backend.create_queue(), backend.alloc(0), backend.alloc(8)
    assert none.address and none.size == 0
    backend.memset(none, 1, 0, queue)
    backend.copy(some, none, 0, queue)
    backend.free(None)
    backend.free(some)
    backend.free_pinned(backend.alloc_pinned(4))
    for wrong in (-1, 9):
        with pytest.raises(ContractError, match="count"):
            backend.memset(some, 0, wrong, queue)
        with pytest.raises(ContractError, match="count"):
            backend.copy(some, none, wrong, queue)
    backend.synchronize(queue)


def test_queues_never_share_a_number(backend):
    ids = []
    for _ in range(3):
        queue = backend.create_queue()
        ids.append(queue.id)
        backend.destroy_queue(queue)
    assert ids == sorted(set(ids))


def test_events_order_two_queues(backend):
    one, two, event = backend.create_queue(), backend.create_queue(), backend.create_event()
    size = 1 << 22
    block, down = backend.alloc(size), backend.alloc_pinned(size)
    for byte in range(3):
        backend.memset(block, byte, size, one)
        backend.record_event(event, one)
        backend.queue_wait_event(two, event)
        backend.copy(down, block, size, two)
        backend.synchronize(two)
        assert set(read(down)) == {byte}
    backend.synchronize_event(event)
    assert backend.query_event(event)


def test_the_host_is_synchronous_and_has_no_capability():
    host = HostBackend()
    assert host.unified_memory() and host.device_capability() == (0, 0)
    assert not host.supports_graph_capture() and not host.supports_aux_stream()
    with pytest.raises(DeviceError, match="cannot be captured"):
        host.begin_capture(host.create_queue())
    with pytest.raises(ContractError, match="size"):
        host.alloc(-1)


@pytest.fixture
def cuda(request):
    if request.config.getoption("--device") != "cuda":
        pytest.skip("--device cuda")
    from vtlab.device.cupy_backend import CudaBackend

    return CudaBackend()


def test_what_a_gpu_says_of_itself(cuda):
    import cupy

    facts = cupy.cuda.runtime.getDeviceProperties(0)
    assert cuda.device_capability() == (facts["major"], facts["minor"])
    assert cuda.unified_memory() == bool(facts["integrated"])
    assert cuda.supports_graph_capture() and cuda.supports_aux_stream()
    from vtlab.device.cupy_backend import CudaBackend

    with pytest.raises(ContractError, match="ordinal"):
        CudaBackend(cupy.cuda.runtime.getDeviceCount())


def test_a_replay_runs_again_on_what_is_there_then(cuda):
    queue, up, there, down = cuda.create_queue(), cuda.alloc_pinned(64), cuda.alloc(64), cuda.alloc_pinned(64)
    write(up, bytes(64))
    write(down, b"\xff" * 64)
    cuda.begin_capture(queue)
    cuda.copy(there, up, 64, queue)
    cuda.copy(down, there, 64, queue)
    with pytest.raises(DeviceError, match="captured already"):
        cuda.begin_capture(queue)
    for refused in (lambda: cuda.alloc(8), lambda: cuda.free(up), lambda: cuda.synchronize_event(None)):
        with pytest.raises(DeviceError, match="do it before"):
            refused()
    cuda.end_capture(queue)
    cuda.synchronize(queue)
    assert read(down) == b"\xff" * 64
    for byte in range(3):
        write(up, bytes([byte]) * 64)
        cuda.replay(queue)
        cuda.synchronize(queue)
        assert read(down) == bytes([byte]) * 64


def test_graphs_by_handle_and_their_misuse(cuda):
    queue, block, down = cuda.create_queue(), cuda.alloc(16), cuda.alloc_pinned(16)
    for misuse in (cuda.end_capture, cuda.end_capture_graph, cuda.replay):
        with pytest.raises(DeviceError):
            misuse(queue)
    graphs = []
    for byte in (1, 2):
        cuda.begin_capture(queue)
        cuda.memset(block, byte, 16, queue)
        graphs.append(cuda.end_capture_graph(queue))
    for index in (1, 0, 1):
        cuda.replay_graph(graphs[index], queue)
        cuda.copy(down, block, 16, queue)
        cuda.synchronize(queue)
        assert set(read(down)) == {index + 1}
    cuda.destroy_graph(graphs.pop())
    cuda.destroy_queue(queue)
