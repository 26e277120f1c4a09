"""Around the FP4 kernels: addresses, results that are refused, more blocks than are counted, every step, graphs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab import ops, oracle
from vtlab.device import fp4 as launchers
from vtlab.device import runtime
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .device_run import Emulated, tupled
from .scalar import draw
from .side_streams import side_stream

F32 = np.float32
G = F32([448 * 6 / 4.1])
X = draw((5, 96), "bfloat16", 1)
PACKED, TILES = oracle.scaled_fp4_quant(X, G)


def same(device, op, arguments, out=None):
    """The call gives the mirror's bytes."""
    want = tupled(getattr(oracle, op).mirror(**arguments))
    sent = {name: device.send(value) for name, value in arguments.items()}
    got = tupled(device.call(op, sent if out is None else sent | {"out": out}))
    for one, expected in zip(got, want, strict=True):
        assert_bytes(device.fetch(one), expected, op)


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("shift", [0, 2, 4])
def test_values_at_any_address(device, shift, kind):
    """Results that 16-byte stores may not touch, codes that four-byte loads may not."""
    size = np.dtype(getattr(ml_dtypes, kind, kind)).itemsize * X.size
    if size != 2 * X.size and shift == 2:
        pytest.skip("a float32 stands at a multiple of 4")
    out = device.raw(size + shift)[shift:].view(getattr(ml_dtypes, kind, kind)).reshape(X.shape)
    codes = device.raw(PACKED.size + shift)[shift:].reshape(PACKED.shape)
    codes[...] = device.send(PACKED)
    want = oracle.dequantize_nvfp4.mirror(PACKED, TILES, 1 / G, out_dtype=kind)
    arguments = {"packed": codes, "scale": device.send(TILES), "global_scale": device.send(1 / G), "out_dtype": kind}
    device.call("dequantize_nvfp4", arguments | {"out": out})
    assert_bytes(device.fetch(out), want)


@pytest.mark.parametrize("op", ["scaled_fp4_quant", "swizzle_blockscale"])
def test_tiles_at_an_odd_address_are_refused(op, device):
    tiles = device.raw(TILES.size + 1)[1:].reshape(TILES.shape)
    if op == "scaled_fp4_quant":
        arguments = {"x": X, "input_global_scale": G}
        out = (device.raw(PACKED.size).reshape(PACKED.shape), tiles)
    else:
        arguments, out = {"scale": np.zeros((5, 6), np.uint8)}, tiles
    with pytest.raises(ContractError, match=rf"{op}\(out\): got tiles at an odd address"):
        device.call(op, {name: device.send(value) for name, value in arguments.items()} | {"out": out})


def test_results_of_another_form_are_refused(device):
    sent = {"x": device.send(X), "input_global_scale": device.send(G)}
    codes, rows = device.raw(PACKED.size).reshape(PACKED.shape), device.raw(30).reshape(5, 6)
    for out in (codes, (codes, rows), (rows, device.send(TILES))):
        with pytest.raises(ContractError, match=r"scaled_fp4_quant\(out\): got"):
            device.call("scaled_fp4_quant", sent | {"out": out})
    device.call("scaled_fp4_quant", sent | {"out": (codes, rows), "is_sf_swizzled_layout": False})
    assert_bytes(device.fetch(rows), oracle.scaled_fp4_quant(X, G, is_sf_swizzled_layout=False)[1])


def test_more_blocks_than_31_bits_count_are_refused(device):
    class Wide:
        shape, strides, dtype, size = (2**16, 2**19), (2**20, 2), np.dtype(ml_dtypes.bfloat16), 2**35
        flags, place, nbytes = type("", (), {"c_contiguous": True}), 0, 2**36
        ctypes = type("", (), {"data": 0})
        device = None

    if not isinstance(device, Emulated):
        pytest.skip("64 GiB")
    host = runtime.using(device.runtime)
    with host, pytest.MonkeyPatch.context() as patch, pytest.raises(ContractError, match="blocks of 16, want under 2"):
        patch.setattr(launchers, "results", lambda *_: (None, None))
        launchers.scaled_fp4_quant(Wide, device.send(G))


@pytest.mark.parametrize("g", [1.0, 0.37, -2.5])
def test_every_bfloat16(device, g):
    """The kernel's sums and saturated products against the definition, for all values beside a largest one."""
    every = np.arange(1 << 16, dtype=np.uint16)
    every[(every & 0x7FFF) > 0x7F80] |= 0x40  # a host's fmaxf does not pass over a signalling NaN
    every = every.view(ml_dtypes.bfloat16).reshape(-1, 8)
    x = np.concatenate([every, np.full_like(every, 6)], axis=1).reshape(64, -1)
    same(device, "scaled_fp4_quant", {"x": x, "input_global_scale": F32([g])})
    small = np.where(np.abs(x.astype(F32)) <= 6, x, 6).astype(x.dtype)
    for rounding in ("vt", "vllm_native"):
        same(device, "scaled_fp4_quant", {"x": small, "input_global_scale": F32([g]), "rounding": rounding})


def test_a_captured_graph_quantises_new_inputs(device):
    if isinstance(device, Emulated):
        pytest.skip("graphs need a GPU: --device cuda")
    cupy = device.cupy
    inputs = [draw((130, 512), "bfloat16", seed) for seed in range(3)]
    x, g = device.send(inputs[0]), device.send(G)
    calls = {
        "scaled_fp4_quant": {"x": x, "input_global_scale": g},
        "silu_and_mul_fp4_quant": {"x": x, "input_global_scale": g},
    }
    outs = {op: getattr(ops, op)(**arguments) for op, arguments in calls.items()}
    stream = side_stream(cupy)

    def step():
        for op, arguments in calls.items():
            getattr(ops, op)(**arguments, out=outs[op])

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
            for op, arguments in calls.items():
                values = {name: device.fetch(value) for name, value in arguments.items()}
                for got, want in zip(outs[op], getattr(oracle, op).mirror(**values)):
                    assert_bytes(device.fetch(got), want, op)
