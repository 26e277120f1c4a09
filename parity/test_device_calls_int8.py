"""Around the int8 quantisers' kernels and FP8 under given scales: any address, every value, ties, shards."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle

from .compare import assert_bytes
from .device_run import tupled
from .scalar import draw
from .test_device_calls_quant import compare, corrected

F32 = np.float32
SCALE = F32([0.0321])
CALLS = {
    "static_scaled_int8_quant": {"scale": SCALE},
    "dynamic_scaled_int8_quant": {"symmetric": False},
    "per_token_group_quant_int8": {"group_size": 16},
    "scaled_fp8_quant_static_group": {"scale": np.linspace(0.02, 0.03, 8, dtype=F32).reshape(2, 4)},
}


@pytest.mark.parametrize("shift", [0, 1, 8])
@pytest.mark.parametrize("op", CALLS)
def test_slices_of_wider_rows(device, op, shift):
    wide = draw((6, 80), "bfloat16", 2)
    part = wide[:, shift : shift + 64]
    sent = {name: device.send(value) for name, value in CALLS[op].items()}
    compare(device, op, {"x": device.send(wide)[:, shift : shift + 64], **sent}, {"x": part.copy(), **CALLS[op]})


@pytest.mark.parametrize("op", CALLS)
def test_codes_at_any_address(device, op):
    """Results that eight-byte stores may not touch."""
    arguments = {"x": draw((6, 64), "bfloat16", 3), **CALLS[op]}
    want = tupled(getattr(oracle, op).mirror(**arguments))
    raw = device.raw(want[0].size + 1)
    codes = raw[1:].view(want[0].dtype).reshape(want[0].shape)
    out = (codes, *(device.send(np.empty_like(w)) for w in want[1:]))
    sent = {name: device.send(value) for name, value in arguments.items()}
    device.call(op, sent | {"out": out if len(out) > 1 else codes})
    for got, expected in zip(out, want):
        assert_bytes(device.fetch(got), expected, op)


@pytest.mark.parametrize("rounding", ["cuda", "cpu"])
@pytest.mark.parametrize("azp", [None, 0, -77, 2**31 - 1])
def test_every_bfloat16(device, rounding, azp):
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(64, 1024)
    for scale in (1.0, 0.0321, 2.0**-70):
        zero = {} if azp is None else {"azp": np.int32([azp])}
        compare(device, "static_scaled_int8_quant", {"x": every, "scale": F32([scale]), "rounding": rounding, **zero})


def beside(scale, numbers):
    """The float32 around scale * number, of both signs."""
    middle = F32(np.float64(scale) * numbers)
    near = (middle.view(np.int32)[:, None] + np.arange(-3, 4)).astype(np.int32).view(F32).reshape(-1)
    return np.concatenate([near, -near])


@pytest.mark.parametrize("scale", [0.0321, 1.9, 1.0, 2.0**-70])
def test_what_lies_between_two_codes(device, scale):
    """Halves for codes to nearest, whole numbers for those that are cut."""
    scale = float(F32(scale))
    x = beside(scale, np.arange(1, 257) / 2)
    compare(device, "static_scaled_int8_quant", {"x": x, "scale": F32([scale])})
    row = np.concatenate([x[np.abs(x) < 127 * scale], [F32(127) * F32(scale)]]).astype(F32)
    row = np.concatenate([row, np.zeros(-len(row) % 256, F32)])
    compare(device, "dynamic_scaled_int8_quant", {"x": row})
    parts = row[: len(row) // 248 * 248].reshape(-1, 248)
    groups = np.concatenate([parts, np.full((len(parts), 8), F32(127) * F32(scale))], axis=1).astype(F32)
    for size in (256, 64):
        compare(device, "per_token_group_quant_int8", {"x": groups, "group_size": size})
    many = np.tile(groups.astype(ml_dtypes.bfloat16), (150, 1))
    compare(device, "per_token_group_quant_int8", {"x": many, "group_size": 128})


def test_a_product_and_a_correction_are_the_quotient():
    """Wherever a quotient of float32 might be on the wrong side of a half or a whole number up to 128.

    Such a number is m = 128 ... 256 times a power of two. The corrected product is the quotient unless x / s lies
    within 2^-22 ulps of the middle of two float32 beside m, and for that s must be within 8 ulps of a multiple of 2^-7.
    """
    for eighths in np.split(np.arange(128, 256) << 16, 8):
        scale = np.maximum(eighths[:, None, None, None] + np.arange(-8, 9)[:, None, None], 1 << 23)
        product = scale * np.arange(128, 257)[:, None]
        spare = np.floor(np.log2(product)).astype(np.int64) - 23
        x, scale = np.broadcast_arrays(F32((product >> spare) + np.arange(-9, 10)), F32(scale))
        assert_bytes(corrected(x, scale), x / scale)


FORMS = ((True, "cuda"), (False, "cuda"), (False, "cpu"), (True, "triton_token"), (True, "cpu"))


def test_rows_of_one_value_and_of_infinities(device):
    rows = np.zeros((4, 64), F32)
    rows[1], rows[2, 5], rows[3, 5], rows[3, 6] = -2.5, np.inf, -np.inf, np.nan
    for kind in ("float32", "bfloat16"):
        for symmetric, rounding in FORMS:
            arguments = {"x": rows.astype(kind), "symmetric": symmetric, "rounding": rounding}
            got = tupled(device.call("dynamic_scaled_int8_quant", {k: device.send(v) for k, v in arguments.items()}))
            want = tupled(oracle.dynamic_scaled_int8_quant.mirror(**arguments))
            assert len(got) == len(want)
            for a, b in zip(got, want):
                np.testing.assert_array_equal(device.fetch(a), b)


def test_shards_of_a_weight(device):
    """Every code under every scale of a few; the last scale unset leaves them as they are."""
    weight = np.tile(np.arange(256, dtype=np.uint8), (6, 1))
    for scales in ([0.5, 0.37, 0.02], [1e-3, 300.0, 7.0], [0.5, 0.37, -448.0], [0.5, 0.5, 0.5]):
        compare(device, "requantize_with_max_scale", {
            "weight": weight, "weight_scale": F32(scales), "logical_widths": [1, 3, 2]})  # fmt: skip
