"""Around the paged cache's kernels: the layouts that vLLM uses, strided operands, lists that lie, graphs."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import kv_blocks, kv_cache, kv_latent, runtime
from vtlab.device.units import grid_of, heads_of, merged
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .device_doors import assert_refused, past_the_door
from .device_run import Emulated
from .emulation import compiler
from .side_streams import side_stream
from .test_kv_cache import bits, slots

ALLOCATED = {
    "halves": lambda NB, BS, H, D: (NB, 2, BS, H, D), "nhd": lambda NB, BS, H, D: (NB, BS, H, 2 * D),
    "hnd": lambda NB, BS, H, D: (NB, H, BS, 2 * D), "cpu": lambda NB, BS, H, D: (NB, H, 2 * BS, D),
}  # fmt: skip


def paged(layout, whole, D):
    """The key and value views [NB, BS, H, D] of an allocation, in each of vLLM's layouts."""
    if layout == "halves":
        return whole[:, 0], whole[:, 1]
    turned = whole if layout == "nhd" else whole.swapaxes(1, 2)
    if layout == "cpu":
        return turned[:, : turned.shape[1] // 2], turned[:, turned.shape[1] // 2 :]
    return turned[..., :D], turned[..., D:]


@pytest.mark.parametrize("layout", ALLOCATED)
@pytest.mark.parametrize("H, D, kind, shift", [
    (2, 128, "bfloat16", 0), (2, 72, "float16", 8), (3, 8, "bfloat16", 1), (2, 20, "bfloat16", 4), (1, 5, "float32", 1),
])  # fmt: skip
def test_every_layout_of_pages(device, layout, H, D, kind, shift):
    """Keys and values interleaved in one allocation, out of a packed projection whose rows start anywhere."""
    NB, BS, T, width = 5, 4, 9, H * D
    host, fused = bits(ALLOCATED[layout](NB, BS, H, D), kind, 1), bits((T, 2 * width + shift + 3), kind, 2)
    where = slots(T - 1, NB * BS, 3, skip=(2, 5))

    def arguments(whole, packed):
        parts = (packed[:, at : at + width].reshape(T, H, D) for at in (shift, shift + width))
        return dict(zip(("key", "value", "key_cache", "value_cache"), (*parts, *paged(layout, whole, D))))

    whole, packed = device.send(host), device.send(fused)
    device.call("reshape_and_cache", arguments(whole, packed) | {"slot_mapping": device.send(where)})
    oracle.reshape_and_cache(**arguments(host, fused), slot_mapping=where)
    assert_bytes(device.fetch(whole), host)
    assert_bytes(device.fetch(packed), fused)


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_packed_pages_from_strided_rows(device, kind, shift):
    NB, BS, H, D, T = 3, 4, 2, 16, 7
    x = 16 // bits((), kind, 0).dtype.itemsize
    fused, where = bits((T, 2 * H * D + shift), kind, 2), slots(T, NB * BS, 3, skip=(1,))
    caches = bits((NB, H, D // x, BS, x), kind, 4), bits((NB, H, D, BS), kind, 5)

    def arguments(packed, keys, values):
        parts = (packed[:, at : at + H * D].reshape(T, H, D) for at in (shift, shift + H * D))
        return dict(zip(("key", "value", "key_cache", "value_cache"), (*parts, keys, values)))

    sent = [device.send(cache) for cache in caches]
    device.call(
        "reshape_and_cache_xpacked", arguments(device.send(fused), *sent) | {"slot_mapping": device.send(where)}
    )
    oracle.reshape_and_cache_xpacked(**arguments(fused, *caches), slot_mapping=where)
    for got, want in zip(sent, caches):
        assert_bytes(device.fetch(got), want)


@pytest.mark.parametrize("gap", [0, 3, 8])
def test_latent_pages_with_gaps_from_columns_of_a_projection(device, gap):
    fused, pages, where = bits((6, 40 + gap), "bfloat16", 1), bits((3, 5, 40 + gap), "bfloat16", 2), slots(6, 12, 3)

    def arguments(fused, pages):
        return {"kv_c": fused[:, gap : gap + 32], "k_pe": fused[:, gap + 32 : gap + 40],
                "kv_cache": pages[:, :4, gap:]}  # fmt: skip

    sent = device.send(pages)
    device.call("concat_and_cache_mla", arguments(device.send(fused), sent) | {"slot_mapping": device.send(where)})
    oracle.concat_and_cache_mla(**arguments(fused, pages), slot_mapping=where)
    assert_bytes(device.fetch(sent), pages)


@pytest.mark.parametrize("layout", ALLOCATED)
@pytest.mark.parametrize("op", ["copy_blocks", "cp_gather_cache"])
def test_blocks_and_gathers_of_strided_pages(device, layout, op):
    """Values alone are moved; the keys between them stay."""
    host, dst = bits(ALLOCATED[layout](6, 4, 3, 8), "bfloat16", 1), bits((9, 3, 10), "bfloat16", 2)

    def arguments(whole, dst, put):
        values = paged(layout, whole, 8)[1]
        if op == "copy_blocks":
            return {"cache": values, "block_mapping": put(np.int64([[0, 3], [3, 5], [1, 2]]))}
        return {"src": values, "dst": dst[..., 1:9], "block_table": put(np.int32([[5, 0], [4, 9]])),
                "cu_seq_lens": put(np.int32([0, 6, 8]))}  # fmt: skip

    whole, into = device.send(host), device.send(dst)
    device.call(op, arguments(whole, into, device.send))
    getattr(oracle, op)(**arguments(host, dst, lambda value: value))
    assert_bytes(device.fetch(whole), host)
    assert_bytes(device.fetch(into), dst)


def test_blocks_of_more_dimensions_than_a_launch_takes(device):
    host = bits((5, 3, 4, 2, 6, 2, 5), "float16", 1)
    whole, ids = device.send(host), np.int64([[0, 4], [2, 0]])
    cut = lambda array: array[:, :2, :, :, 1:4, :, :3]
    device.call("copy_blocks", {"cache": cut(whole), "block_mapping": device.send(ids)})
    oracle.copy_blocks(cut(host), ids)
    assert_bytes(device.fetch(whole), host)


@pytest.mark.parametrize("seed", range(6))
def test_lists_are_followed_in_their_order(device, seed):
    """Blocks and ranges that overwrite and feed each other, within one buffer and between two."""
    rng = np.random.Generator(np.random.PCG64(seed))
    pairs = rng.integers(0, 9, (rng.integers(2, 12), 2))
    starts, sizes = rng.integers(0, 600, (2, 5)) * (4 if seed % 2 else 1), rng.integers(0, 4000, 5)
    if seed % 3 == 0:  # blocks
        starts, sizes = 88 * rng.integers(0, 9, (2, 12)), np.full(12, 88)
    for same in (True, False):
        for op, lists in (("copy_blocks", [pairs]), ("swap_blocks", [pairs]), ("swap_blocks_batch", [*starts, sizes])):
            buffers = [bits((9, 5, 88), "bfloat16", 1)]
            if not same and op != "copy_blocks":
                buffers.append(bits((7, 1200), "bfloat16", 2))
            sent = [device.send(buffer) for buffer in buffers]
            names = {"copy_blocks": ("cache", "block_mapping"), "swap_blocks": ("src", "dst", "block_mapping"),
                     "swap_blocks_batch": ("src", "dst", "src_offsets", "dst_offsets", "sizes")}[op]  # fmt: skip
            count = len(names) - len(lists)
            extra = {"block_size_bytes": 880} if op == "swap_blocks" else {}
            both = lambda arrays: [arrays[i % len(arrays)] for i in range(count)]
            device.call(op, dict(zip(names, [*both(sent), *map(device.send, lists)])) | extra)
            getattr(oracle, op)(**dict(zip(names, [*both(buffers), *lists])), **extra)
            for got, want in zip(sent, buffers):
                assert_bytes(device.fetch(got), want, f"{op}, seed {seed}, same {same}")


def _written():
    key = bits((3, 1, 8), "bfloat16", 1)
    return {"key": key, "value": bits((3, 1, 8), "bfloat16", 2), "key_cache": bits((2, 4, 1, 8), "bfloat16", 3),
            "value_cache": bits((2, 4, 1, 8), "bfloat16", 4), "slot_mapping": np.int64([0, 5, 7])}  # fmt: skip


def _packed():
    return _written() | {
        "key_cache": bits((2, 1, 1, 4, 8), "bfloat16", 3),
        "value_cache": bits((2, 1, 8, 4), "bfloat16", 4),
    }


def _latent():
    return {"kv_c": bits((3, 8), "bfloat16", 1), "k_pe": bits((3, 8), "bfloat16", 2),
            "kv_cache": bits((2, 4, 16), "bfloat16", 3), "slot_mapping": np.int64([0, 5, 7])}  # fmt: skip


def _copied():
    return {"cache": bits((4, 6), "float32", 1), "block_mapping": np.int64([[0, 1], [2, 3]])}


def _swapped():
    return {"src": bits((4, 6), "float32", 1), "dst": bits((3, 6), "float32", 2), "block_size_bytes": 24,
            "block_mapping": np.int64([[0, 1], [3, 2]])}  # fmt: skip


def _ranged():
    return {"src": bits((100,), "uint8", 1), "dst": bits((80,), "uint8", 2), "src_offsets": np.int64([0, 50]),
            "dst_offsets": np.int64([0, 50]), "sizes": np.int64([10, 30])}  # fmt: skip


def _gathered():
    return {"src": bits((5, 2, 3), "bfloat16", 1), "dst": bits((9, 3), "bfloat16", 2), "seq_starts": np.int32([0, 0]),
            "block_table": np.int32([[4, 0, 1], [2, 3, 1]]), "cu_seq_lens": np.int32([0, 3, 8])}  # fmt: skip


def _mla():
    given = _gathered()
    return {"dst": given.pop("dst"), "src_cache": given.pop("src"), **given, "num_tokens": 8,
            "token_to_seq": np.int32([0] * 3 + [1] * 5)}  # fmt: skip


LIES = [
    *((module, op, made, {"slot_mapping": np.int64([0, 8, 7])}, {"slot_mapping": np.int64([0, -1, 7])}, "slot_mapping")
      for module, op, made in ((kv_cache, "reshape_and_cache", _written), (kv_latent, "concat_and_cache_mla", _latent),
                               (kv_cache, "reshape_and_cache_xpacked", _packed))),
    *((kv_blocks, op, made, {"block_mapping": np.int64([[0, 1], pair])}, {"block_mapping": np.int64([[0, 1]])},
       "block_mapping")
      for op, made, room in (("copy_blocks", _copied, 4), ("swap_blocks", _swapped, 3))
      for pair in ((9, 0), (-1, 0), (2, room), (2, -1))),
    *((kv_blocks, "swap_blocks_batch", _ranged, {name: np.int64([wrong, values[1]])},
       {"sizes": np.int64([0, 30])}, name)
      for name, wrong, values in (("sizes", -1, (10, 30)), ("src_offsets", 91, (0, 50)), ("dst_offsets", 71, (0, 50)),
                                  ("src_offsets", -1, (0, 50)), ("dst_offsets", 2**63 - 5, (0, 50)))),
    *((module, op, made, {"block_table": np.int32([[4, 0, 1], [2, 3, wrong]])},
       {"cu_seq_lens": np.int32([0, 3, 7])}, "block_table")
      for module, op, made in ((kv_blocks, "cp_gather_cache", _gathered), (kv_latent, "gather_mla_cache", _mla))
      for wrong in (5, -1)),
    *((module, op, made, {"seq_starts": np.int32([0, wrong])}, {"cu_seq_lens": np.int32([0, 3, 3])}, argument)
      for module, op, made in ((kv_blocks, "cp_gather_cache", _gathered), (kv_latent, "gather_mla_cache", _mla))
      for wrong, argument in ((1, "seq_starts"), (-2, "seq_starts"), (6, "block_table"))),
    (kv_latent, "gather_mla_cache", _mla, {"token_to_seq": np.int32([0] * 3 + [1] * 4 + [2])}, {"num_tokens": 7},
     "token_to_seq"),
    (kv_latent, "gather_mla_cache", _mla, {"token_to_seq": np.int32([0] * 3 + [1] * 4 + [-1])}, {"num_tokens": 7},
     "token_to_seq"),
    (kv_latent, "gather_mla_cache", _mla, {"cu_seq_lens": np.int32([0, 8, 8])}, None, "token_to_seq"),
    *((module, op, made, {"cu_seq_lens": np.int32(bounds)}, None, "cu_seq_lens")
      for module, op, made in ((kv_blocks, "cp_gather_cache", _gathered), (kv_latent, "gather_mla_cache", _mla))
      for bounds in ((1, 3, 8), (0, 8, 3))),
    (kv_blocks, "cp_gather_cache", _gathered, {"cu_seq_lens": np.int32([0, 3, 10])}, None, "cu_seq_lens"),
]  # fmt: skip


@pytest.mark.parametrize("module, op, made, lie, instead, argument", LIES)
def test_lists_that_lie_are_refused_before_anything_is_written(device, module, op, made, lie, instead, argument):
    assert_refused(device, module, op, made() | lie, argument)


@pytest.mark.parametrize("module, op, made, lie, instead, argument", [lie for lie in LIES if lie[4] is not None])
def test_in_a_capture_what_lies_is_left_out(device, module, op, made, lie, instead, argument):
    """The call cannot wait for the device to look; `instead` says the same without the lie."""
    sent = {name: device.send(value) for name, value in (made() | lie).items()}
    if isinstance(device, Emulated):
        device.runtime.in_capture = False
        past_the_door(device, module, op, {name: device.send(value) for name, value in made().items()})
        device.runtime.in_capture = True
        try:
            past_the_door(device, module, op, dict(sent))
        finally:
            device.runtime.in_capture = False
    else:
        stream = side_stream(device.cupy)
        with stream:
            device.call(op, {name: device.send(value) for name, value in made().items()})
            stream.synchronize()
            stream.begin_capture()
            device.call(op, dict(sent))
            stream.end_capture().launch(stream)
            stream.synchronize()
    want = made() | instead
    getattr(oracle, op)(**want)
    for name in getattr(oracle, op).contract.mutates:
        assert_bytes(device.fetch(sent[name]), want[name], name)


def test_two_caches_in_the_same_bytes_and_partial_overlaps_are_refused(device):
    host = _written()
    sent = {name: device.send(value) for name, value in host.items()}
    with pytest.raises(ContractError, match=r"reshape_and_cache\(value_cache\)"):
        past_the_door(device, kv_cache, "reshape_and_cache", sent | {"value_cache": sent["key_cache"]})
    buffer = device.send(bits((100,), "uint8", 1))
    ids = {"block_size_bytes": 8, "block_mapping": device.send(np.int64([[0, 1]]))}
    with pytest.raises(ContractError, match=r"swap_blocks\(dst\): got memory that overlaps"):
        past_the_door(device, kv_blocks, "swap_blocks", {"src": buffer[:60], "dst": buffer[40:], **ids})
    with pytest.raises(ContractError, match=r"copy_blocks\(out\): got 1 arrays, want 0"):
        past_the_door(device, kv_blocks, "copy_blocks", {
            "cache": buffer, "block_mapping": ids["block_mapping"], "out": buffer})  # fmt: skip


def test_offsets_are_64_bits_wide():
    """Blocks that lie gigabytes apart: the emulated kernel writes where only 64 bits reach, into untouched pages."""
    if compiler() is None:
        pytest.skip("emulation needs a C++ compiler")
    device = Emulated()
    far = np.zeros(9 << 29, np.uint8).view(np.float16)  # never touched but for the pages that are written
    cache = np.lib.stride_tricks.as_strided(far, (9, 1, 1, 5), (1 << 29, 10, 10, 2))  # moved in units of 2 bytes
    other = device.send(bits((9, 1, 1, 5), "float16", 1))
    key = device.send(bits((2, 1, 5), "float16", 2))
    with runtime.using(device.runtime):
        kv_cache.reshape_and_cache(key, key, cache, other, device.send(np.int64([8, 0])))
    assert_bytes(cache[8, 0], key[0])
    assert_bytes(cache[0, 0], key[1])
    assert not cache[1:8].any()


def test_dimensions_join_where_they_abut():
    assert merged([(3, 40), (2, 20), (5, 2), (1, 7)]) == [(6, 20), (5, 2)]
    assert merged([(2, 10), (5, 2)]) == [(10, 2)] and merged([]) == []
    assert merged([(2, 10, 40), (5, 2, 2)]) == [(2, 10, 40), (5, 2, 2)]
    assert list(heads_of([(3, 40), (2, 4)], 2, 1)) == [
        ((0,), (2, (4,)), 2),
        ((40,), (2, (4,)), 2),
        ((80,), (2, (4,)), 2),
    ]
    assert list(heads_of([], 4, 2)) == [((0, 0), (1, (0, 0)), 4)]


def test_small_work_is_cut_into_small_blocks():
    assert grid_of(1, 128) == (2, (64, 1), 2)
    assert grid_of(8192, 128) == (4096, (128, 2), 1)
    assert grid_of(8192, 72) == (2731, (72, 3), 1)
