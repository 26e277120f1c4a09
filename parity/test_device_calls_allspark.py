"""Around AllSpark's kernels: any batch, little shared memory, operands at any address, refused calls."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.errors import ContractError

from .compare import assert_bytes, assert_nmse
from .device_run import Emulated
from .emulation import EmulatedRuntime
from .scalar import draw

RNG = np.random.Generator(np.random.PCG64(13))
K, N, PADDED = 720, 80, 96
"""Twelve chunks, the last one of 16, in six parts of two."""
KIND = "bfloat16"
PLAIN = RNG.integers(0, 256, (K, N)).astype(np.uint8)
SCALES = (np.abs(draw((1, N), "float32", 3)) / 100 + 0.004).astype(draw((1,), KIND, 1).dtype)
WORDS, FACTORS = oracle.allspark_repack_weight(PLAIN, SCALES)


def product(M: int) -> dict:
    return {"a": draw((40, K), KIND, 1)[:M], "b_qweight": WORDS, "b_scales": FACTORS, "n": N}


def sent(device, call: dict, shift: int = 0) -> dict:
    """The arrays on the device, so many elements after a multiple of 16 bytes."""
    out = {}
    for name, value in call.items():
        out[name] = value
        if isinstance(value, np.ndarray):
            gap = shift * value.dtype.itemsize
            out[name] = device.raw(value.nbytes + gap)[gap:].view(value.dtype).reshape(value.shape)
            out[name][...] = device.send(value)
    return out


def test_a_row_has_its_bytes_in_any_batch(device):
    whole = device.fetch(device.call("allspark_w8a16_gemm", sent(device, product(40))))
    assert_nmse(whole, oracle.allspark_w8a16_gemm(**product(40)), 2.0**-16)
    for M in (1, 9, 17):
        got = device.fetch(device.call("allspark_w8a16_gemm", sent(device, product(M))))
        assert_bytes(got, whole[:M], f"{M} rows")


@pytest.mark.parametrize("M", [3, 20])
def test_little_shared_memory_gives_warps_more_parts(M):
    """A GPU with 48 KiB a block."""
    small = EmulatedRuntime()
    small.shared_memory = lambda: 48 << 10
    want = Emulated().call("allspark_w8a16_gemm", product(M))
    assert_bytes(Emulated(small).call("allspark_w8a16_gemm", product(M)), want)


def test_operands_at_any_address(device):
    """Where no 16-byte copy may touch them."""
    repack = {"qweight": PLAIN, "scale": SCALES, "zero_point": -SCALES}
    unpack = {"qweight": WORDS, "scale": FACTORS, "n": N}
    for op, call in (("allspark_w8a16_gemm", product(9)), ("allspark_repack_weight", repack),
                     ("allspark_unpack_weight", unpack)):  # fmt: skip
        results = [device.call(op, sent(device, call, shift)) for shift in (0, 1)]
        for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in results), strict=True):
            assert_bytes(device.fetch(other), device.fetch(one), op)


def test_packed_weights_at_any_address(device):
    """Into `out=` as well."""
    call = sent(device, {"qweight": PLAIN, "scale": SCALES})
    raw = device.raw(PADDED * K + 1)
    out = raw[1:].reshape(PADDED, K), device.send(np.zeros((1, PADDED), SCALES.dtype))
    got = device.call("allspark_repack_weight", call | {"out": out})
    assert_bytes(device.fetch(got[0]), WORDS)
    assert_bytes(device.fetch(got[1]), FACTORS)


def test_refused_calls(device):
    with pytest.raises(ContractError, match=r"allspark_w8a16_gemm\(n\): got 64, want 65 to 96"):
        device.call("allspark_w8a16_gemm", sent(device, product(3)) | {"n": 64})
    with pytest.raises(ContractError, match=r"allspark_w8a16_gemm\(out\): got float32"):
        device.call("allspark_w8a16_gemm", sent(device, product(3) | {"out": np.empty((3, N), np.float32)}))
