"""The runtime of a real GPU against a CuPy that notes what it is asked: shared memory, captures, faults by name."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from vtlab.device import DeviceError, cupy_runtime, early
from vtlab.device.caps import device_caps
from vtlab.device.graphs import capture

from .test_dispatch_arch import FACTS


class Fault(Exception):
    """Stands for CUDARuntimeError."""


class Stream:
    def __init__(self, ptr: int):
        self.ptr, self.capturing, self.fault, self.launched = ptr, False, None, []

    def begin_capture(self):
        self.capturing = True

    def end_capture(self):
        self.capturing = False
        return SimpleNamespace(launch=self.launched.append)

    def synchronize(self):
        if self.fault:
            raise self.fault


@pytest.fixture
def fake(monkeypatch):
    """A CuPy with one H200, of which `stream` is current."""
    found = SimpleNamespace(stream=Stream(7), attributes=[], launches=[], allocator=None)

    @contextlib.contextmanager
    def using_allocator(allocator):
        found.allocator = allocator
        yield
        found.allocator = None

    found.cuda = SimpleNamespace(
        runtime=SimpleNamespace(
            CUDARuntimeError=Fault, getDevice=lambda: 0, getDeviceCount=lambda: 1,
            getDeviceProperties=lambda ordinal: FACTS, streamIsCapturing=lambda stream: found.stream.capturing,
        ),
        driver=SimpleNamespace(funcSetAttribute=lambda *given: found.attributes.append(given)),
        get_current_stream=lambda: found.stream, using_allocator=using_allocator,
        Stream=lambda: Stream(id(object())),
    )  # fmt: skip
    monkeypatch.setattr(cupy_runtime, "import_cupy", lambda: found)
    device_caps.cache_clear()
    yield found
    device_caps.cache_clear()


@pytest.fixture
def machine(fake):
    runtime = cupy_runtime.CupyRuntime()

    class Function:
        def __init__(self, ptr):
            self.ptr = ptr

        def __call__(self, grid, block, args, shared_mem):
            fake.launches.append((self.ptr, grid, block, tuple(args), shared_mem))

    functions = {"plain": Function(100), "greedy": Function(200), "soon_early": Function(300)}
    runtime._loader = SimpleNamespace(function=lambda family, kernel, device: functions[kernel])
    return runtime


def test_shared_memory_beyond_48_kib_is_asked_for_once(machine, fake):
    for shared in (0, 48 << 10, 60_000, 60_000, 50_000, 100_000):
        machine.launch("f", "greedy", 3, (32, 2), shared, [1])
    assert fake.attributes == [(200, 8, 60_000), (200, 8, 100_000)]
    assert fake.launches[0] == (200, (3,), (32, 2, 1), (1,), 0)
    with pytest.raises(DeviceError, match="greedy needs 232449 bytes of shared memory, a block of this GPU has 232448"):
        machine.launch("f", "greedy", 3, (32, 2), 232449, [1])
    assert len(fake.launches) == 6


def test_kernels_that_wait_by_themselves_are_started_early_where_the_driver_can(machine, fake, monkeypatch):
    started, status = [], 0

    def launch_ex(config, function, places, _):
        c = config._obj
        words = [ctypes.c_int64.from_address(place).value for place in places]
        attributes = [(c.attributes[i].id, c.attributes[i].value) for i in range(c.count)]
        started.append((function.value, tuple(c.grid), tuple(c.block), c.shared, c.stream, attributes, words))
        return status

    monkeypatch.setattr(early, "starter", lambda: launch_ex)
    machine.launch("f", "soon_early", 3, (32, 2), 64, [5, -1, 2**40])
    machine.launch("f", "plain", 3, (32, 2), 0, [1])
    assert started == [(300, (3, 1, 1), (32, 2, 1), 64, 7, [(6, 1)], [5, -1, 2**40])]
    assert [pointer for pointer, *_ in fake.launches] == [100]
    status = 1
    with pytest.raises(DeviceError, match="soon_early: cuLaunchKernelEx fails with error 1"):
        machine.launch("f", "soon_early", 1, (1, 1), 0, [])
    monkeypatch.setattr(early, "starter", lambda: None)
    machine.launch("f", "soon_early", 2, (32, 1), 0, [3])
    monkeypatch.setattr(early, "starter", lambda: launch_ex)
    monkeypatch.setattr(machine, "capability", lambda: (8, 9))
    machine.launch("f", "soon_early", 2, (32, 1), 0, [3])
    assert len(started) == 2 and fake.launches[1:] == [(300, (2,), (32, 1, 1), (3,), 0)] * 2


def test_structures_go_to_such_kernels_by_value(machine, monkeypatch):
    """As tensor maps do, between integers."""
    given = []

    def launch_ex(config, function, places, _):
        given.extend(ctypes.c_int64.from_address(places[i]).value for i in (0, 2, 3))
        given.append(ctypes.string_at(places[1], 128))
        return 0

    monkeypatch.setattr(early, "starter", lambda: launch_ex)
    maps = np.arange(128, dtype=np.uint8)
    machine.launch("f", "soon_early", 3, (32, 2), 64, [5, maps.view("V128")[0], -1, 2**40])
    assert given == [5, -1, 2**40, maps.tobytes()]


def test_memory_is_refused_while_a_capture_lasts_and_only_then(machine, fake):
    seen = []
    graph = capture(lambda: seen.append((fake.stream.capturing, fake.allocator)), machine)
    (capturing, allocator), *_ = seen
    with pytest.raises(DeviceError, match="64 bytes asked for during a capture"):
        allocator(64)
    assert capturing and fake.allocator is None and not fake.stream.capturing
    machine.replay(graph)
    assert fake.stream.launched == [fake.stream]


def test_an_error_in_a_capture_gives_stream_and_allocator_back(machine, fake):
    def broken():
        raise ValueError

    with pytest.raises(ValueError):
        capture(broken, machine)
    assert fake.allocator is None and not fake.stream.capturing
    fake.stream.ptr = 0
    with pytest.raises(DeviceError, match="default stream"):
        capture(lambda: None, machine)


def test_a_fault_names_the_kernels_started_last(machine, fake):
    fake.stream.fault = Fault("an illegal memory access")
    with pytest.raises(DeviceError, match="illegal memory access; the last kernels started: none"):
        machine.wait()
    for kernel in ("greedy", "plain", "plain"):
        machine.launch("f", kernel, 1, (1, 1), 0, [])
    with pytest.raises(DeviceError, match="started: greedy, plain, plain"):
        machine.wait()


def test_a_device_has_one_queue(machine):
    assert machine.queue() is machine.queue()
