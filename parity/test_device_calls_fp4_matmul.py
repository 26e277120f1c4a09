"""Around the kernels of FP4 products: any batch and any way to deal work out, addresses, layouts, refused calls."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import fp4_product
from vtlab.ops.errors import ContractError
from vtlab.ops.nvfp4 import tile

from .compare import assert_bytes, assert_nmse
from .device_run import Emulated
from .emulation import EmulatedRuntime
from .scalar import draw

F32, U8 = np.float32, np.uint8
RNG = np.random.Generator(np.random.PCG64(7))
K, N = 1184, 130
"""Ten chunks, the last one of 32 k, in five chains; columns of two warps and two more."""


def side(rows: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    low, high = (0x28, 0x48) if group == 16 else (120, 134)
    return RNG.integers(0, 256, (rows, K // 2)).astype(U8), RNG.integers(low, high, (rows, K // group)).astype(U8)


A, B, X = side(70, 16), side(N, 16), draw((70, K), "bfloat16", 1)
MA, MB, G = side(70, 32), side(N, 32), F32([0.01])


def rows_of(op: str, M: int) -> dict:
    if op == "matmul_nvfp4":
        call = {"x": X[:M], "b": B[0], "block_scale_b": B[1], "global_scale": G}
    elif op == "matmul_mxfp4":
        call = {"x": X[:M], "b": MB[0], "b_sf": MB[1]}
    elif op == "matmul_mxf4_bf16_tn":
        call = {"a": MA[0][:M], "b": MB[0], "a_sf": MA[1][:M], "b_sf": MB[1], "alpha": G}
    else:
        call = {"a": A[0][:M], "b": B[0], "block_scale_a": A[1][:M], "block_scale_b": B[1], "alpha": G}
    return call | {"is_sf_swizzled_layout": False}


WEIGHT = {
    "weight": RNG.integers(-(2**31), 2**31, (72, 256)).astype(np.int32),
    "weight_scale": RNG.integers(0xD0, 0xE8, (72, 128)).astype(U8), "weight_global_scale": F32([2.0**110]),
}  # fmt: skip
LINEAR = draw((70, 1152), "bfloat16", 2)
OPS = ("matmul_nvfp4", "cutlass_scaled_fp4_mm", "matmul_mxf4_bf16_tn", "matmul_mxfp4", "apply_fp4_marlin_linear")


def call_of(op: str, M: int) -> dict:
    return {"input": LINEAR[:M], **WEIGHT} if op == "apply_fp4_marlin_linear" else rows_of(op, M)


def run(device, op: str, call: dict) -> np.ndarray:
    return device.fetch(device.call(op, {name: device.send(value) for name, value in call.items()}))


@pytest.mark.parametrize("op", OPS)
def test_a_row_has_its_bytes_in_any_batch(device, op):
    """A decode step and a prompt: the kernels for few rows and for many give row 0 the same bytes."""
    whole = run(device, op, call_of(op, 70))
    for M in (1, 9, 17):
        assert_bytes(run(device, op, call_of(op, M)), whole[:M], f"{M} rows")


@pytest.mark.parametrize("settings", [{"_BUSY": 0}, {"_FEW": 0}, {"_FEW": 0, "_MANY_TEAMS": 1}], ids=str)
def test_how_the_work_is_dealt_out_changes_no_byte(device, settings, monkeypatch):
    """One chain after the other, two warps side by side; few rows as many."""
    calls = {M: {op: call_of(op, M) for op in OPS[::4]} for M in (9, 20)}
    want = {M: {op: run(device, op, call) for op, call in of.items()} for M, of in calls.items()}
    for name, value in settings.items():
        monkeypatch.setattr(fp4_product, name, value)
    for M, of in calls.items():
        for op, call in of.items():
            assert_bytes(run(device, op, call), want[M][op], f"{op}, {M} rows")


def test_little_shared_memory_deals_chains_out():
    """A GPU with 99 KiB a block."""
    small = EmulatedRuntime()
    small.shared_memory = lambda: 99 << 10
    for M in (9, 20):
        call = call_of("matmul_nvfp4", M)
        assert_bytes(Emulated(small).call("matmul_nvfp4", dict(call)), Emulated().call("matmul_nvfp4", dict(call)))


@pytest.mark.parametrize("op", OPS[:4])
def test_tiles_hold_the_same_scales(device, op):
    call = call_of(op, 5)
    tiles = {name: tile(call[name]) for name in ("block_scale_a", "block_scale_b", "a_sf", "b_sf") if name in call}
    want = run(device, op, call)
    assert_bytes(run(device, op, call | tiles | {"is_sf_swizzled_layout": True}), want)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tiled", [False, True])
def test_operands_at_any_address(device, op, tiled):
    """Where no copy of 16 bytes, and none of four, may touch them."""
    call = call_of(op, 5)
    for name in ("block_scale_a", "block_scale_b", "a_sf", "b_sf") if tiled else ():
        if name in call:
            call |= {name: tile(call[name]), "is_sf_swizzled_layout": True}
    want, moved = run(device, op, call), {}
    for name, value in call.items():
        moved[name] = value
        if isinstance(value, np.ndarray):
            shift = value.dtype.itemsize
            moved[name] = device.raw(value.nbytes + shift)[shift:].view(value.dtype).reshape(value.shape)
            moved[name][...] = device.send(value)
    assert_bytes(device.fetch(device.call(op, moved)), want)


@pytest.mark.parametrize("K", [32, 128])
def test_every_code_under_every_scale(device, K):
    """All finite products of e2m1 and e4m3, and of e2m1 and powers of two: one weight a column, exactly."""
    one = np.zeros((1, K // 2), U8)
    one[0, 0] = 2  # 1, then zeros
    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F], U8)
    codes = np.zeros((16 * len(finite), K // 2), U8)
    codes[:, 0] = np.repeat(np.arange(16, dtype=U8), len(finite))
    scales = np.tile(finite, 16)[:, None].repeat(K // 16, 1)
    call = {"a": one, "b": codes, "block_scale_a": np.full((1, K // 16), 0x38, U8), "block_scale_b": scales,
            "alpha": F32([1]), "is_sf_swizzled_layout": False}  # fmt: skip
    assert_bytes(run(device, "cutlass_scaled_fp4_mm", call), oracle.cutlass_scaled_fp4_mm(**call))
    powers = np.arange(2, 252, dtype=U8)  # products that are normal numbers of float32
    codes = np.zeros((16 * len(powers), K // 2), U8)
    codes[:, 0] = np.repeat(np.arange(16, dtype=U8), len(powers))
    scales = np.tile(powers, 16)[:, None].repeat(K // 32, 1)
    call = {"a": one, "b": codes, "a_sf": np.full((1, K // 32), 127, U8), "b_sf": scales,
            "alpha": F32([1]), "is_sf_swizzled_layout": False}  # fmt: skip
    assert_bytes(run(device, "matmul_mxf4_bf16_tn", call), oracle.matmul_mxf4_bf16_tn(**call))


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_every_code_under_every_scale_of_marlins(device, kind):
    """Scales 0 and 0x80 to 0xF7, each over 64 columns of codes; the same power of two comes back out."""
    x = np.zeros((1, 1920), draw((1,), kind, 1).dtype)
    scale = np.zeros((120, 128), U8)
    scale[:] = np.arange(0x80, 0xF8, dtype=U8)[:, None]
    scale[0] = 0
    weight = RNG.integers(-(2**31), 2**31, (120, 256)).astype(np.int32)
    for group in (0, 1, 60, 119):
        x[:] = 0
        x[0, 16 * group + group % 16] = 1
        call = {"input": x, "weight": weight, "weight_scale": scale,
                "weight_global_scale": F32([2.0 ** (119 if kind == "bfloat16" else 7)])}  # fmt: skip
        assert_bytes(run(device, "apply_fp4_marlin_linear", call), oracle.apply_fp4_marlin_linear(**call))


def test_plain_and_marlins_weights_give_one_product(device):
    """MXFP4 as a checkpoint has it and repacked: the same weights, summed in another order."""
    codes, scales = side(128, 32)
    codes, scales = codes[:, :576].copy(), scales[:, :36].copy()
    x = draw((5, 1152), "bfloat16", 3)
    wide = np.ascontiguousarray(scales.T).astype(F32)
    processed = oracle.mxfp4_marlin_process_scales(
        oracle.marlin_permute_scales(wide, size_k=1152, group_size=32).astype(U8)
    )
    repacked = oracle.gptq_marlin_repack(np.ascontiguousarray(codes.view(np.int32).T), bits=4)
    got = run(device, "apply_fp4_marlin_linear", {"input": x, "weight": repacked, "weight_scale": processed})
    values = oracle.marlin_unpack(repacked, bits=4)
    assert_bytes(values[::2].astype(U8).T | values[1::2].astype(U8).T << 4, codes)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[values & 7] * np.where(values & 8, -1, 1)
    truth = x.astype(np.float64) @ (grid * np.ldexp(1.0, scales.T.repeat(32, 0).astype(int) - 127))
    assert_nmse(got, truth.astype(x.dtype), 2.0**-16)


@pytest.mark.parametrize(
    "op, change, message",
    [
        ("apply_fp4_marlin_linear", {"weight_scale": WEIGHT["weight_scale"][:36]}, "36 groups, want 72"),
        ("apply_fp4_marlin_linear", {"weight_global_scale": None}, "72 groups, want 36"),
        ("matmul_nvfp4", {"out": np.empty((3, N), F32)}, r"matmul_nvfp4\(out\): got float32"),
        ("cutlass_scaled_fp4_mm", {"block_scale_b": A[1]}, r"block_scale_b\): got shape"),
    ],
    ids=["groups", "form", "out", "scales"],
)
def test_refused_calls(device, op, change, message):
    call = call_of(op, 3) | change
    with pytest.raises(ContractError, match=message):
        device.call(op, {name: device.send(value) for name, value in call.items()})
