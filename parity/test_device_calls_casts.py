"""Around casts, microscaling formats and DeepGEMM's experts: addresses, layouts, all exponents, what lies outside."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab import ops, oracle
from vtlab.device import act_order, mxfp4, runtime
from vtlab.device import deep_gemm_moe as launchers
from vtlab.ops.errors import ContractError
from vtlab.ops.numerics.transcendental import silu

from .compare import assert_bytes
from .device_run import Emulated, tupled
from .scalar import draw
from .side_streams import side_stream
from .test_device_calls_w4a8 import older

F32, U8, I32 = np.float32, np.uint8, np.int32
X = draw((6, 256), "bfloat16", 1)
H = oracle.hadamard(n=32)
W = oracle.per_token_cast_to_fp8(draw((6, 256), "bfloat16", 2))[0]
SCALE = np.full((1, 2), 0.03, F32)
CALLS = {
    "per_token_cast_to_fp8": {"x": X},
    "per_token_cast_to_fp4": {"x": X, "group_size": 32},
    "per_block_cast_to_fp8": {"x": X},
    "requant_weight_ue8m0": {"weight": W, "scale": SCALE},
    "mxfp4_quant": {"x": X},
    "hadacore_transform": {"x": X},
    "fused_quantize_mx": {"x": X, "h": H},
    "fused_quantize_nv": {"x": X, "h": H, "input_global_scale": F32([300])},
    "quantize_weights": {"w": X, "quant_type": "uint4", "group_size": 3},
    "silu_mul_per_token_group_quant_fp8_colmajor": {"x": X},
}


def shifted(device, host: np.ndarray, by: int):
    """A copy whose address is `by` elements beyond a multiple of 16 bytes."""
    room = by * host.itemsize
    made = device.raw(host.nbytes + room)[room:].view(host.dtype).reshape(host.shape)
    made[...] = device.send(host)
    return made


def check(device, op: str, got, arguments: dict):
    for one, want in zip(tupled(got), tupled(getattr(oracle, op).mirror(**arguments)), strict=True):
        assert_bytes(np.ascontiguousarray(device.fetch(one)), np.ascontiguousarray(want), op)


def sent(device, arguments: dict) -> dict:
    return {name: device.send(value) for name, value in arguments.items()}


@pytest.mark.parametrize("op", CALLS)
def test_operands_and_results_at_any_address(device, op):
    """Where no vector may be loaded, and none of codes stored."""
    arguments = CALLS[op]
    moved = sent(device, arguments)
    for name, value in arguments.items():
        if isinstance(value, np.ndarray) and value.size > 1:
            moved[name] = shifted(device, value, 1)
    check(device, op, device.call(op, dict(moved)), arguments)
    want = tupled(getattr(oracle, op).mirror(**arguments))
    out = tuple(shifted(device, np.zeros(one.shape, one.dtype), 1) for one in want)
    device.call(op, sent(device, arguments) | {"out": out if len(out) > 1 else out[0]})
    check(device, op, out, arguments)


@pytest.mark.parametrize("shift", [1, 8])
@pytest.mark.parametrize(
    "op", ["per_token_cast_to_fp8", "per_token_cast_to_fp4", "per_block_cast_to_fp8", "mxfp4_quant"]
)
def test_slices_of_wider_rows(device, op, shift):
    wide = draw((6, 280), "bfloat16", 3)
    part = {**CALLS[op], "x": wide[:, shift : shift + 256].copy()}
    views = sent(device, part) | {"x": device.send(wide)[:, shift : shift + 256]}
    check(device, op, device.call(op, views), part)


@pytest.mark.parametrize("packed", [False, True])
def test_scales_in_columns_are_written_with_their_padding(device, packed):
    """Fresh columns, and columns that are given, end in zeros; other strides are refused."""
    scale = np.exp2(np.random.default_rng(4).integers(-9, 9, (37, 9))).astype(F32)
    arguments = {"scale": scale, "packed": packed}
    want = oracle.transform_sf_layout.mirror(**arguments)
    fresh = device.call("transform_sf_layout", sent(device, arguments))
    check(device, "transform_sf_layout", fresh, arguments)
    assert fresh.strides == want.strides == (4, 160)
    room = device.raw(4 * 40 * want.shape[1]).view(want.dtype).reshape(want.shape[1], 40)
    room[...] = 7
    device.call("transform_sf_layout", sent(device, arguments) | {"out": room.T[:37]})
    assert_bytes(device.fetch(room)[:, :37], np.ascontiguousarray(want.T))
    assert not device.fetch(room)[:, 37:].any()
    wider = device.raw(4 * 44 * 9).view(want.dtype).reshape(9, 44)[: want.shape[1]]
    for given in (room.T[:36], room.view(np.uint32).T[:37], wider.T[:37], room.T[:37, ::-1]):
        with pytest.raises(ContractError, match=r"transform_sf_layout\(out\): got"):
            device.call("transform_sf_layout", sent(device, arguments) | {"out": given})


def test_powers_above_every_exponent(device):
    """A scale 0 to 40 ulps above each power of two that has one: the float32 logarithm's digits run out differently."""
    powers = np.exp2(np.arange(-22, 119)).astype(np.float64)
    size = (powers[:, None] * (1 + np.arange(41) * 2.0**-23) * 448).astype(F32).reshape(-1, 1)
    for ue8m0 in ("log2", "bits"):
        arguments = {"x": size, "ue8m0": ue8m0}
        check(device, "per_token_cast_to_fp8", device.call("per_token_cast_to_fp8", sent(device, arguments)), arguments)


@pytest.mark.parametrize("group_size", [32, 6])
def test_every_bfloat16_as_a_code_of_four_bits(device, group_size):
    """Sums that round upwards and products that saturate against the definition, beside a largest value of six."""
    every = np.arange(1 << 16, dtype=np.uint16)
    every[(every & 0x7FFF) > 0x7F80] |= 0x40  # a host's fmaxf does not pass over a signalling NaN
    every = every.view(ml_dtypes.bfloat16)
    small = np.where(np.abs(every.astype(F32)) <= 6, every, 6).astype(every.dtype)
    x = np.concatenate([small.reshape(-1, 16), np.full((1 << 12, 16), 6, small.dtype)], axis=1).reshape(64, -1)
    arguments = {"x": x[:, : 2048 // group_size * group_size].copy(), "group_size": group_size, "ue8m0": "bits"}
    check(device, "per_token_cast_to_fp4", device.call("per_token_cast_to_fp4", sent(device, arguments)), arguments)


@pytest.mark.parametrize("rounding", ["vt", "vllm_native"])
def test_every_bfloat16_under_a_power_of_two(device, rounding):
    """The kernel for many vectors, and the one for few."""
    every = np.arange(1 << 16, dtype=np.uint16)
    every[(every & 0x7FFF) > 0x7F80] |= 0x40
    x = np.tile(every.view(ml_dtypes.bfloat16), 9 if rounding == "vt" else 1).reshape(-1, 4096)
    arguments = {"x": x, "rounding": rounding}
    check(device, "mxfp4_quant", device.call("mxfp4_quant", sent(device, arguments)), arguments)


def scatter(T, k, E, alignment, rows, ids):
    rng = np.random.default_rng((T, k, E))
    x, x_scale = rng.integers(0, 255, (T, 32)).astype(U8), rng.standard_normal((T, 2)).astype(F32)
    return {"a": np.full((rows, 32), 0xEE, U8), "a_scale": np.full((rows, 2), 7, F32), "x": x, "x_scale": x_scale,
            "topk_ids": ids, "num_experts": E, "alignment": alignment}  # fmt: skip


def outcome(device, arguments):
    moved = sent(device, arguments)
    results = device.call("ep_scatter", dict(moved))
    return [device.fetch(one) for one in (moved["a"], moved["a_scale"], *results)]


def test_columns_of_exponents_are_packed(device):
    """Words in columns, as vLLM's grouped product wants them, from exponents in columns."""
    ids, rng = np.random.default_rng(6).integers(-1, 3, (9, 2)).astype(I32), np.random.default_rng(7)
    arguments = scatter(9, 2, 3, 8, 48, ids) | {
        "a_scale": np.full((48, 2), 7, I32), "x_scale": rng.integers(0, 256, (9, 6)).astype(U8),
    }  # fmt: skip
    turned = device.send(np.full((2, 48), 7, I32)).T
    columns = device.send(np.ascontiguousarray(arguments["x_scale"].T)).T
    device.call("ep_scatter_ue8m0", sent(device, arguments) | {"a_scale": turned, "x_scale": columns})
    oracle.ep_scatter_ue8m0.mirror(**arguments)
    assert_bytes(np.ascontiguousarray(device.fetch(turned)), arguments["a_scale"])


@pytest.mark.parametrize("T", [1, 255, 1100, 2100])
def test_places_in_many_chunks(device, T):
    """One chunk of choices or several, more experts than a block has threads: always the order of tokens."""
    ids = np.random.default_rng(T).integers(-1, 300, (T, 4)).astype(I32)
    rows = T * 4 + min(T * 4, 300) * 7
    arguments = scatter(T, 4, 300, 8, rows, ids)
    host = {name: np.copy(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    want = oracle.ep_scatter.mirror(**host)
    for got, expected in zip(outcome(device, arguments), (host["a"], host["a_scale"], *want), strict=True):
        assert_bytes(got, expected)


def test_columns_of_scales_are_scattered(device):
    ids = np.random.default_rng(5).integers(0, 3, (9, 2)).astype(I32)
    arguments = scatter(9, 2, 3, 8, 48, ids)
    want = outcome(device, arguments)
    turned = device.send(np.full((2, 48), 7, F32)).T
    columns = device.send(np.ascontiguousarray(arguments["x_scale"].T)).T
    device.call("ep_scatter", sent(device, arguments) | {"a_scale": turned, "x_scale": columns})
    assert_bytes(np.ascontiguousarray(device.fetch(turned)), want[1])


def test_what_lies_outside_is_left_out(device):
    """On a GPU the host does not read ids, rows and counts: what does not exist is nobody's, and nothing is written."""
    ids = I32([[0, 7], [-5, 1], [1, 1]])
    moved = sent(device, scatter(3, 2, 2, 4, 6, ids))
    rows, weights = draw((4, 16), "float32", 6), np.ones((2, 2), F32)
    gathered = sent(device, {"a": rows, "topk_weights": weights, "inv_perm": I32([[1, 9], [-7, 2]])})
    x, codes, scale = draw((2, 2, 256), "bfloat16", 8), np.zeros((2, 2, 128), U8), np.zeros((2, 2, 1), F32)
    masked = sent(device, {"x": x, "counts": I32([-3, 9]), "codes": codes, "scale": scale})
    with runtime.using(device.runtime):  # the launchers themselves: before an emulated one the host looks
        m_indices, inverse = map(device.fetch, launchers.ep_scatter(**moved))
        out = device.fetch(launchers.ep_gather(**gathered))
        launchers.silu_mul_masked_quant(**masked)
    assert inverse.tolist() == [[0, -1], [-1, 4], [5, -1]] and m_indices.tolist() == [0, -1, -1, -1, 1, 1]
    assert (device.fetch(moved["a"])[1:4] == 0xEE).all()
    assert_bytes(out, rows[[1, 2]])
    assert [bool(rows.any()) for rows in device.fetch(masked["codes"]).reshape(4, 128)] == [False, False, True, True]


@pytest.mark.parametrize("resident", [1, 3])
def test_few_blocks_share_all_rows(device, resident, monkeypatch):
    """Each block takes many turns; rows beyond the counts stay."""
    monkeypatch.setattr(launchers, "_RESIDENT", resident)
    x, counts = draw((7, 5, 768), "bfloat16", 7, 2), I32([5, 0, 2, 0, 0, 4, 1])
    host = {"x": x, "counts": counts, "codes": np.full((7, 5, 384), 0xEE, U8), "scale": np.full((7, 5, 3), 7, F32)}
    moved = sent(device, host)
    device.call("silu_mul_masked_quant", dict(moved))
    oracle.silu_mul_masked_quant.mirror(**host)
    for name in ("codes", "scale"):
        assert_bytes(device.fetch(moved[name]), host[name], name)


def test_more_experts_than_places_are_counted_for_are_refused(device):
    arguments = scatter(2, 2, 1025, 1, 4, np.zeros((2, 2), I32))
    with pytest.raises(ContractError, match=r"ep_scatter\(num_experts\): got 1025, want at most 1024"):
        device.call("ep_scatter", sent(device, arguments))


def test_a_captured_graph_follows_new_tokens(device):
    if isinstance(device, Emulated):
        pytest.skip("graphs need a GPU: --device cuda")
    cupy = device.cupy
    ids = [np.random.default_rng(seed).integers(0, 6, (2200, 4)).astype(I32) for seed in range(3)]
    moved = sent(device, scatter(2200, 4, 6, 8, 8848, ids[0]))
    outs = ops.ep_scatter(**moved)
    stream = side_stream(cupy)
    with stream:
        ops.ep_scatter(**moved, out=outs)
        stream.synchronize()
        stream.begin_capture()
        ops.ep_scatter(**moved, out=outs)
        graph = stream.end_capture()
        for host in ids[1:]:
            moved["topk_ids"][...] = device.send(host)
            graph.launch(stream)
            stream.synchronize()
            fresh = scatter(2200, 4, 6, 8, 8848, host)
            for got, want in zip(outs, oracle.ep_scatter.mirror(**fresh), strict=True):
                assert_bytes(device.fetch(got), want)


@pytest.mark.parametrize(
    "op, rows, width, more",
    [
        *(("hadacore_transform", rows, width, {}) for rows, width in ((1100, 64), (70, 1024), (20, 4096), (3, 32768))),
        *(("fused_quantize_mx", 25, 2048, {"h": R, "method": how})
          for R in (32, 64, 128) for how in ("quest", "abs_max")),
        *(("fused_quantize_nv", 25, 2048, {"h": R, "input_global_scale": F32([300])}) for R in (16, 64)),
        *(("fused_quantize_mx", 1027, R, {"h": R, "method": how}) for R, how in ((32, "quest"), (128, "abs_max"))),
        ("fused_quantize_nv", 1027, 32, {"h": 16, "input_global_scale": F32([300])}),
        ("permute_cols", 70, 264, {"perm": np.random.default_rng(5).permutation(264).astype(I32)}),
    ],
)  # fmt: skip
def test_blocks_that_come_round_again(device, monkeypatch, op, rows, width, more):
    """Where there is more work than the blocks that a GPU holds at a time."""
    for launcher in (mxfp4, act_order):
        monkeypatch.setattr(launcher, "MULTIPROCESSORS", 1)
    arguments = {"x": draw((rows, width), "bfloat16", 6), **more}
    if "h" in more:
        arguments["h"] = oracle.hadamard(n=more["h"])
    check(device, op, device.call(op, sent(device, arguments)), arguments)


def test_long_rows_follow_each_other(device):
    """A row leaves its values where the one before had them."""
    x = draw((4, 32768), "bfloat16", 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mxfp4, "MULTIPROCESSORS", 1)
        check(device, "hadacore_transform", device.call("hadacore_transform", {"x": device.send(x)}), {"x": x})


@pytest.mark.parametrize("width", [16384, 32768])
def test_transforms_with_little_shared_memory(device, monkeypatch, width):
    """Rows that are on their way have no room of their own."""
    if not isinstance(device, Emulated):
        pytest.skip("of GPUs with less shared memory")
    monkeypatch.setattr(mxfp4, "MULTIPROCESSORS", 1)
    small, x = older(shared_memory=5 * width, capability=(8, 0)), draw((3, width), "bfloat16", 7)
    check(small, "hadacore_transform", small.call("hadacore_transform", {"x": small.send(x)}), {"x": x})


def test_no_act_of_a_bfloat16_gate_is_lowered_across_a_middle():
    """`lowered` of cuda/expert_codes.cuh: of all gates, the fast functions' acts are rounded as MIRROR's are.

    How wrong those may be, in units of 2^-24: what e = exp(-g) is wrong by, its exponent's rounding and that of log2(e)
    by |g| together 1.3 |g|, ex2 4, weighs e / (1 + e); the sum 1, the reciprocal 2, the product and `lowered` 1 each.
    """
    gate = (np.arange(1 << 16, dtype=np.uint32) << 16).view(F32)
    gate = gate[np.isfinite(gate) & (gate > -87)]
    act, large = silu(gate), np.abs(gate) >= 2.0**-106
    assert_bytes(act[~large], gate[~large] * F32(0.5))
    gate, act = gate[large].astype(np.longdouble), act[large]
    e = np.exp(-gate)
    exact = gate / (1 + e)
    wrong = np.abs(exact) * ((1.3 * np.abs(gate) + 4) * (e / (1 + e)) + 5) * 2.0**-24
    most = np.minimum(np.abs(exact) * 12 * 2.0**-24, 1)
    for end in (-wrong, wrong):
        assert_bytes((exact - most + end).astype(F32).astype(ml_dtypes.bfloat16), act.astype(ml_dtypes.bfloat16))
