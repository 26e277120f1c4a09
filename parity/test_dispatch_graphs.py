"""Graphs: calls replayed on the same arrays, made anew for others, and never of what would go wrong later."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from vtlab import ops, oracle
from vtlab.device import DeviceError, runtime
from vtlab.device.graphs import GraphCache, capture
from vtlab.device.scratch import scratch
from vtlab.ops import arrays
from vtlab.ops.errors import ContractError

from .emulated_arrays import emulated_arrays
from .emulation import compiler


@pytest.fixture
def device(request):
    """Arrays of the GPU or of the emulated one, inside their queue."""
    if request.config.getoption("--device") == "cuda":
        there = arrays.on("cuda")
        with there.queue():
            yield there
        return
    if compiler() is None:
        pytest.skip("emulation needs a C++ compiler")
    with emulated_arrays() as (there, _):
        yield there


def values(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Norm:
    """x -> silu_and_mul(rms_norm(x)) into arrays of its own."""

    def __init__(self, device, rows: int = 3):
        self.device, self.calls = device, 0
        self.x, self.weight = device.send(values(0, rows, 16)), device.send(values(1, 16))
        self.normed, self.out = device.empty((rows, 16), np.float32), device.empty((rows, 8), np.float32)

    def __call__(self):
        self.calls += 1
        ops.rms_norm(self.x, self.weight, out=self.normed)
        ops.silu_and_mul(self.normed, out=self.out)

    @property
    def arrays(self):
        return [self.x, self.out]

    def right(self) -> bool:
        x, weight = self.device.fetch(self.x), self.device.fetch(self.weight)
        want = oracle.silu_and_mul.mirror(oracle.rms_norm.mirror(x, weight))
        return self.device.fetch(self.out).tobytes() == want.tobytes()


def refill(device, array, seed: int) -> None:
    staging = device.staging(array.nbytes)
    staging[...] = values(seed, *array.shape).view(np.uint8).reshape(-1)
    device.upload(staging, array.reshape(-1).view(np.uint8))
    device.fetch(array)


def test_a_replay_computes_again_on_new_inputs(device):
    cache, norm = GraphCache(), Norm(device)
    for step in range(4):
        refill(device, norm.x, 10 + step)
        cache.run("norm", norm, norm.arrays)
        assert norm.right()
    assert (cache.captures, cache.replays, norm.calls, len(cache)) == (1, 3, 2, 1)


def test_other_arrays_keys_and_shapes_make_other_graphs(device):
    cache, one, two = GraphCache(), Norm(device), Norm(device)
    for norm in (one, two, one, two):
        cache.run("norm", norm, norm.arrays)
        assert norm.right()
    assert (cache.captures, cache.replays) == (2, 2)
    cache.run("another", one, one.arrays)
    cache.run("norm", one, [*one.arrays, None])
    cache.run("norm", one, [one.x[:2], one.out])
    cache.run("norm", one, [one.x.view(np.int32), one.out])
    assert cache.captures == 6


def test_a_graph_keeps_its_arrays(device):
    """So that new ones cannot come to stand at their address and be taken for them."""
    cache = GraphCache()
    for seed in range(5):
        norm = Norm(device)
        refill(device, norm.x, seed)
        cache.run("norm", norm, norm.arrays)
        assert norm.right()
    assert cache.captures == 5
    only_named = device.send(values(9, 4))
    seen = weakref.ref(only_named)
    cache.run("norm", norm, [only_named])
    del only_named
    gc.collect()
    assert seen() is not None
    cache.invalidate()
    gc.collect()
    assert seen() is None


def test_the_graph_used_longest_ago_goes_first(device):
    cache, norms = GraphCache(capacity=2), [Norm(device) for _ in range(3)]
    for index in (0, 1, 0, 2, 0, 1):
        cache.run("norm", norms[index], norms[index].arrays)
        assert norms[index].right()
    assert (cache.captures, cache.replays, len(cache)) == (4, 2, 2)


def test_invalidated_graphs_are_made_anew(device):
    cache, norm = GraphCache(), Norm(device)
    for key in ("a", "b"):
        cache.run(key, norm, norm.arrays)
    norm.weight = device.send(values(5, 16))
    assert cache.invalidate("a") == 1 and len(cache) == 1
    cache.run("a", norm, norm.arrays)
    assert norm.right() and cache.captures == 3
    assert cache.invalidate() == 2 and cache.invalidate() == 0 and len(cache) == 0


def test_an_error_ends_the_capture_and_keeps_nothing(device):
    cache, norm = GraphCache(), Norm(device)

    def broken():
        norm()
        if norm.calls == 2:
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        cache.run("broken", broken, norm.arrays)
    assert len(cache) == 0 and not runtime.current().capturing()
    cache.run("norm", norm, norm.arrays)
    refill(device, norm.x, 3)
    cache.run("norm", norm, norm.arrays)
    assert norm.right()


def test_memory_asked_for_during_a_capture_is_refused(device):
    norm = Norm(device)
    with pytest.raises(DeviceError, match="asked for during a capture"):
        capture(lambda: ops.rms_norm(norm.x, norm.weight))
    with pytest.raises(DeviceError, match="call the op once before"):
        capture(lambda: scratch.take("never seen before", 1 << 20))
    assert not runtime.current().capturing()
    norm()
    assert norm.right()


def test_captures_do_not_nest_and_end_once(device):
    machine = runtime.current()
    with pytest.raises(DeviceError, match="under way"):
        capture(lambda: capture(lambda: None))
    assert not machine.capturing()
    with pytest.raises(DeviceError, match="no capture"):
        machine.end_capture()


def test_what_is_captured_does_not_run_before_the_replay(device):
    norm = Norm(device)
    norm()
    before = device.fetch(norm.out).tobytes()
    refill(device, norm.x, 8)
    graph = capture(norm)
    assert device.fetch(norm.out).tobytes() == before
    runtime.current().replay(graph)
    assert norm.right()


def test_scratch_that_a_graph_uses_outlives_its_growth(device):
    """Retired, not freed: the graph goes on writing to it."""
    machine = runtime.current()
    first = scratch.take("outgrown", 300)
    graph = capture(lambda: scratch.take("outgrown", 200))
    second = scratch.take("outgrown", 10_000)
    assert machine.pointer(first) != machine.pointer(second)
    assert any(block is first for block in scratch._retired)
    machine.replay(graph)


def test_the_default_stream_is_not_captured(request):
    if request.config.getoption("--device") != "cuda":
        pytest.skip("streams need a GPU: --device cuda")
    with pytest.raises(DeviceError, match="default stream"):
        capture(lambda: None)


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True])
def test_impossible_capacities_are_refused(capacity):
    with pytest.raises(ContractError, match="capacity"):
        GraphCache(capacity)


def test_zeros_are_zeros_and_what_is_sent_comes_back(device):
    import ml_dtypes

    assert not device.fetch(device.zeros((3, 5), ml_dtypes.bfloat16)).view(np.uint16).any()
    for dtype in (np.float32, ml_dtypes.bfloat16, np.int64, np.int8):
        host = np.arange(33).astype(dtype).reshape(3, 11)
        got = device.fetch(device.send(host))
        assert (got.dtype, got.shape, got.tobytes()) == (host.dtype, host.shape, host.tobytes())
