"""Around the 8-bit products: how operands lie, experts' rows among others, one row among many, graphs, refusals."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import tiles
from vtlab.ops.errors import ContractError

from .compare import assert_bytes, assert_rel_l2

BF16, F32 = ml_dtypes.bfloat16, np.float32


def codes(*shape: int) -> np.ndarray:
    random = np.random.default_rng(shape)
    return (random.integers(0, 0x59, shape) | random.integers(0, 2, shape) << 7).astype(np.uint8)


def scales(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).uniform(0.01, 0.05, shape).astype(F32)


def at_address(device, array: np.ndarray, shift: int):
    """The array on the device, `shift` bytes after a multiple of 16."""
    raw = device.raw(array.nbytes + 16)[shift : shift + array.nbytes].view(array.dtype).reshape(array.shape)
    raw[...] = device.send(array)
    return raw


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_operands_at_any_address(device, shift):
    """Rows that 16-byte loads may not touch are multiplied in the mirror's order, to the byte."""
    a, b, alpha = codes(5, 64), codes(48, 64), scales(1)
    got = device.fetch(device.call("matmul_fp8_cublaslt", {
        "a": at_address(device, a, shift), "b": device.send(b), "alpha": device.send(alpha), "out_dtype": "bfloat16",
    }))  # fmt: skip
    if shift:
        assert_bytes(got, oracle.matmul_fp8_cublaslt.mirror(a, b, alpha))
    assert_rel_l2(got, oracle.matmul_fp8_cublaslt(a, b, alpha), 2.0**-8)


def test_weights_in_wider_columns(device):
    """b need not be dense: its columns may be rows of something wider."""
    a, wide, sa, sb = codes(3, 64), codes(70, 80), scales(3, 1), scales(1, 70)
    b = device.send(wide)[:, :64].T
    arguments = {"a": device.send(a), "b": b, "scale_a": device.send(sa), "scale_b": device.send(sb)}
    got = device.fetch(device.call("cutlass_scaled_mm", arguments))
    assert_rel_l2(got, oracle.cutlass_scaled_mm(a, wide[:, :64].T, sa, sb), 2.0**-8)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 128, 129])
def test_a_token_does_not_see_how_many_there_are(device, rows):
    """Every kernel sums a token's products alike."""
    a, b, sa, sb = codes(130, 272), codes(72, 272), scales(130, 1), scales(1, 72)
    send = {"b": device.send(b).T, "scale_b": device.send(sb)}
    whole, part = (
        device.fetch(device.call("cutlass_scaled_mm", send | {"a": device.send(a[:n]), "scale_a": device.send(sa[:n])}))
        for n in (130, rows)
    )
    assert_bytes(part, whole[:rows])


def test_experts_rows_are_those_of_each_alone(device):
    a, scale_a, b, scale_b = codes(256, 128), scales(256, 1), codes(2, 64, 128), scales(2, 1, 1)
    experts = np.repeat(np.int32([1, -1, 0]), [70, 58, 128])
    send = device.send
    got = device.fetch(device.call("m_grouped_fp8_gemm_nt_contiguous", {
        "a": send(a), "scale_a": send(scale_a), "b": send(b), "scale_b": send(scale_b), "m_indices": send(experts),
    }))  # fmt: skip
    for expert, rows in ((1, slice(0, 70)), (0, slice(128, 256))):
        alone = device.call("fp8_gemm_nt", {
            "a": send(a[rows]), "scale_a": send(scale_a[rows]), "b": send(b[expert]), "scale_b": send(scale_b[expert]),
        })  # fmt: skip
        assert_bytes(got[rows], device.fetch(alone))
    assert not got[70:128].astype(F32).any()


def test_scales_in_columns(device):
    """As quantisers give them to DeepGEMM: tokens beside each other."""
    a, scale_a, b, scale_b = codes(8, 256), scales(2, 8).T, codes(64, 256), scales(1, 2)
    arguments = {"a": a, "scale_a": scale_a, "b": b, "scale_b": scale_b}
    got = device.fetch(device.call("fp8_gemm_nt", {name: device.send(value) for name, value in arguments.items()}))
    assert_rel_l2(got, oracle.fp8_gemm_nt(a, scale_a, b, scale_b), 2.0**-8)


def test_other_gpus_sum_in_the_mirrors_order(device, monkeypatch):
    """Without Hopper's tensor cores every result has the mirror's bytes."""
    monkeypatch.setattr(tiles, "on_tensor_cores", lambda left, right: False)
    monkeypatch.setattr("vtlab.device.fp8_matmul.on_tensor_cores", lambda left, right: False)
    monkeypatch.setattr("vtlab.device.fp8_blocks.on_tensor_cores", lambda left, right: False)
    a, b, sa, sb = codes(20, 144), codes(40, 144), scales(20, 1), scales(1, 40)
    arguments = {"a": device.send(a), "b": device.send(b).T, "scale_a": device.send(sa), "scale_b": device.send(sb)}
    got = device.fetch(device.call("cutlass_scaled_mm", arguments))
    assert_bytes(got, oracle.cutlass_scaled_mm.mirror(a, b.T, sa, sb))
    ga, gb = scales(20, 2), scales(1, 2)
    sent = {"a": device.send(a), "b": device.send(b), "scale_a": device.send(ga), "scale_b": device.send(gb)}
    assert_bytes(device.fetch(device.call("scaled_mm_block", sent)), oracle.scaled_mm_block.mirror(a, b, ga, gb))


def test_what_is_refused(device):
    a, b, alpha = device.send(codes(3, 64)), device.send(codes(48, 64)), device.send(scales(1))
    with pytest.raises(ContractError, match=r"matmul_fp8_cutlass\(out\): got bfloat16 \(3, 64\)"):
        out = device.send(np.zeros((3, 64), BF16))
        device.call("matmul_fp8_cutlass", {"a": a, "b": b, "alpha": alpha, "out": out})
    with pytest.raises(ContractError, match=r"cutlass_scaled_mm\(b\): got strides"):
        row = {"scale_a": device.send(scales(1)), "scale_b": device.send(scales(1))}
        device.call("cutlass_scaled_mm", {"a": a, "b": device.send(codes(64, 48)), **row})
    with pytest.raises(ContractError, match="memory shared with another argument"):
        shared = device.raw(3 * 48 * 2)
        out = shared.view(BF16).reshape(3, 48)
        device.call("matmul_fp8_cutlass", {"a": shared[: 3 * 64].reshape(3, 64), "b": b, "alpha": alpha, "out": out})
