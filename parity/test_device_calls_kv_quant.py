"""Around the quantised caches' kernels: the layouts that vLLM uses, operands at any address, lists that lie."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import kv_quant, kv_quant_fp4, kv_quant_heads, kv_quant_latent
from vtlab.ops.errors import ContractError
from vtlab.ops.kv_formats import views_of_heads
from vtlab.ops.table import lookup

from .compare import assert_bytes
from .device_cases import cases, device_ops
from .device_doors import assert_refused, past_the_door
from .device_run import Emulated, assert_equal, mirror_of
from .emulation import compiler
from .scalar import draw
from .side_streams import side_stream
from .test_device_calls_kv import ALLOCATED, paged
from .test_kv_cache import slots
from .test_kv_quant_fp4 import allocated
from .test_quant_fp8 import near_ties

F32, U8, I64 = np.float32, np.uint8, np.int64
NB, BS, H, T = 5, 4, 2, 9


def bytes_like(shape, seed):
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 0x59, shape).astype(U8)


def projected(width, kind, shift):
    """Keys and values [T, H, width] as columns of one projection, which begin anywhere."""
    return draw((T, 2 * H * width + shift + 3), kind, 2)


def columns(fused, width, shift):
    return [fused[:, at : at + H * width].reshape(T, H, width) for at in (shift, shift + H * width)]


@pytest.mark.parametrize("layout", ALLOCATED)
@pytest.mark.parametrize("width, kind, shift, scales", [
    (128, "bfloat16", 0, 1), (24, "float16", 8, 2), (64, "bfloat16", 1, 2), (5, "float32", 1, 1),
])  # fmt: skip
def test_codes_of_every_layout_of_pages(device, layout, width, kind, shift, scales):
    """Keys and values interleaved in one allocation; values alone are read back."""
    host, fused = bytes_like(ALLOCATED[layout](NB, BS, H, width), 1), projected(width, kind, shift)
    where = slots(T, NB * BS, 3)
    scale = np.linspace(0.02, 0.03, scales, dtype=F32)

    def write(call, whole, fused, put):
        caches = paged(layout, whole, width)
        names = "key", "value", "key_cache", "value_cache"
        call(**dict(zip(names, (*columns(fused, width, shift), *caches))), slot_mapping=put(where), k_scale=put(scale),
             v_scale=put(scale))  # fmt: skip
        return caches[1]

    whole = device.send(host)
    values = write(lambda **a: device.call("reshape_and_cache_fp8", a), whole, device.send(fused), device.send)
    expected = write(oracle.reshape_and_cache_fp8, host, fused, lambda value: value)
    assert_bytes(device.fetch(whole), host)
    got = device.call("dequantize_kv_fp8", {"cache": values, "scale": device.send(scale)})
    assert_bytes(device.fetch(got), oracle.dequantize_kv_fp8(expected, scale))


@pytest.mark.parametrize("four_bits", [False, True])
@pytest.mark.parametrize("width, kind, shift", [
    (128, "bfloat16", 0), (64, "float16", 8), (32, "bfloat16", 1), (24, "float32", 0),
])  # fmt: skip
def test_pages_with_their_scales_inside(device, width, kind, shift, four_bits):
    """Rows of a key, its scale, a value, its scale: what vLLM allocates, whose values stand at no multiple of 8."""
    stored = width // 2 if four_bits else width
    host, fused = bytes_like((NB, H, BS, 2 * (stored + 4)), 1), projected(width, kind, shift)
    where = slots(T, NB * BS, 3)
    op = "reshape_and_cache_int4" if four_bits else "reshape_and_cache_per_token_head"
    read = "dequantize_kv_int4" if four_bits else "dequantize_kv_heads"
    dtype = np.dtype(U8 if four_bits else np.int8)
    names = "key", "value", "key_cache", "value_cache", "k_scale_cache", "v_scale_cache"

    def views(pages):
        rows, floats = pages.swapaxes(1, 2), pages.view(F32).swapaxes(1, 2)
        parts = rows[..., :stored], rows[..., stored + 4 : -4]
        return [*(part.view(dtype) for part in parts), floats[..., stored // 4], floats[..., -1]]

    for ours, theirs in zip(views(host), views_of_heads(host, dtype)):
        assert (ours.ctypes.data, ours.strides) == (theirs.ctypes.data, theirs.strides)
    pages = device.send(host)
    caches = views(pages)
    parts = columns(device.send(fused), width, shift)
    device.call(op, dict(zip(names, (*parts, *caches))) | {"slot_mapping": device.send(where)})
    getattr(oracle, op)(**dict(zip(names, (*columns(fused, width, shift), *views(host)))), slot_mapping=where)
    assert_bytes(device.fetch(pages), host)
    got = device.call(read, {"cache": caches[1], "scale_cache": caches[3]})
    assert_bytes(device.fetch(got), getattr(oracle, read)(views(host)[1], views(host)[3]))


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("width, kind, shift, gap", [
    (128, "bfloat16", 0, 0), (64, "bfloat16", 8, 3), (64, "float32", 1, 16),
])  # fmt: skip
def test_nvfp4_of_both_orders(device, heads_first, width, kind, shift, gap):
    memory = [allocated(width, heads_first, gap, 0x5A)[1] for _ in "kv"]
    fused, where, scale = projected(width, kind, shift), slots(T, 16, 3), [F32([0.004]), F32([0.011])]
    size = width // 16 * 9

    def caches(arrays):
        for array in arrays:
            blocks = array[:, : 8 * H * size]
            yield blocks.reshape(2, H, 8, size).swapaxes(1, 2) if heads_first else blocks.reshape(2, 8, H, size)

    names = "key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale"
    sent = [device.send(array) for array in memory]
    lists = [device.send(array) for array in (where, *scale)]
    parts = columns(device.send(fused), width, shift)
    device.call("reshape_and_cache_nvfp4", dict(zip(names, (*parts, *caches(sent), *lists))))
    oracle.reshape_and_cache_nvfp4(*columns(fused, width, shift), *caches(memory), where, *scale)
    for got, want in zip(sent, memory):
        assert_bytes(device.fetch(got), want)


@pytest.mark.parametrize("gap", [0, 1, 8])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_entries_with_gaps_from_columns_of_a_projection(device, gap, kind):
    fused, host, where = draw((6, 576 + gap), kind, 1), bytes_like((3, 4, 656 + gap), 2), slots(6, 12, 3)

    def arguments(fused, pages):
        return {"kv_c": fused[:, gap : gap + 512], "k_pe": fused[:, gap + 512 :], "kv_cache": pages[..., gap:]}

    pages = device.send(host)
    device.call("concat_and_cache_ds_mla", arguments(device.send(fused), pages) | {"slot_mapping": device.send(where)})
    oracle.concat_and_cache_ds_mla(**arguments(fused, host), slot_mapping=where)
    assert_bytes(device.fetch(pages), host)
    for width in ("bfloat16", "float32"):
        got = device.call("dequantize_ds_mla", {"entries": pages[..., gap:], "out_dtype": width})
        want = oracle.dequantize_ds_mla(host[..., gap:], out_dtype=width)
        both = np.isnan(want.astype(F32))
        assert_bytes(np.where(both, 0, device.fetch(got)), np.where(both, 0, want))


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_keys_of_the_indexer_at_any_address(device, shift, ue8m0):
    """Written from columns, gathered by table, in caches that begin anywhere."""
    fused, where, raw = draw((7, 128 + shift), "bfloat16", 1), slots(7, 8, 3), device.raw(2 * 4 * 132 + shift)
    raw[...] = device.send(bytes_like(raw.shape, 4))
    cache, host = raw[shift:].reshape(2, 4, 132), device.fetch(raw)[shift:].copy().reshape(2, 4, 132)
    k, there = device.send(fused)[:, shift:], device.send(where)
    device.call("indexer_k_quant_and_cache", {"k": k, "kv_cache": cache, "slot_mapping": there, "ue8m0": ue8m0})
    oracle.indexer_k_quant_and_cache(fused[:, shift:], host, where, ue8m0=ue8m0)
    assert_bytes(device.fetch(cache), host)
    table, bounds = np.int32([[1, 0], [0, 1]]), np.int32([0, 5, 8])
    found = [np.zeros((9, 128), U8), np.zeros(9, F32)]
    sent = [device.send(array) for array in found]
    device.call("cp_gather_indexer_k_quant_cache", {
        "kv_cache": cache, "dst_k": sent[0], "dst_scale": sent[1], "block_table": device.send(table),
        "cu_seq_lens": device.send(bounds)})  # fmt: skip
    oracle.cp_gather_indexer_k_quant_cache(host, *found, table, bounds)
    for got, want in zip(sent, found):
        assert_bytes(device.fetch(got), want)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scale", [1.0, 0.0321, 2.0**-70])
def test_every_bfloat16_and_what_lies_between_two_codes(device, kind, scale):
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(1, 64, 1024)
    ties = np.concatenate([near_ties(scale), -near_ties(scale)])
    ties = ties[: ties.size // 8 * 8].reshape(1, 1, -1)
    for x in (every, ties):
        caches, where, by = [np.zeros((1, 1, *x.shape[1:]), U8) for _ in "kv"], I64([0]), F32([scale])
        sent = [device.send(array) for array in (x, x, *caches, where, by, by)]
        names = "key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale"
        device.call("reshape_and_cache_fp8", dict(zip(names, sent)) | {"kind": kind})
        oracle.reshape_and_cache_fp8(x, x, *caches, where, by, by, kind=kind)
        for got, want in zip(sent[2:4], caches):
            assert_bytes(device.fetch(got), want)


def test_reads_of_leading_axes_that_do_not_step_evenly(device):
    """Caches and scales cut so that they are no rows of pages cost a copy, and give the same bytes."""
    whole, scales = bytes_like((3, 4, 6, 2, 16), 1).view(np.int8), draw((3, 4, 6, 2), "float32", 2)
    cut = lambda array: array[:, 1:3, ::2]
    sent = {"cache": cut(device.send(whole)), "scale_cache": cut(device.send(scales))}
    got = device.call("dequantize_kv_heads", sent)
    assert_bytes(device.fetch(got), oracle.dequantize_kv_heads(cut(whole), cut(scales)))


@pytest.mark.parametrize("width", [4, 16, 128])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_rotations_of_slices_of_wider_rows(device, width, shift):
    wide = draw((6, 3, width + 16), "bfloat16", 2)
    part = wide[..., shift : shift + width]
    for inverse in (False, True):
        got = device.call("rht", {"x": device.send(wide)[..., shift : shift + width], "inverse": inverse})
        assert_bytes(device.fetch(got), oracle.rht.mirror(part, inverse=inverse))


def _rows(op):
    width = 64 if op == "reshape_and_cache_nvfp4" else 8
    stored = {"reshape_and_cache_nvfp4": 36, "reshape_and_cache_int4": 4}.get(op, 8)
    found = {name: draw((3, 1, width), "bfloat16", seed) for seed, name in enumerate(("key", "value"))}
    found |= {name: bytes_like((2, 4, 1, stored), seed) for seed, name in enumerate(("key_cache", "value_cache"))}
    if op in ("reshape_and_cache_nvfp4", "reshape_and_cache_fp8"):
        found |= {"k_scale": F32([0.02]), "v_scale": F32([0.02])}
    else:
        found |= {name: np.ones((2, 4, 1), F32) for name in ("k_scale_cache", "v_scale_cache")}
    return found | {"slot_mapping": I64([0, 5, 7])}


def _latent(op):
    return {"kv_c": draw((3, 512), "bfloat16", 1), "k_pe": draw((3, 64), "bfloat16", 2),
            "kv_cache": bytes_like((2, 4, 656), 3), "slot_mapping": I64([0, 5, 7])}  # fmt: skip


def _keys(op):
    return {"k": draw((3, 128), "bfloat16", 1), "kv_cache": bytes_like((2, 4, 132), 3), "slot_mapping": I64([0, 5, 7])}


def _gathered(op):
    return {"kv_cache": bytes_like((5, 2, 132), 1), "dst_k": bytes_like((9, 128), 2), "dst_scale": np.ones(9, F32),
            "block_table": np.int32([[4, 0, 1], [2, 3, 1]]), "cu_seq_lens": np.int32([0, 3, 8])}  # fmt: skip


GATHER = "cp_gather_indexer_k_quant_cache"
LIES = [
    *((module, op, made, {"slot_mapping": I64([0, 8, 7])}, {"slot_mapping": I64([0, -1, 7])}, "slot_mapping")
      for module, op, made in (
          (kv_quant, "reshape_and_cache_fp8", _rows), (kv_quant_heads, "reshape_and_cache_per_token_head", _rows),
          (kv_quant_heads, "reshape_and_cache_int4", _rows), (kv_quant_fp4, "reshape_and_cache_nvfp4", _rows),
          (kv_quant_latent, "concat_and_cache_ds_mla", _latent),
          (kv_quant_latent, "indexer_k_quant_and_cache", _keys))),
    *((kv_quant_latent, GATHER, _gathered, {"block_table": np.int32([[4, 0, 1], [2, 3, wrong]])},
       {"cu_seq_lens": np.int32([0, 3, 7])}, "block_table") for wrong in (5, -1)),
    *((kv_quant_latent, GATHER, _gathered, {"cu_seq_lens": np.int32(bounds)}, None, "cu_seq_lens")
      for bounds in ((1, 3, 8), (0, 8, 3), (0, 3, 10))),
]  # fmt: skip


@pytest.mark.parametrize("module, op, made, lie, instead, argument", LIES)
def test_lists_that_lie_are_refused_before_anything_is_written(device, module, op, made, lie, instead, argument):
    assert_refused(device, module, op, made(op) | lie, argument)


@pytest.mark.parametrize("module, op, made, lie, instead, argument", [lie for lie in LIES if lie[4] is not None])
def test_in_a_capture_what_lies_is_left_out(device, module, op, made, lie, instead, argument):
    """The call cannot wait for the device to look; `instead` says the same without the lie."""
    sent = {name: device.send(value) for name, value in (made(op) | lie).items()}
    if isinstance(device, Emulated):
        device.runtime.in_capture = True
        try:
            past_the_door(device, module, op, dict(sent))
        finally:
            device.runtime.in_capture = False
    else:
        stream = side_stream(device.cupy)
        with stream:
            device.call(op, {name: device.send(value) for name, value in made(op).items()})
            stream.synchronize()
            stream.begin_capture()
            device.call(op, dict(sent))
            stream.end_capture().launch(stream)
            stream.synchronize()
    want = made(op) | instead
    getattr(oracle, op)(**want)
    for name in getattr(oracle, op).contract.mutates:
        assert_bytes(device.fetch(sent[name]), want[name], name)


@pytest.mark.parametrize("gap", [0, 1, 8])
@pytest.mark.parametrize("op", [
    "reshape_and_cache_fp8", "reshape_and_cache_per_token_head", "reshape_and_cache_int4", "reshape_and_cache_nvfp4",
])  # fmt: skip
def test_heads_that_lie_apart(device, op, gap):
    """A key, `gap` elements and a value, head after head: heads are not packed on either side."""
    wide, given = draw((T, H, 128 + gap), "bfloat16", 3), _rows(op)
    names = [name for name in given if "scale_cache" in name]
    given |= {name: bytes_like((3, 4, H, 8 * given[name].shape[3]), 5) for name in ("key_cache", "value_cache")}
    if op == "reshape_and_cache_nvfp4":
        given |= {name: bytes_like((3, 4, H, 36), 5) for name in ("key_cache", "value_cache")}
    given |= {name: np.ones((3, 4, H), F32) for name in names} | {"slot_mapping": slots(T, 12, 3)}
    sent = {name: device.send(value) for name, value in given.items()}
    both = lambda array: {"key": array[..., :64], "value": array[..., 64 + gap :]}
    device.call(op, sent | both(device.send(wide)))
    getattr(oracle, op)(**(given | both(wide)))
    for name in getattr(oracle, op).contract.mutates:
        assert_bytes(device.fetch(sent[name]), given[name], name)


@pytest.mark.parametrize("op, module, width", [
    ("reshape_and_cache_fp8", kv_quant, 8), ("reshape_and_cache_per_token_head", kv_quant_heads, 8),
    ("reshape_and_cache_int4", kv_quant_heads, 4), ("reshape_and_cache_nvfp4", kv_quant_fp4, 36),
])  # fmt: skip
def test_offsets_are_64_bits_wide(op, module, width):
    """Blocks that lie gigabytes apart: the emulated kernel writes where only 64 bits reach, into untouched pages."""
    if compiler() is None:
        pytest.skip("emulation needs a C++ compiler")
    device, given = Emulated(), _rows(op)
    far = np.zeros(9 << 29, U8)  # never touched but for the page that is written
    size = 4 * width
    given["key_cache"] = np.lib.stride_tricks.as_strided(far, (9, 4, 1, width), (1 << 29, width, width, 1))
    given["value_cache"] = bytes_like((9, 4, 1, width), 1)
    for name in ("k_scale_cache", "v_scale_cache") if "k_scale_cache" in given else ():
        given[name] = np.ones((9, 4, 1), F32)
    given["slot_mapping"] = I64([-1, 35, -1])
    sent = {name: value if name == "key_cache" else device.send(value) for name, value in given.items()}
    past_the_door(device, module, op, sent)
    expected = {**given, "key_cache": np.zeros((9, 4, 1, width), U8)}
    getattr(oracle, op)(**expected)
    assert_bytes(far[8 << 29 : (8 << 29) + size], expected["key_cache"][8].reshape(-1))
    assert not given["key_cache"][:8].any()


def _by_slots(case) -> bool:
    has_slots = "slot_mapping" in lookup(case.op).contract.args  # asked first: drawing all cases' arguments takes long
    return has_slots and not case.special and len(case.arguments()["slot_mapping"]) > 1


@pytest.mark.parametrize("case", [case for case in cases(device_ops()) if _by_slots(case)], ids=str)
def test_slots_behind_the_last_are_not_read(device, case):
    """Slots are the head of a longer buffer, as a captured step has them: rows that have none have one behind them."""
    given = case.arguments()
    every = np.resize(given["slot_mapping"], 64 + len(given["slot_mapping"]))
    given["slot_mapping"] = given["slot_mapping"][:-1]
    _, updated = mirror_of(case.op, given, device.place)
    sent = {name: device.send(value) for name, value in given.items()}
    sent["slot_mapping"] = device.send(every)[: len(given["slot_mapping"])]
    device.call(case.op, dict(sent))
    for name, want in updated.items():
        assert_equal(case.op, device.fetch(sent[name]), want, f"{case}, {name}")


def test_scales_at_odd_addresses_are_refused(device):
    """A GPU cannot store a float32 there: pages whose rows are no multiples of four bytes."""
    given = _rows("reshape_and_cache_per_token_head")
    raw = device.raw(41)
    given["k_scale_cache"] = raw[1:33].view(F32).reshape(2, 4, 1)
    sent = {name: device.send(value) if isinstance(value, np.ndarray) and name != "k_scale_cache" else value
            for name, value in given.items()}  # fmt: skip
    with pytest.raises(ContractError, match="elements at multiples of their size"):
        past_the_door(device, kv_quant_heads, "reshape_and_cache_per_token_head", sent)


def test_two_caches_in_the_same_bytes_are_refused(device):
    op = "reshape_and_cache_fp8"
    sent = {name: device.send(value) for name, value in _rows(op).items()}
    with pytest.raises(ContractError, match=r"reshape_and_cache_fp8\(value_cache\)"):
        past_the_door(device, kv_quant, op, sent | {"value_cache": sent["key_cache"]})
