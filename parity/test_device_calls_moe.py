"""Around the experts' kernels: any batch and any tiles, ids that lie, any address, scratch, captures, little memory."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import moe, moe_routing, scratch
from vtlab.device.errors import DeviceError
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .device_doors import past_the_door
from .device_run import Emulated
from .emulation import EmulatedRuntime
from .scalar import draw

OP, E, N, K = "moe_grouped_gemm", 3, 72, 136


def call_of(tokens: int, k: int = 2, kind: str = "bfloat16", each: bool = False, **more) -> dict:
    """A call on the host, the second expert without a row and the last token's first choice without an expert."""
    ids = np.random.Generator(np.random.PCG64(tokens)).integers(0, 2, (tokens, k)).astype(np.int32) * 2
    ids[-1, 0] = -1
    return {
        "x": draw((tokens * (k if each else 1), K), kind, 1), "weight": draw((E, N, K), kind, 2), "ids": ids,
        "weights": np.abs(draw((tokens, k), "float32", 3)), **more,
    }  # fmt: skip


def run(device, call: dict, op: str = OP) -> np.ndarray:
    return np.array(device.fetch(device.call(op, {name: device.send(value) for name, value in call.items()})))


def part(call: dict, tokens: slice) -> dict:
    """Some of the tokens alone."""
    count = len(call["ids"])
    rows = call["x"].reshape(count, -1, K)[tokens].reshape(-1, K)
    return call | {"x": rows, "ids": call["ids"][tokens], "weights": call["weights"][tokens]}


@pytest.mark.parametrize("kind, each", [("bfloat16", False), ("float16", True), ("float32", False), ("float32", True)])
def test_a_token_has_its_bytes_in_any_batch(device, kind, each):
    """Alone, unsorted; in small tiles; in tall ones; and beside tokens that are not finite."""
    call = call_of(70, kind=kind, each=each)
    whole = run(device, call).reshape(70, 2, N)
    for tokens in (slice(0, 1), slice(69, 70), slice(3, 12), slice(20, 50)):
        got = run(device, part(call, tokens)).reshape(-1, 2, N)
        assert_bytes(got, whole[tokens], str(tokens))
    call["x"].reshape(70, -1, K)[5] = np.nan
    spoiled = run(device, call).reshape(70, 2, N)
    assert np.isnan(spoiled[5].astype(np.float32)).all()
    assert_bytes(np.delete(spoiled, 5, axis=0), np.delete(whole, 5, axis=0))


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_how_pairs_are_tiled_changes_no_byte(device, kind, monkeypatch):
    call = call_of(20, kind=kind)
    want = run(device, call)
    for least in (1 << 20, 0):
        monkeypatch.setattr(moe, "_WIDE_LEAST", least)
        for _, form in moe._CORES:
            monkeypatch.setattr(moe, "_CORES", ((0, form),))
            assert_bytes(run(device, call), want, form.kernel)


def test_a_matrix_of_no_row_is_not_read(device):
    call = call_of(40)
    want = run(device, call)
    call["weight"][1] = np.nan
    assert_bytes(run(device, call), want)


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("bad", [-2, E, 2**31 - 1])
def test_experts_that_are_not_there(device, kind, bad):
    """On the device alone: a call that may wait raises; one that may not makes the row NaN, and no other."""
    call = call_of(9, kind=kind)
    want = run(device, call)
    sent = {name: device.send(value) for name, value in call.items()}
    ids = np.array(call["ids"])
    ids[4, 1] = ids[7, 0] = bad
    sent["ids"] = device.send(ids)
    with pytest.raises(ContractError, match=f"expert {bad} at position 9"):
        past_the_door(device, moe, OP, dict(sent))
    out = device.send(np.zeros((18, N), call["x"].dtype))
    past_the_door(device, moe, OP, sent | {"out": out})
    got = device.fetch(out)
    assert np.isnan(got[[9, 14]].astype(np.float32)).all()
    assert_bytes(np.delete(got, [9, 14], axis=0), np.delete(want, [9, 14], axis=0))
    one = {name: device.send(value) for name, value in part(call | {"ids": ids}, slice(4, 5)).items()}
    out = device.send(np.zeros((2, N), call["x"].dtype))
    past_the_door(device, moe, OP, one | {"out": out})
    assert np.isnan(device.fetch(out)[1].astype(np.float32)).all()
    assert_bytes(device.fetch(out)[:1], want[8:9])


@pytest.mark.parametrize("name", ["x", "weight", "out"])
def test_operands_at_any_address(device, name):
    """Where no 16 bytes move at a time: the mirror's bytes if it is an operand, the same ones if it is the result."""
    call = call_of(9)
    want = run(device, call) if name == "out" else oracle.moe_grouped_gemm.mirror(**call)
    sent = {key: device.send(value) for key, value in call.items()} | {"out": device.send(np.zeros_like(want))}
    value = call.get(name, want)
    moved = device.raw(value.nbytes + 2)[2:].view(value.dtype).reshape(value.shape)
    moved[...] = device.send(np.ascontiguousarray(value))
    sent[name] = moved
    assert_bytes(device.fetch(device.call(OP, sent)), want)


def test_what_scratch_held_does_not_matter(device):
    call = call_of(40)
    want = run(device, call)
    for block in scratch.scratch._blocks.values():
        block[...] = 0xFF
    assert_bytes(run(device, call), want)


def test_a_capture_finds_its_scratch_and_waits_for_nobody():
    runtime = EmulatedRuntime()
    device, call = Emulated(runtime), call_of(21)
    sent = {name: device.send(value) for name, value in call.items()} | {"out": runtime.empty((42, N), call["x"].dtype)}
    runtime.in_capture = True
    with pytest.raises(DeviceError, match="call the op once before the capture"):
        device.call(OP, dict(sent))
    runtime.in_capture = False
    want = np.array(device.call(OP, dict(sent)))
    runtime.in_capture, runtime.read = True, None
    assert_bytes(device.call(OP, dict(sent)), want)


@pytest.mark.parametrize("high", [1, 8, 16, 64])
def test_there_is_room_for_the_most_tiles(high):
    """However the pairs fall on the experts."""
    rng = np.random.Generator(np.random.PCG64(high))
    for pairs, experts in ((1, 9), (40, 3), (700, 64), (200, 300)):
        for most in (1, 2, experts + 2):
            counts = np.bincount(rng.integers(0, most, pairs))
            assert sum(-(-int(count) // high) for count in counts) <= moe.most_tiles(pairs, experts, high)


def test_more_experts_than_a_block_can_count_are_not_sorted():
    little = EmulatedRuntime()
    little.shared_memory = lambda: moe._FIXED + 4 * (E + 2)
    call = call_of(20, kind="float32")
    want = run(Emulated(), call)
    for experts, sorts in ((E, True), (E + 1, False)):
        call["weight"] = np.resize(call["weight"], (experts, N, K))
        little.launched.clear()
        assert_bytes(run(Emulated(little), call), want)
        assert ("moe_sort_early" in little.launched) == sorts


def test_tiles_that_a_block_has_no_room_for():
    """GPUs before Hopper, and one with 99 KiB a block, take other ones, which give the same bytes."""
    before, little = EmulatedRuntime(), EmulatedRuntime()
    before.capability, little.shared_memory = lambda: (8, 0), lambda: 99 << 10
    call, plenty = call_of(300), EmulatedRuntime()
    want = run(Emulated(plenty), call)
    assert_bytes(run(Emulated(before), call), want)
    assert_bytes(run(Emulated(little), call), want)
    launched = [runtime.launched[-1] for runtime in (plenty, before, little)]
    assert launched == ["moe_wide_bf16", "moe_128_bf16", "moe_64_bf16"]


@pytest.mark.parametrize("experts", [40, 300, 520])
def test_how_many_tokens_share_a_block_changes_no_route(device, experts, monkeypatch):
    call = {"logits": draw((9, experts), "bfloat16", 1), "top_k": 4, "num_expert_group": 2, "topk_group": 1}
    routes = lambda: [np.array(device.fetch(one)) for one in device.call("moe_router_topk", call | there)]
    there = {"logits": device.send(call["logits"])}
    want = routes()
    monkeypatch.setattr(moe_routing, "MULTIPROCESSORS", 0)
    for one, other in zip(routes(), want, strict=True):
        assert_bytes(one, other)


def test_logits_that_no_block_has_room_for():
    little = EmulatedRuntime()
    little.shared_memory = lambda: 8192
    with pytest.raises(ContractError, match="1100 experts, want as many as a GPU's shared memory has room for"):
        Emulated(little).call("moe_router_topk", {"logits": draw((2, 1100), "float32", 1), "top_k": 2})


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_sums_at_any_address(device, kind):
    x = draw((5, 3, 16), kind, 4)
    moved = device.raw(x.nbytes + 4)[4:].view(x.dtype).reshape(x.shape)
    moved[...] = device.send(x)
    assert_bytes(device.fetch(device.call("moe_sum", {"x": moved})), oracle.moe_sum.mirror(x))


@pytest.mark.parametrize(
    "op, change, message",
    [
        (OP, {"x": lambda x: x[:5]}, "5 rows"),
        (OP, {"ids": lambda ids: ids.astype(np.int64)}, "int64"),
        (OP, {"weight": lambda w: w[:, :, 1:].copy()}, "K"),
        (OP, {"out": lambda out: np.empty((18, N), np.float32)}, r"moe_grouped_gemm\(out\): got float32"),
    ],
    ids=["rows", "ids", "depth", "out"],
)
def test_refused_calls(device, op, change, message):
    call = call_of(9)
    for name, edit in change.items():
        call[name] = edit(call.get(name))
    with pytest.raises(ContractError, match=message):
        run(device, call, op)
