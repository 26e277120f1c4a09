"""Around W4A8's products: any batch, GPUs without the tensor cores or with little shared memory, layouts, experts."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import w4a8_matmul
from vtlab.ops.errors import ContractError

from .compare import assert_bytes, assert_rel_l2
from .device_run import Emulated
from .emulation import EmulatedRuntime

F32, K, N = np.float32, 1408, 128
"""Eleven groups, in six parts of two."""
RNG = np.random.Generator(np.random.PCG64(12))
EXPERTS = 3


def tables(*shape: int) -> np.ndarray:
    codes = RNG.integers(0x20, 0x60, shape).astype(np.uint8)
    return oracle.cutlass_pack_scale_fp8(codes.reshape(-1, shape[-1])).reshape(*shape, 8)


ROWS = (RNG.integers(-0x7E, 0x7F, (70, K)) % 0xFF).astype(np.uint8), RNG.uniform(0.001, 0.01, 70).astype(F32)
WORDS = RNG.integers(-(2**31), 2**31, (EXPERTS, N, K // 8)).astype(np.int32)
CHANNELS, TABLES = RNG.uniform(0.001, 0.002, (EXPERTS, N)).astype(F32), tables(EXPERTS, K // 128, N)


def dense(rows: slice, expert: int = 0) -> dict:
    return {
        "a": ROWS[0][rows], "b_q": WORDS[expert].T, "b_group_scales": TABLES[expert],
        "b_channel_scales": CHANNELS[expert], "a_token_scales": ROWS[1][rows],
    }  # fmt: skip


def by_experts(offsets, counts, experts: int = EXPERTS) -> dict:
    return {
        "a_tensors": ROWS[0], "b_tensors": WORDS[:experts], "a_scales": ROWS[1], "b_scales": CHANNELS[:experts],
        "b_group_scales": TABLES[:experts], "expert_offsets": np.array(offsets),
        "problem_sizes": np.array([[N, count, K] for count in counts], np.int32),
    }  # fmt: skip


def run(device, op: str, call: dict) -> np.ndarray:
    return device.fetch(device.call(op, {name: device.send(value) for name, value in call.items()}))


def older(**changes) -> Emulated:
    """An emulated GPU of another capability or with less shared memory."""
    runtime = EmulatedRuntime()
    for name, value in changes.items():
        setattr(runtime, name, lambda value=value: value)
    return Emulated(runtime)


def test_a_row_has_its_bytes_in_any_batch(device):
    """Every kernel cuts K alike; words in rows are copied to columns first."""
    whole = run(device, "cutlass_w4a8_mm", dense(slice(70)))
    assert_rel_l2(whole, oracle.cutlass_w4a8_mm(**dense(slice(70))), 2.0**-8)
    for M in (1, 9, 17, 33):
        call = dense(slice(M))
        assert_bytes(run(device, "cutlass_w4a8_mm", call), whole[:M], f"{M} rows")
        call["b_q"] = np.ascontiguousarray(call["b_q"])
        assert_bytes(run(device, "cutlass_w4a8_mm", call), whole[:M], f"{M} rows, words in rows")


def test_experts_rows_are_those_of_each_alone(device):
    """In any order; rows of nobody are zeros."""
    call = by_experts([40, 3, 5], [29, 0, 30])
    got = run(device, "cutlass_w4a8_moe_mm", call)
    for expert, rows in ((0, slice(40, 69)), (2, slice(5, 35))):
        assert_bytes(got[rows], run(device, "cutlass_w4a8_mm", dense(rows, expert)))
    for rows in (slice(5), slice(35, 40), slice(69, 70)):
        assert_bytes(got[rows], np.zeros_like(got[rows]))


def test_without_the_tensor_cores_the_bytes_are_the_mirrors():
    device = older(capability=(8, 6))
    assert_bytes(device.call("cutlass_w4a8_mm", dense(slice(3))), oracle.cutlass_w4a8_mm.mirror(**dense(slice(3))))
    call = by_experts([2, 0, 60], [1, 2, 1])
    call["a_tensors"], call["a_scales"], call["expert_offsets"] = ROWS[0][:6], ROWS[1][:6], np.array([2, 0, 4])
    got = device.call("cutlass_w4a8_moe_mm", call)
    assert_bytes(got, oracle.cutlass_w4a8_moe_mm.mirror(**call))


def test_many_tiles_of_one_expert(device):
    """Tiles are as low as its share of the rows: more than pass before the next columns, and many a block."""
    call = by_experts([0] * 12, [0] * 5 + [140] + [0] * 6)
    for name in ("b_tensors", "b_scales", "b_group_scales"):
        call[name] = np.concatenate([call[name]] * 4)
    for name in ("a_tensors", "a_scales"):
        call[name] = np.concatenate([call[name]] * 2)
    with mock.patch.object(w4a8_matmul, "MULTIPROCESSORS", 2):
        got = run(device, "cutlass_w4a8_moe_mm", call)
    assert_bytes(got, np.concatenate([run(device, "cutlass_w4a8_mm", dense(slice(70), 2))] * 2))


def test_tiles_of_256_rows(device):
    """Whose totals are in shared memory in part; a block has two of them."""
    call = dense(slice(70))
    want = np.concatenate([run(device, "cutlass_w4a8_mm", call)] * 5)[:300]
    call |= {name: np.concatenate([call[name]] * 5)[:300] for name in ("a", "a_token_scales")}
    costs = [form._replace(cost=form.cost if form.rest else 9.0) for form in w4a8_matmul._LOADED]
    with mock.patch.multiple(w4a8_matmul, MULTIPROCESSORS=1, _LOADED=costs):
        assert_bytes(run(device, "cutlass_w4a8_mm", call), want)


@pytest.mark.parametrize("M", [3, 20])
def test_little_shared_memory_gives_warps_more_parts(M):
    """A GPU with 99 KiB a block."""
    want = older(capability=(8, 9)).call("cutlass_w4a8_mm", dense(slice(M)))
    assert_bytes(older(capability=(8, 9), shared_memory=99 << 10).call("cutlass_w4a8_mm", dense(slice(M))), want)


def test_experts_that_do_not_exist_write_nothing(device):
    """On a GPU the host does not read their rows: those outside are left out."""
    if isinstance(device, Emulated):
        pytest.skip("the host looks: parity/test_w4a8.py")
    got = run(device, "cutlass_w4a8_moe_mm", by_experts([-3, 71, 60], [5, 5, 99]))
    assert_bytes(got[60:], run(device, "cutlass_w4a8_mm", dense(slice(60, 70), 2)))
    assert not got[:60].astype(F32).any()


def test_refused_calls(device):
    call = dense(slice(3))
    with pytest.raises(ContractError, match="11 groups, want 10"):
        run(device, "cutlass_w4a8_mm", call | {"a": call["a"][:, :1280].copy(), "b_q": call["b_q"][:160].copy()})
    with pytest.raises(ContractError, match=r"cutlass_w4a8_mm\(out\): got float32"):
        run(device, "cutlass_w4a8_mm", call | {"out": np.empty((3, N), F32)})
