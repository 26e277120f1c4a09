"""What surrounds a kernel: refusals, strided and misaligned operands, `out=`, graphs; emulated, or on the GPU."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import DeviceError, runtime
from vtlab.device.launch import as_rows, results, start, vectors
from vtlab.device.scratch import Scratch
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .device_run import Emulated
from .emulation import EmulatedRuntime
from .scalar import draw
from .side_streams import side_stream


@pytest.fixture
def emulated():
    with runtime.using(EmulatedRuntime()) as chosen:
        yield chosen


@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("gap", [0, 1, 8])
def test_strided_and_misaligned_rows(device, shift, gap):
    """Slices of a wider projection, at every alignment, give the bytes of their contiguous copies."""
    wide = draw((6, 64 + shift + gap), "bfloat16", 1)
    weight = draw((64,), "bfloat16", 2)
    part = device.send(wide)[:, shift : shift + 64]
    got = device.call("rms_norm", {"x": part, "weight": device.send(weight)})
    assert_bytes(device.fetch(got), oracle.rms_norm.mirror(wide[:, shift : shift + 64].copy(), weight))
    halves = device.call("qkv_split", {"qkv": part, "q_size": 32, "k_size": 16, "v_size": 16})
    for got, want in zip(halves, np.split(wide[:, shift : shift + 64], [32, 48], axis=1)):
        assert_bytes(device.fetch(got), np.ascontiguousarray(want))


def test_rows_that_do_not_step_evenly(device):
    """x[T, head, D] cut from a wider tensor on two axes: no single stride between rows."""
    whole = draw((3, 5, 24), "float32", 3)
    got = device.call("l2norm", {"x": device.send(whole)[:, :2, :16]})
    assert_bytes(device.fetch(got), oracle.l2norm.mirror(whole[:, :2, :16]))


@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul"])
def test_every_gate_where_there_are_few(device, op):
    """Every finite bfloat16 as a gate in calls that are small: an element a thread."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    for gate in np.array_split(codes[(codes & 0x7FFF) < 0x7F80].view(ml_dtypes.bfloat16), 4):
        x = np.concatenate([gate, np.full(gate.size, 0.7109375, gate.dtype)])[None]
        for rounding in ("vt", "vllm"):
            got = device.call(op, {"x": device.send(x), "rounding": rounding})
            assert_bytes(device.fetch(got), getattr(oracle, op).mirror(x, rounding=rounding))


@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1])
def test_embedding_names_the_first_bad_id(device, kind, bad):
    table, ids = draw((50, 16), "bfloat16", 4), np.array([3, 49, bad, 7, bad], kind)
    send = {"table": device.send(table), "ids": device.send(ids)}
    with pytest.raises(ContractError, match=f"id {bad} at position 2, want 0 <= id < V = 50"):
        if isinstance(device, Emulated):  # the door sees host arrays and would refuse them itself
            with runtime.using(device.runtime):
                from vtlab.device.elementwise import embedding

                embedding(**send)
        else:
            device.call("embedding", send)


def test_embedding_into_out_makes_rows_of_nan_of_bad_ids(device):
    table, ids = draw((50, 16), "bfloat16", 4), np.array([3, 50, 7], "int32")
    out = device.send(np.zeros((3, 16), ml_dtypes.bfloat16))
    if isinstance(device, Emulated):
        with runtime.using(device.runtime):
            from vtlab.device.elementwise import embedding

            embedding(device.send(table), device.send(ids), out=out)
    else:
        device.call("embedding", {"table": device.send(table), "ids": device.send(ids), "out": out})
    filled = device.fetch(out)
    assert np.isnan(filled[1].astype(np.float32)).all()
    assert_bytes(filled[[0, 2]], table[[3, 7]])


def test_out_of_another_form_is_refused(device):
    x = device.send(draw((4, 16), "bfloat16", 5))
    strided = device.send(np.zeros((8, 16), ml_dtypes.bfloat16))[::2]
    for sent in (device.send(np.zeros((4, 8))), device.send(np.zeros((4, 16), np.float32)), strided):
        with pytest.raises(ContractError, match=r"relu\(out\): got"):
            device.call("relu", {"x": x, "out": sent})
    with pytest.raises(ContractError, match="memory shared with another"):
        device.call("relu", {"x": x, "out": x})
    with pytest.raises(ContractError, match="2 arrays, want 1"):
        device.call("relu", {"x": x, "out": (x, x)})


def test_an_array_of_another_device_is_refused(emulated):
    class Elsewhere(np.ndarray):
        place = 1

    x = np.zeros((2, 8), np.float32).view(Elsewhere)
    with pytest.raises(ContractError, match="an array on device 1, want the current device, 0"):
        results("relu", None, (x,), (x.shape, x.dtype))


class Huge:
    """An array in name only, with strides no memory has."""

    def __init__(self, shape, strides, dtype=np.float32):
        self.shape, self.strides, self.dtype = shape, strides, np.dtype(dtype)
        self.flags = np.zeros((2, 2))[:, :1].flags


def test_offsets_are_64_bits_wide_and_refused_beyond():
    array = Huge((3, 4), (2**40, 4))
    assert as_rows("relu", "x", array) == (array, 3, 2**38)
    with pytest.raises(ContractError, match=r"less than 2\*\*63"):
        as_rows("relu", "x", Huge((4, 4), (2**62, 4)))


def test_more_blocks_than_a_grid_holds_are_refused(emulated):
    with pytest.raises(ContractError, match="4294967296 blocks of work"):
        start("relu", "activation", "relu_v1", 2**32, (256, 1), [])


def test_vectors_ask_for_width_address_and_stride(emulated):
    x = emulated_array(64)
    assert vectors(64, (x, 64)) and vectors(64, (None, 3)) and not vectors(60, (x, 64))
    assert not vectors(32, (x[1:33], 32)) and not vectors(32, (x, 33))


def emulated_array(size: int) -> np.ndarray:
    return EmulatedRuntime().empty((size,), np.float32)


def test_scratch_grows_and_never_during_a_capture():
    machine, scratch = EmulatedRuntime(), Scratch()
    first = scratch.take("a", 300, machine)
    assert scratch.take("a", 200, machine) is first and scratch.take("b", 200, machine) is not first
    machine.in_capture = True
    assert scratch.take("a", 300, machine) is first
    with pytest.raises(DeviceError, match="'a' needs 301 bytes"):
        scratch.take("a", 301, machine)
    machine.in_capture = False
    assert scratch.take("a", 301, machine) is not first
    assert any(block is first for block in scratch._retired)


def test_a_captured_graph_computes_again_on_new_inputs(device):
    if isinstance(device, Emulated):
        pytest.skip("graphs need a GPU: --device cuda")
    cupy = device.cupy
    inputs = [draw((64, 128), "bfloat16", seed) for seed in range(4)]
    x, weight = device.send(inputs[0]), device.send(draw((128,), "bfloat16", 9))
    normed, out = cupy.empty_like(x), cupy.empty((64, 64), x.dtype)
    stream = side_stream(cupy)

    def step():
        device.call("rms_norm", {"x": x, "weight": weight, "out": normed})
        device.call("silu_and_mul", {"x": normed, "out": out})

    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for host in inputs[1:]:
            x[...] = device.send(host)
            graph.launch(stream)
            stream.synchronize()
            want = oracle.silu_and_mul.mirror(oracle.rms_norm.mirror(host, device.fetch(weight)))
            assert_bytes(device.fetch(out), want)


def test_the_first_array_on_a_gpu_brings_the_tier_in():
    """`vtlab.ops` knows no device tier until arrays come; without CuPy the kernel says what is missing."""
    code = """import sys; sys.modules["cupy"] = None
import numpy
from vtlab import ops
class Elsewhere(numpy.ndarray): pass
Elsewhere.__module__ = "cupy._core"
print("vtlab.device" in sys.modules)
ops.relu(numpy.ones(4, "f4"))
try: ops.relu(numpy.ones(4, "f4").view(Elsewhere))
except RuntimeError as error: print(type(error).__name__, error)"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, error = run.stdout.splitlines()
    assert before == "False" and error.startswith("DeviceError CuPy is not installed")
