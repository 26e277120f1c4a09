"""Around the rotations' kernels: views of a merged projection, many heads a thread, bad positions and slots, graphs."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import DeviceError, rope, rope_fused, rope_posts, runtime
from vtlab.device.rope_posts import posts
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .device_run import Emulated, tupled
from .emulated_arrays import RecordingRuntime
from .emulation import EmulatedRuntime, compiler
from .rope_loops import table
from .scalar import draw
from .side_streams import side_stream


def past_the_door(device, function, **arguments):
    """The launcher itself: the door sees the emulated GPU's arrays and would refuse what a GPU alone can know."""
    if isinstance(device, Emulated):
        with runtime.using(device.runtime):
            return function(**arguments)
    return device.call(function.__name__, arguments)


def assert_all(device, got, want):
    for index, (one, other) in enumerate(zip(tupled(got), tupled(want), strict=True)):
        assert_bytes(device.fetch(one), other, f"result {index}")


@pytest.mark.parametrize("shift", [0, 1, 8])
@pytest.mark.parametrize("gap", [0, 3, 8])
def test_heads_of_a_merged_projection(device, shift, gap):
    """q, k and v as they lie in a projection's rows, at any alignment and distance, MLA's trailing lanes included."""
    T, Hq, Hk, D = 5, 4, 2, 32
    host = draw((T, shift + (Hq + 2 * Hk) * D + gap), "bfloat16", 1)
    sent, where, cache = device.send(host), np.int64([8, 0, 3, 3, 7]), table(9, 32)
    slots, pages = np.int64([3, -1, 0, 5]), draw((2, 2, 3, Hk, D), "bfloat16", 2)

    def parts(rows):
        heads = rows[:, shift : shift + (Hq + 2 * Hk) * D].reshape(T, -1, D)
        return heads[:, :Hq], heads[:, Hq : Hq + Hk], heads[:, Hq + Hk :]

    send = {"positions": device.send(where), "cos_sin_cache": device.send(cache)}
    (q, k, v), (dq, dk, dv) = parts(host), parts(sent)
    got = device.call("rope_from_cache", {"q": dq, "k": dk, **send})
    assert_all(device, got, oracle.rope_from_cache.mirror(q, k, where, cache))
    got = device.call("rope_neox", {"q": dq, "k": dk, "positions": send["positions"], "base": 1e6, "rotary_dim": 16})
    assert_all(device, got, oracle.rope_neox.mirror(q, k, where, base=1e6, rotary_dim=16))
    lanes = slice(shift, shift + 16)
    narrow = table(9, 16)
    got = device.call("rope_from_cache", {"q": dq[..., lanes], "k": None, "positions": send["positions"],
                                          "cos_sin_cache": device.send(narrow)})  # fmt: skip
    assert_all(device, got, oracle.rope_from_cache.mirror(q[..., lanes].copy(), None, where, narrow))
    left = pages.copy()
    want = oracle.rope_and_cache.mirror(q, k, v.copy(), where, cache, left[:, 0], left[:, 1], slots)
    kept = device.send(pages)
    got = device.call("rope_and_cache", {"q": dq, "k": dk, "v": dv, **send, "key_cache": kept[:, 0],
                                         "value_cache": kept[:, 1], "slot_mapping": device.send(slots)})  # fmt: skip
    assert_all(device, got, want)
    assert_bytes(device.fetch(kept), left, "pages")


@pytest.mark.parametrize("shift", [0, 1, 8])
def test_strided_rows_in_front_of_the_norm(device, shift):
    host = draw((4, shift + 5 * 64 + 8), "bfloat16", 3)
    sent, weights = device.send(host), [draw((64,), "float32", seed) for seed in (4, 5)]
    cut = lambda rows, first, heads: rows[:, shift + first * 64 : shift + (first + heads) * 64]
    cos_sin, positions = table(4, 32), np.int32([3, 1, 0, 3])
    got = device.call("attn_qk_norm_rope_gate", {
        "qgate": cut(sent, 0, 4), "kf": cut(sent, 4, 1), "q_norm": device.send(weights[0]),
        "k_norm": device.send(weights[1]), "cos_sin": device.send(cos_sin),
    })  # fmt: skip
    assert_all(device, got, oracle.attn_qk_norm_rope_gate.mirror(cut(host, 0, 4), cut(host, 4, 1), *weights, cos_sin))
    how = {"num_heads_q": 3, "num_heads_k": 1, "num_heads_v": 1, "head_dim": 64}
    got = device.call("fused_qk_norm_rope", {
        "qkv": cut(sent, 0, 5), "q_weight": device.send(weights[0]), "k_weight": device.send(weights[1]),
        "cos_sin_cache": device.send(cos_sin), "positions": device.send(positions), **how,
    })  # fmt: skip
    want = oracle.fused_qk_norm_rope.mirror(cut(host, 0, 5), *weights, cos_sin, positions, **how)
    assert_all(device, got, want)


@pytest.mark.parametrize("few, some", [(0, 0), (0, 1 << 40)], ids=["most heads a thread", "two heads a thread"])
@pytest.mark.parametrize("D", [32, 20])
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_several_heads_a_thread(device, monkeypatch, few, some, D, kind):
    """What large batches take, in small: head counts that no thread's share divides."""
    monkeypatch.setattr(rope_posts, "_FEW", few)
    monkeypatch.setattr(rope_posts, "_SOME", some)
    T, cache = 7, table(9, 16)
    where = np.random.Generator(np.random.PCG64(1)).integers(0, 9, T)
    for Hq, Hk in ((5, 2), (1, 1), (37, 4)):
        q, k, v = (draw((T, heads, D), kind, heads) for heads in (Hq, Hk, Hk))
        send = {name: device.send(array) for name, array in (("q", q), ("k", k), ("positions", where))}
        for how in ({}, {"is_neox": False}, {"rounding": "vllm"}):
            got = device.call("rope_from_cache", {**send, "cos_sin_cache": device.send(cache), **how})
            assert_all(device, got, oracle.rope_from_cache.mirror(q, k, where, cache, **how))
        got = device.call("rope_neox", {**send, "base": 1e4, "rotary_dim": 16})
        assert_all(device, got, oracle.rope_neox.mirror(q, k, where, base=1e4, rotary_dim=16))
        pages, slots = draw((2, 2, 5, Hk, D), kind, 8), np.arange(9, 9 - T, -1)
        left, kept = pages.copy(), device.send(pages)
        for is_neox in (True, False):
            want = oracle.rope_and_cache.mirror(q, k, v, where, cache, *left, slots, is_neox=is_neox)
            got = device.call("rope_and_cache", {
                **send, "v": device.send(v), "cos_sin_cache": device.send(cache), "key_cache": kept[0],
                "value_cache": kept[1], "slot_mapping": device.send(slots), "is_neox": is_neox,
            })  # fmt: skip
            assert_all(device, got, want)
            assert_bytes(device.fetch(kept), left)
        norms = [draw((D,), "float32", seed) for seed in (4, 5)]
        qkv, how = draw((T, (Hq + 2 * Hk) * D), kind, 6), dict(zip(_COUNTS, (Hq, Hk, Hk, D)))
        got = device.call("fused_qk_norm_rope", {
            "qkv": device.send(qkv), "q_weight": device.send(norms[0]), "k_weight": device.send(norms[1]),
            "cos_sin_cache": device.send(cache), "positions": send["positions"], **how,
        })  # fmt: skip
        assert_all(device, got, oracle.fused_qk_norm_rope.mirror(qkv, *norms, cache, where, **how))
        chunks = draw((T, 2 * Hq * D), kind, 7), draw((T, Hk * D), kind, 8), *norms, cache[where]
        got = device.call("attn_qk_norm_rope_gate", {
            name: device.send(array) for name, array in zip(("qgate", "kf", "q_norm", "k_norm", "cos_sin"), chunks)
        })  # fmt: skip
        assert_all(device, got, oracle.attn_qk_norm_rope_gate.mirror(*chunks))


_COUNTS = "num_heads_q", "num_heads_k", "num_heads_v", "head_dim"


@pytest.mark.parametrize("tokens, heads, width, half, wide", [
    (8192, 40, 128, 64, True), (1, 40, 128, 64, True), (16, 129, 192, 32, True), (3, 8, 4096, 2048, False),
    (100000, 1, 64, 32, True), (7, 3, 2, 1, False), (256, 28, 256, 32, True),
])  # fmt: skip
@pytest.mark.parametrize("most", [2, 4])
def test_every_unit_of_every_head_has_one_thread(tokens, heads, width, half, wide, most):
    grid, (across, down), (lanes, splits, chunks) = posts(tokens, heads, width, half, wide, most)
    group = 8 if wide else 1
    units = half // group + -(-(width - 2 * half) // group // 2)
    assert across * down <= 256 and down % lanes == 0 and across * chunks >= units > across * (chunks - 1)
    assert grid == -(-tokens // (down // lanes)) * splits * chunks
    taken = [lane + j * lanes * splits for lane in range(lanes * splits) for j in range(most)]
    assert len(set(taken)) == len(taken) and set(range(heads)) <= set(taken)
    assert splits == 1 or down == lanes


NAN_ROW = np.int64([2, 9, 0, -1, 5])


def test_a_bad_position_is_named_before_anything_is_written(device):
    q, v, cache = draw((5, 2, 24), "bfloat16", 1), draw((5, 2, 24), "bfloat16", 2), table(9, 16)
    sent = {"q": device.send(q), "k": device.send(v), "positions": device.send(NAN_ROW)}
    table_ = {"cos_sin_cache": device.send(cache)}
    pages = device.send(draw((2, 2, 3, 2, 24), "bfloat16", 3))
    before = device.fetch(pages).copy()
    stored = {"v": device.send(v), "key_cache": pages[0], "value_cache": pages[1]}
    slots = device.send(np.int64([0, 1]))
    with pytest.raises(ContractError, match=r"rope_from_cache\(positions\): got 9, want in \[0, 9\)"):
        past_the_door(device, rope.rope_from_cache, **sent, **table_)
    with pytest.raises(ContractError, match=r"rope_neox\(positions\): got -1, want >= 0"):
        past_the_door(device, rope.rope_neox, **sent, base=1e4, rotary_dim=8)
    with pytest.raises(ContractError, match=r"rope_cos_sin_cache\(positions\): got -1"):
        past_the_door(device, rope.rope_cos_sin_cache, positions=sent["positions"], base=1e4, rotary_dim=8)
    with pytest.raises(ContractError, match=r"rope_and_cache\(positions\): got 9"):
        past_the_door(device, rope_fused.rope_and_cache, **sent, **table_, **stored, slot_mapping=slots)
    good = {**sent, "positions": device.send(np.int64([0, 1, 2, 3, 4]))}
    with pytest.raises(ContractError, match=r"rope_and_cache\(slot_mapping\): got 6, want slots < 6"):
        past_the_door(device, rope_fused.rope_and_cache, **good, **table_, **stored,
                      slot_mapping=device.send(np.int64([0, 6])))  # fmt: skip
    weight = device.send(np.ones(24, np.float32))
    with pytest.raises(ContractError, match=r"fused_qk_norm_rope\(positions\): got 9"):
        past_the_door(device, rope_fused.fused_qk_norm_rope, qkv=device.send(draw((5, 72), "bfloat16", 4)),
                      q_weight=weight, k_weight=weight, **table_, positions=sent["positions"], num_heads_q=1,
                      num_heads_k=1, num_heads_v=1, head_dim=24)  # fmt: skip
    assert_bytes(device.fetch(pages), before)


@pytest.mark.parametrize("D", [32, 20])
def test_into_out_a_bad_position_makes_nan_and_a_bad_slot_stores_nothing(device, D):
    q, k, v = (draw((5, 2, D), "bfloat16", seed) for seed in range(3))
    cache, good = table(9, 16), np.where((NAN_ROW >= 0) & (NAN_ROW < 9), NAN_ROW, 0)
    slots, pages = np.int64([7, 1, 6, 0]), draw((2, 2, 3, 2, D), "bfloat16", 3)
    left = pages.copy()
    want = oracle.rope_and_cache.mirror(q, k, v, good, cache, *left, np.int64([-1, 1, -1, 0]))
    outs, kept = tuple(device.send(np.zeros_like(q)) for _ in range(2)), device.send(pages)
    sent = {"q": device.send(q), "k": device.send(k), "positions": device.send(NAN_ROW),
            "cos_sin_cache": device.send(cache)}  # fmt: skip
    past_the_door(device, rope_fused.rope_and_cache, **sent, v=device.send(v), key_cache=kept[0], value_cache=kept[1],
                  slot_mapping=device.send(slots), out=outs)  # fmt: skip
    lost = good != NAN_ROW
    for got, expected in zip(map(device.fetch, outs), want):
        assert np.isnan(got[lost, :, :16].astype(np.float32)).all()
        assert_bytes(got[~lost], expected[~lost])
        assert_bytes(got[..., 16:], expected[..., 16:])
    found = device.fetch(kept)
    assert np.isnan(found[0, 0, 1, :, :16].astype(np.float32)).all()
    found[0, 0, 1, :, :16] = left[0, 0, 1, :, :16]
    found[0, 0, 0, :, :16] = left[0, 0, 0, :, :16]
    assert_bytes(found, left)
    past_the_door(device, rope.rope_neox, q=sent["q"], k=sent["k"], positions=sent["positions"], base=1e4,
                  rotary_dim=16, out=outs)  # fmt: skip
    assert np.isnan(device.fetch(outs[1])[3, :, :16].astype(np.float32)).all()


def test_pages_must_be_two(device):
    x, pages = device.send(draw((2, 1, 8), "float32", 1)), device.send(np.zeros((2, 2, 1, 8), np.float32))
    with pytest.raises(ContractError, match="value_cache"):
        past_the_door(device, rope_fused.rope_and_cache, q=x, k=x, v=x, positions=device.send(np.int64([0, 1])),
                      cos_sin_cache=device.send(table(3, 8)), key_cache=pages, value_cache=pages,
                      slot_mapping=device.send(np.int64([0, 1])))  # fmt: skip


def test_frequencies_are_sent_once_and_never_in_a_capture():
    if compiler() is None:
        pytest.skip("emulation needs a C++ compiler")
    machine = RecordingRuntime()
    with runtime.using(machine):
        positions = machine.send(np.int64([0, 5]))
        out = machine.empty((2, 8), np.float32)
        machine.begin_capture()
        with pytest.raises(DeviceError, match="call the op once before the capture"):
            rope.rope_cos_sin_cache(positions, base=3e4, rotary_dim=8, out=out)
        machine.end_capture()
        rope.rope_cos_sin_cache(positions, base=3e4, rotary_dim=8, out=out)
        sends = machine.sends
        machine.begin_capture()
        rope.rope_cos_sin_cache(positions, base=3e4, rotary_dim=8, out=out)
        graph = machine.end_capture()
        assert machine.sends == sends == 2 and machine.waited == 1
        positions[...] = [7, 1 << 33]
        machine.replay(graph)
        want = oracle.rope_cos_sin_cache(np.int64([7, 1 << 33]), base=3e4, rotary_dim=8)
        assert_bytes(np.asarray(out), want)
        rope.rope_cos_sin_cache(positions, base=3e4, rotary_dim=10, out=machine.empty((2, 10), np.float32))
        assert machine.sends == sends + 1


def test_heads_wider_than_shared_memory_are_declined():
    with runtime.using(EmulatedRuntime()):
        x = np.zeros((1, 1, 13000), np.float32)
        assert rope.rope_neox(x, x, np.zeros(1, np.int32), base=1e4, rotary_dim=13000) is NotImplemented


def test_a_captured_graph_rotates_at_new_positions(device):
    if isinstance(device, Emulated):
        pytest.skip("graphs need a GPU: --device cuda")
    cupy, T = device.cupy, 64
    q, k, v = (draw((T, heads, 128), "bfloat16", heads) for heads in (8, 2, 2))
    sent = {name: device.send(array) for name, array in (("q", q), ("k", k), ("v", v))}
    cache, where, slots = table(500, 128), device.send(np.zeros(T, np.int64)), device.send(np.arange(T))
    rows, pages, outs = device.send(cache), device.send(np.zeros((2, 8, 16, 2, 128), q.dtype)), [
        tuple(cupy.empty_like(sent[name]) for name in ("q", "k")) for _ in range(2)
    ]  # fmt: skip
    stream = side_stream(cupy)

    def step():
        device.call("rope_neox", {"q": sent["q"], "k": sent["k"], "positions": where, "base": 1e6, "rotary_dim": 128,
                                  "out": outs[0]})  # fmt: skip
        device.call("rope_and_cache", {**sent, "positions": where, "cos_sin_cache": rows, "key_cache": pages[0],
                                       "value_cache": pages[1], "slot_mapping": slots, "out": outs[1]})  # fmt: skip

    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for seed in range(3):
            host = np.random.Generator(np.random.PCG64(seed)).integers(0, 500, T)
            where[...] = device.send(host)
            graph.launch(stream)
            stream.synchronize()
            left = np.zeros((2, 8, 16, 2, 128), q.dtype)
            want = oracle.rope_and_cache.mirror(q, k, v, host, cache, *left, np.arange(T))
            assert_all(device, outs[1], want)
            assert_bytes(device.fetch(pages), left)
            assert_all(device, outs[0], oracle.rope_neox.mirror(q, k, host, base=1e6, rotary_dim=128))
