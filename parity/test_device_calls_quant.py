"""Around the quantising kernels: strided and misaligned operands, scales of both layouts, every value, graphs."""

from __future__ import annotations

from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import fp4, quant_fp8
from vtlab.device.quant_fp8 import start_warps
from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import fma_f32

from .compare import assert_bytes
from .device_run import Emulated, tupled
from .scalar import draw
from .side_streams import side_stream
from .test_quant_fp8 import near_ties

F32 = np.float32
SCALE = F32([0.0321])


def compare(device, op, arguments, host=None):
    """The call against the mirror on `host`, or on the same arguments."""
    got = tupled(device.call(op, {k: device.send(v) if host is None else v for k, v in arguments.items()}))
    want = tupled(getattr(oracle, op).mirror(**(host or arguments)))
    for a, b in zip(got, want, strict=True):
        assert_bytes(np.ascontiguousarray(device.fetch(a)), np.ascontiguousarray(b), op)
    return got


CALLS = {
    "quant_fp8_static": {"scale": SCALE},
    "dynamic_scaled_fp8_quant": {},
    "dynamic_per_token_scaled_fp8_quant": {},
    "per_token_group_quant_fp8": {"group_size": 16},
    "scaled_fp4_quant": {"input_global_scale": F32([700])},
    "rms_norm_quant_fp8": {"scale": SCALE, "weight": draw((64,), "bfloat16", 1)},
    "rms_norm_dynamic_per_token_quant": {"weight": draw((64,), "bfloat16", 1)},
    "rms_norm_per_block_quant": {"weight": draw((64,), "bfloat16", 1), "group_size": 16},
}


@pytest.mark.parametrize("shift", [0, 1, 8])
@pytest.mark.parametrize("op", CALLS)
def test_slices_of_wider_rows(device, op, shift):
    wide = draw((6, 80), "bfloat16", 2)
    part = wide[:, shift : shift + 64]
    sent = {name: device.send(value) for name, value in CALLS[op].items()}
    compare(device, op, {"x": device.send(wide)[:, shift : shift + 64], **sent}, {"x": part.copy(), **CALLS[op]})
    if op.startswith("rms_norm"):
        more, host = {"residual": device.send(wide)[:, shift : shift + 64]}, {"residual": part.copy()}
        compare(device, op, {"x": device.send(part.copy()), **sent, **more}, {"x": part.copy(), **CALLS[op], **host})


@pytest.mark.parametrize("op", [*CALLS, "silu_and_mul_quant", "silu_and_mul_per_block_quant"])
def test_codes_at_any_address(device, op):
    """Results that eight-byte stores may not touch."""
    silu = op.startswith("silu")
    arguments = {"group_size": 16} if op == "silu_and_mul_per_block_quant" else CALLS.get(op, {"scale": SCALE})
    arguments = {"x": draw((3, 128 if silu else 64), "bfloat16", 3), **arguments}
    want = tupled(getattr(oracle, op).mirror(**arguments))
    raw = device.raw(want[0].size + 1)
    codes = raw[1:].view(want[0].dtype).reshape(want[0].shape)
    out = (codes, *(device.send(np.empty_like(w)) for w in want[1:]))
    sent = {name: device.send(value) for name, value in arguments.items()}
    device.call(op, sent | {"out": out if len(out) > 1 else codes})
    for got, expected in zip(out, want):
        assert_bytes(device.fetch(got), expected, op)


GROUPED = {
    "per_token_group_quant_fp8": {"x": draw((7, 64), "bfloat16", 4)},
    "rms_norm_per_block_quant": {"x": draw((7, 64), "bfloat16", 4), "weight": draw((64,), "bfloat16", 1)},
    "silu_and_mul_per_block_quant": {"x": draw((7, 128), "bfloat16", 4)},
}


@pytest.mark.parametrize("group_size", [16, 24])
@pytest.mark.parametrize("op", GROUPED)
def test_scales_of_both_layouts(device, op, group_size):
    """Column-major ones are asked for or given; a given array decides by its strides."""
    arguments = GROUPED[op] | {"group_size": group_size}
    codes, scale = getattr(oracle, op).mirror(**arguments)
    fresh = compare(device, op, arguments | {"column_major": True})[1]
    assert fresh.strides == (4, 28)
    sent = {name: device.send(value) for name, value in arguments.items()}
    for column_major in (False, True):
        plain, turned = device.send(np.zeros_like(scale)), device.send(np.zeros(scale.shape[::-1], F32)).T
        for given in (plain, turned):
            out = (device.send(np.zeros_like(codes)), given)
            device.call(op, sent | {"column_major": column_major, "out": out})
            assert_bytes(device.fetch(out[0]), codes)
            assert_bytes(np.ascontiguousarray(device.fetch(given)), scale)


@pytest.mark.parametrize("op", GROUPED)
def test_scales_of_another_form_are_refused(device, op):
    arguments = {name: device.send(value) for name, value in (GROUPED[op] | {"group_size": 16}).items()}
    codes = device.send(np.zeros((7, 64), np.uint8))
    strided = device.send(np.zeros((14, 4), F32))[::2]
    for scale in (device.send(np.zeros((4, 7), F32)), strided, device.send(np.zeros((7, 4)))):
        with pytest.raises(ContractError, match=r"\(out\): got"):
            device.call(op, arguments | {"out": (codes, scale)})
    with pytest.raises(ContractError, match="1 arrays, want 2"):
        device.call(op, arguments | {"out": codes})


@pytest.mark.parametrize("scale", [1.0, 0.0321])
def test_every_bfloat16_and_what_lies_between_two_codes(device, scale):
    """The hardware's conversion, where there is one, against the definition."""
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(64, 1024)
    ties = np.concatenate([near_ties(scale), -near_ties(scale)])
    for x in (every, ties):
        for rounding in ("vt", "vllm"):
            compare(device, "quant_fp8_static", {"x": x, "scale": F32([scale]), "rounding": rounding})


@pytest.mark.parametrize("largest", [448.0 * 0.0321, 448.0 * 1.9, 3.0, 7.0, 100.0])
def test_divisions_decide_where_products_might_err(device, largest):
    ties = near_ties(float(F32(largest) / F32(448)))
    row = np.append(ties[ties < largest], F32(largest))
    row = np.concatenate([row, np.zeros(-len(row) % 8, F32)])
    compare(device, "dynamic_per_token_scaled_fp8_quant", {"x": row})
    compare(
        device, "per_token_group_quant_fp8", {"x": np.append(row, np.zeros(512 - len(row), F32)), "group_size": 256}
    )
    for rounding in ("vllm", "vllm_native"):
        compare(device, "dynamic_per_token_scaled_fp8_quant", {"x": row, "rounding": rounding})


def corrected(x, scale):
    """fp8_scales.cuh: a product with the reciprocal and one step of correction."""
    inverse = F32(1) / scale
    near = x * inverse
    return fma_f32(-fma_f32(near, scale, -x), inverse, near)


def test_a_product_and_a_correction_are_the_quotient():
    """Wherever a quotient of float32 might be on the wrong side of halfway between two codes; and all sizes by 448."""
    eighths, off = np.arange(8, 16)[:, None, None, None] << 20, np.arange(-8, 9)[:, None, None]
    scale = np.maximum(eighths + off, 1 << 23)
    product = scale * np.arange(16, 32)[:, None]  # halfway between codes stand 16 ... 31, times a power of two
    spare = np.floor(np.log2(product)).astype(np.int64) - 23
    x, scale = np.broadcast_arrays(F32((product >> spare) + np.arange(-9, 10)), F32(scale))
    assert_bytes(corrected(x, scale), x / scale)
    sizes = np.arange(1 << 23, 1 << 24, dtype=np.int32).astype(F32)
    assert_bytes(corrected(sizes, np.full_like(sizes, 448)), sizes / F32(448))


def in_two_parts(x, scale):
    """bf16_quotients.cuh: a product with the reciprocal in two parts."""
    inverse = F32(1) / scale
    inverse = np.where(fma_f32(-inverse, scale, F32(1)) < 0, np.nextafter(inverse, F32(0)), inverse)
    return fma_f32(x, inverse, x * np.maximum(fma_f32(-inverse, scale, F32(1)) * inverse, F32(2.0**-140)))


def test_a_reciprocal_in_two_parts_decides_all_codes_of_bfloat16():
    """Wherever a quotient of eight bits might be on the wrong side of halfway; and all under all scales they make."""
    scale = np.maximum((np.arange(8, 16)[:, None, None] << 20) + np.arange(-16, 17)[:, None], 1 << 23)
    product = scale * np.arange(16, 32)
    unit = 2 ** (np.floor(np.log2(product)).astype(np.int64) - 7)
    x, scale = F32((product + unit // 2) // unit * unit), F32(np.broadcast_to(scale, product.shape))
    near = np.abs(x / np.float64(product) - 1) < 2.0**-21
    assert near.sum() > 100
    assert_bytes(in_two_parts(x, scale)[near], (x / scale)[near])
    mantissas = F32(np.arange(128, 256))
    scale = np.broadcast_to((mantissas / F32(448))[:, None, None], (128, 128, 24))
    x = mantissas[:, None] * np.exp2(-np.arange(24)).astype(F32)
    x = np.broadcast_to(x, scale.shape)
    codes = [np.minimum(q, F32(448)).astype(ml_dtypes.float8_e4m3fn) for q in (in_two_parts(x, scale), x / scale)]
    assert_bytes(*codes)


def test_more_groups_than_32_bits_count_are_refused():
    for rows, width, group_size in ((2**31, 4, 2), (1, 2**32, 128)):
        with pytest.raises(ContractError, match="groups and rows under"):
            start_warps("per_token_group_quant_fp8", "quant_fp8", "group_any", rows, width, group_size, [])


def test_more_elements_than_all_threads_take_at_once(device):
    compare(device, "dynamic_scaled_fp8_quant", {"x": draw((80_000, 7), "float32", 5)})


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_blocks_keep_a_tensor(device, blocks, kind):
    """Its largest element in registers, in shared memory, and where it is read again; the last share is not whole."""
    x = draw((413, 1000), kind, 7)
    for place in (5, x.size // 2 + 3, x.size - 9):
        x.reshape(-1)[place] = -9 - place / x.size
        with mock.patch.object(quant_fp8, "MULTIPROCESSORS", blocks):
            compare(device, "dynamic_scaled_fp8_quant", {"x": x})


def test_tensors_on_two_streams_at_once(device):
    """A block may have to wait for its place until the other tensor's are done, and these for its share."""
    if isinstance(device, Emulated):
        pytest.skip("streams need a GPU: --device cuda")
    cupy, found = device.cupy, []
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    hosts = [draw((1000, 5120), "bfloat16", seed) for seed in (8, 9)]
    inputs = [device.send(host) for host in hosts]
    cupy.cuda.Device().synchronize()
    for _ in range(40):
        for stream, x in zip(streams, inputs):
            with stream:
                found.append(device.call("dynamic_scaled_fp8_quant", {"x": x}))
    cupy.cuda.Device().synchronize()
    wants = [oracle.dynamic_scaled_fp8_quant.mirror(host) for host in hosts]
    for n, results in enumerate(found):
        for got, want in zip(results, wants[n % 2], strict=True):
            assert_bytes(device.fetch(got), want, f"call {n}")


@pytest.mark.parametrize("tiles", [False, True])
def test_blocks_of_fp4_take_turns(device, tiles):
    """One block of threads for all blocks of sixteen."""
    x, scale = draw((260, 2064), "bfloat16", 6), F32([300])
    arguments = {"x": x, "input_global_scale": scale, "is_sf_swizzled_layout": tiles}
    with mock.patch.object(fp4, "MULTIPROCESSORS", 1), mock.patch.object(fp4, "_RESIDENT", 1):
        compare(device, "scaled_fp4_quant", arguments)


def test_a_captured_graph_quantises_new_inputs(device):
    if isinstance(device, Emulated):
        pytest.skip("graphs need a GPU: --device cuda")
    cupy = device.cupy
    inputs = [draw((64, 512), "bfloat16", seed) for seed in range(3)]
    weight = draw((512,), "bfloat16", 9)
    x, w, scale = device.send(inputs[0]), device.send(weight), device.send(SCALE)
    calls = {
        "dynamic_scaled_fp8_quant": {"x": x}, "per_token_group_quant_fp8": {"x": x},
        "rms_norm_dynamic_per_token_quant": {"x": x, "weight": w}, "silu_and_mul_quant": {"x": x, "scale": scale},
        "rms_norm_gated_quant_fp8": {"x": x, "gate": x, "weight": w, "scale": scale},
    }  # fmt: skip
    outs = {op: device.call(op, dict(arguments)) for op, arguments in calls.items()}
    stream = side_stream(cupy)

    def step():
        for op, arguments in calls.items():
            device.call(op, arguments | {"out": outs[op]})

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
                for got, want in zip(tupled(outs[op]), tupled(getattr(oracle, op).mirror(**values))):
                    assert_bytes(device.fetch(got), want, op)
