"""Around attention's kernels: layouts of pages, rows alone and in batches, splits, what nobody sees, graphs."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import attention as launcher
from vtlab.ops.errors import ContractError

from .attention_loops import LAYOUTS, paged, request
from .compare import assert_bytes
from .device_run import Emulated
from .scalar import draw
from .side_streams import side_stream

OPTIONS = {"scale": 0.2, "return_lse": True}


def sent(device, call: dict) -> dict:
    """The call's arrays on the device, views of one allocation as views of one allocation."""
    moved = {}
    for name, value in call.items():
        base = value.base if isinstance(value, np.ndarray) else None
        if base is not None and name.endswith("cache"):
            while base.base is not None:
                base = base.base
            whole = moved.setdefault(id(base), device.send(base))
            offset = (value.ctypes.data - base.ctypes.data) // value.itemsize
            flat = whole.reshape(-1)[offset:]
            moved[name] = as_strided(flat, value.shape, value.strides)
        else:
            moved[name] = device.send(value)
    return {name: value for name, value in moved.items() if isinstance(name, str)}


def as_strided(flat, shape, strides):
    if isinstance(flat, np.ndarray):
        return np.lib.stride_tricks.as_strided(flat, shape, strides)
    import cupy

    return cupy.lib.stride_tricks.as_strided(flat, shape, strides)


def run(device, call: dict, **options) -> tuple[np.ndarray, np.ndarray]:
    out, lse = device.call("paged_attention", sent(device, call) | OPTIONS | options)
    return device.fetch(out), device.fetch(lse)


def same(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert_bytes(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("D, BS, kind", [(64, 16, "bfloat16"), (20, 5, "float16"), (12, 1, "float32")])
def test_every_layout_of_pages(device, layout, D, BS, kind):
    """Pages dealt at random, what no key fills NaN, entries that no key needs garbage; K and V of one allocation."""
    call = paged([request(2, 70, 4, 2, D, kind), request(1, 3, 4, 2, D, kind, 9)], BS, layout, garbage=1 << 30)
    same(run(device, call), oracle.paged_attention.mirror(**call, **OPTIONS))


@pytest.mark.parametrize("window", [None, (140, 0), (3, 0)])
def test_a_row_has_its_bytes_in_every_batch(device, window):
    """As one of a long prompt, alone as a decode step, between others: one row, one result."""
    q, k, v = request(40, 300, 4, 2, 32, "bfloat16")
    other = request(34, 60, 4, 2, 32, "bfloat16", 50)
    whole = run(device, paged([(q, k, v)], 16), window=window)
    for i in (0, 1, 20, 39):
        alone = (q[i : i + 1], k[: 261 + i], v[: 261 + i])
        row = whole[0][i : i + 1], whole[1][:, i : i + 1]
        same(run(device, paged([alone], 8), window=window), row)
        out, lse = run(device, paged([other, alone, other], 16), window=window)
        same((out[34:35], lse[:, 34:35]), row)


@pytest.mark.parametrize("blocks", [1, 30, 10**6])
def test_however_many_blocks_share_a_row(device, blocks, monkeypatch):
    monkeypatch.setattr(launcher, "MULTIPROCESSORS", blocks)
    call = paged([request(1, 700, 4, 1, 64, "bfloat16"), request(1, 40, 4, 1, 64, "bfloat16", 5)], 16)
    same(run(device, call), oracle.paged_attention.mirror(**call, **OPTIONS))
    monkeypatch.setattr(launcher, "_PARTIAL", 0)
    same(run(device, call), oracle.paged_attention.mirror(**call, **OPTIONS))


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_those_who_see_it(device, rows, bad):
    """A key and a value inside a chunk that rows see in part, through the kernels of few and of many rows."""
    q, k, v = request(rows, 160, 4, 2, 16, "bfloat16")
    clean = paged([(q, k, v)], 16)
    v[155, 0, 3] = v[120, 1, 5] = k[157, 1, 0] = bad
    v[158, 0, 3] = -bad
    call = paged([(q, k, v)], 16)
    got = run(device, call, window=(6, 0))
    with np.errstate(all="ignore"):
        want = oracle.paged_attention.mirror(**call, **OPTIONS, window=(6, 0))
        before = oracle.paged_attention.mirror(**clean, **OPTIONS, window=(6, 0))
    for a, b in zip(got, want):
        finite = np.isfinite(b.astype(np.float32))
        assert np.isnan(a.astype(np.float32))[np.isnan(b.astype(np.float32))].all()
        assert_bytes(np.where(finite, a, 0).astype(a.dtype), np.where(finite, b, 0).astype(b.dtype))
    if rows == 40:
        first = 35  # of this row key 155 is the newest
        assert not np.isfinite(got[0][first, :2, 3].astype(np.float32)).any()
        assert_bytes(got[0][:first, :2], before[0][:first, :2])


def test_heads_that_are_too_wide_and_results_that_overlap_are_refused(device):
    q, k, v = (device.send(x) for x in request(1, 1, 1, 1, 520))
    with pytest.raises(ContractError, match="heads of 520, want at most 512"):
        device.call("attention", {"q": q, "k": k, "v": v, "scale": 1.0})
    q, k, v = (device.send(x) for x in request(2, 2, 1, 1, 8))
    with pytest.raises(ContractError, match="memory shared with another"):
        device.call("attention", {"q": q, "k": k, "v": v, "scale": 1.0, "out": q})


@pytest.mark.parametrize("kind, D, gap", [("bfloat16", 64, 8), ("bfloat16", 64, 1), ("float32", 12, 3)])
def test_the_merge_of_padded_heads(device, kind, D, gap):
    wide = [draw((5, 3, D + gap), kind, seed) for seed in (1, 2)]
    lses = [3 * draw((3, 5), "float32", seed) for seed in (3, 4)]
    want = oracle.merge_attn_states.mirror(wide[0][..., :D], lses[0], wide[1][..., :D], lses[1])
    sides = [device.send(x)[..., :D] for x in wide]
    names = ("prefix_out", "prefix_lse", "suffix_out", "suffix_lse")
    call = dict(zip(names, (sides[0], device.send(lses[0]), sides[1], device.send(lses[1]))))
    same([device.fetch(x) for x in device.call("merge_attn_states", call)], want)


def test_a_captured_decode_step_follows_its_metadata(device):
    """One graph, replayed while sequences grow: lengths and tables are read on the device."""
    if isinstance(device, Emulated):
        pytest.skip("graphs need a GPU: --device cuda")
    cupy = device.cupy
    call = paged([request(1, 700, 8, 2, 64, "bfloat16"), request(1, 130, 8, 2, 64, "bfloat16", 5)], 16)
    arrays = sent(device, call)
    out = cupy.empty_like(arrays["q"]), cupy.empty((8, 2), np.float32)
    stream = side_stream(cupy)
    with stream:
        device.call("paged_attention", arrays | OPTIONS | {"out": out})
        stream.synchronize()
        stream.begin_capture()
        device.call("paged_attention", arrays | OPTIONS | {"out": out})
        graph = stream.end_capture()
        for lengths in ((700, 130), (600, 1), (129, 128)):
            now = call | {"seq_lens": np.array(lengths, np.int32)}
            arrays["seq_lens"][...] = cupy.asarray(now["seq_lens"])
            graph.launch(stream)
            stream.synchronize()
            same([device.fetch(x) for x in out], oracle.paged_attention.mirror(**now, **OPTIONS))
