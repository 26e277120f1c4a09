"""Paged writes against plain loops over raw bytes, in every layout that vLLM uses, with poison around them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.dtypes import dtype
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .goldens import op_cases
from .harness import case, checks, mutations

QUICK = settings(max_examples=25, deadline=None, derandomize=True)


def bits(shape, kind, seed):
    """Random bit patterns of a dtype: NaNs with payloads, infinities, negative zeros and denormals among them."""
    storage = dtype(kind)
    raw = np.random.Generator(np.random.PCG64(seed)).integers(0, 256, (*shape, storage.itemsize), np.uint8)
    return raw.view(storage)[..., 0]


def pages(layout, NB, BS, H, D, kind, seed=9):
    """(allocation, key view [NB, BS, H, D], value view) full of random bits."""
    if layout == "halves":
        whole = bits((NB, 2, BS, H, D), kind, seed)
        return whole, whole[:, 0], whole[:, 1]
    if layout == "nhd":
        whole = bits((NB, BS, H, 2 * D), kind, seed)
        return whole, whole[..., :D], whole[..., D:]
    if layout == "hnd":
        whole = bits((NB, H, BS, 2 * D), kind, seed)
        turned = whole.transpose(0, 2, 1, 3)
        return whole, turned[..., :D], turned[..., D:]
    if layout == "cpu":  # the CPU backend: key rows, then value rows, within each head of a page
        whole = bits((NB, H, 2 * BS, D), kind, seed)
        turned = whole.transpose(0, 2, 1, 3)
        return whole, turned[:, :BS], turned[:, BS:]
    whole = bits((2, NB, BS, H, D), kind, seed)
    return whole, whole[0], whole[1]


def assert_numbers(got, want):
    """The same bytes, except that any NaN is as good as another."""
    assert got.dtype == want.dtype
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    assert_bytes(np.where(nan, want, got), want)


def slots(count, room, seed, skip=()):
    found = np.random.Generator(np.random.PCG64(seed)).permutation(room)[:count].astype(np.int64)
    found[list(skip)] = [-1, -7, np.iinfo(np.int64).min][: len(skip)]
    return found


WRITES = [
    case(layout="split", T=1, S=1, NB=1, BS=1, H=1, D=1, kind="float32"),
    *(case(layout=name, T=6, S=6, NB=3, BS=4, H=2, D=8, kind="bfloat16") for name in ("halves", "nhd", "hnd", "cpu")),
    *(case(layout="hnd", T=3, S=3, NB=2, BS=4, H=H, D=D, kind="bfloat16")
      for H, D in ((1, 64), (2, 72), (8, 80), (1, 96), (2, 128), (1, 256), (1, 512))),
    case(layout="split", T=4, S=4, NB=3, BS=4, H=1, D=2, kind="float32", skip=(2, 0)),
    case(layout="halves", T=7, S=5, NB=3, BS=4, H=2, D=5, kind="float16", skip=(0, 2, 4)),
    case(layout="nhd", T=4, S=0, NB=1, BS=2, H=1, D=3, kind="float32"),
    case(layout="nhd", T=42, S=42, NB=100, BS=16, H=8, D=64, kind="bfloat16", skip=(41,)),
    case(layout="split", T=42, S=40, NB=20, BS=8, H=8, D=80, kind="float32", skip=(3,)),
]  # fmt: skip


@checks("reshape_and_cache", cases=WRITES)
def test_paged_write_against_loop(case):
    """The packed projection's rows are far apart, the padding tokens and skipped slots must leave no trace."""
    fused = bits((case.T, 3 * case.H * case.D + 3), case.kind, 1)
    width = case.H * case.D
    key, value = (fused[:, at : at + width].reshape(case.T, case.H, case.D) for at in (1, 2 + width))
    whole, key_cache, value_cache = pages(case.layout, case.NB, case.BS, case.H, case.D, case.kind)
    where = slots(case.S, case.NB * case.BS, 2, case.get("skip", ()))
    expected, want_keys, want_values = pages(case.layout, case.NB, case.BS, case.H, case.D, case.kind)
    for i in range(case.S):
        if where[i] >= 0:
            b, o = int(where[i]) // case.BS, int(where[i]) % case.BS
            for h in range(case.H):
                want_keys[b, o, h].view(np.uint8)[:] = key[i, h].copy().view(np.uint8)
                want_values[b, o, h].view(np.uint8)[:] = value[i, h].copy().view(np.uint8)
    before = fused.copy()
    assert oracle.reshape_and_cache(key, value, key_cache, value_cache, where) is None
    assert_bytes(whole, expected)
    assert_bytes(fused, before)


@checks("reshape_and_cache", "reshape_and_cache_xpacked")
def test_of_tokens_with_one_slot_the_last_stays():
    key, value = bits((6, 1, 8), "bfloat16", 1), bits((6, 1, 8), "bfloat16", 2)
    where = np.int64([3, 0, 3, -1, 3, 2])
    keys, values = np.zeros((2, 4, 1, 8), key.dtype), np.zeros((2, 4, 1, 8), key.dtype)
    oracle.reshape_and_cache(key, value, keys, values, where)
    packed, plain = np.zeros((2, 1, 1, 4, 8), key.dtype), np.zeros((2, 1, 8, 4), key.dtype)
    oracle.reshape_and_cache_xpacked(key, value, packed, plain, where)
    for token, slot in ((4, 3), (1, 0), (5, 2)):
        assert_bytes(keys[0, slot], key[token])
        assert_bytes(values[0, slot], value[token])
        assert_bytes(packed[0, 0, 0, slot], key[token, 0])
        assert_bytes(plain[0, 0, :, slot], value[token, 0])


@checks("reshape_and_cache")
def test_key_may_be_value():
    key = bits((2, 1, 4), "float32", 1)
    _, keys, values = pages("halves", 1, 2, 1, 4, "float32")
    oracle.reshape_and_cache(key, key, keys, values, np.int64([1, 0]))
    assert_bytes(keys, values)
    assert_bytes(keys[0], key[::-1])


@checks("reshape_and_cache")
@QUICK
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_what_is_written_is_read_back(NB, BS, tokens, seed):
    """Reading each slot gives its token again, and the bytes of all other slots are what they were."""
    key, value = bits((tokens, 2, 3), "float16", seed), bits((tokens, 2, 3), "float16", seed + 1)
    _, keys, values = pages("hnd", NB, BS, 2, 3, "float16", seed)
    old = keys.copy(), values.copy()
    where = slots(min(tokens, NB * BS), NB * BS, seed)
    oracle.reshape_and_cache(key, value, keys, values, where)
    untouched = np.setdiff1d(np.arange(NB * BS), where)
    for cache, token, before in zip((keys, values), (key, value), old):
        assert_bytes(cache[where // BS, where % BS], token[: where.size])
        assert_bytes(cache[untouched // BS, untouched % BS], before[untouched // BS, untouched % BS])


@checks("reshape_and_cache", cases=[
    case(kind="float32", cache="float16", layout="hnd"), case(kind="float32", cache="bfloat16", layout="nhd"),
    case(kind="bfloat16", cache="float16", layout="cpu"), case(kind="float16", cache="float32", layout="split"),
])  # fmt: skip
def test_a_cache_of_another_dtype_holds_the_values_rounded_once(case):
    """All values of the narrower dtype, their midpoints, what lies just beside these, the ends of the range, NaN; by
    the conversions of NumPy and ml_dtypes. Skipped slots keep their bytes."""
    narrow, wide = dtype(case.cache), dtype(case.kind)
    codes = np.arange(0, 1 << 16, 37, np.uint16).view("f2" if narrow.itemsize == 4 else narrow).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        middles = (codes + np.nextafter(codes.astype(narrow), narrow.type(np.inf)).astype(np.float32)) / np.float32(2)
        near = [np.nextafter(middles, np.float32(end)) for end in (-np.inf, np.inf)]
        edge = np.float32([65519.996, 65520, 65536, 3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, -0.0, np.inf, -np.inf, np.nan])
        every = np.concatenate([codes, middles, *near, edge]).astype(wide)
        every = np.resize(every, -(-len(every) // 48) * 48).reshape(-1, 2, 24)
        want = every.astype(np.float32).astype(narrow)
    whole, keys, values = pages(case.layout, 90, 4, 2, 24, case.cache)
    before, where = whole.copy(), slots(len(every), 360, 3, (1, 4))
    for run in (oracle.reshape_and_cache, oracle.reshape_and_cache.mirror):
        whole[...] = before
        run(every, every[::-1].copy(), keys, values, where)
        kept, some = np.setdiff1d(np.arange(360), where), where >= 0
        old = pages(case.layout, 90, 4, 2, 24, case.cache)[1:]
        for cache, rows, was in zip((keys, values), (want, want[::-1]), old):
            assert_bytes(cache[kept // 4, kept % 4], was[kept // 4, kept % 4])
            got, rows = cache[where[some] // 4, where[some] % 4], rows[: len(where)][some]
            assert_numbers(got, rows)


@checks("reshape_and_cache_xpacked", cases=[
    case(T=6, S=5, NB=3, BS=4, H=2, D=16, kind="bfloat16", skip=(1,)),
    case(T=2, S=2, NB=2, BS=3, H=1, D=4, kind="float32"),
    case(T=42, S=42, NB=10, BS=8, H=8, D=80, kind="float16"), case(T=1, S=0, NB=1, BS=1, H=1, D=8, kind="float16"),
])  # fmt: skip
def test_packed_write_against_loop(case):
    x = 16 // dtype(case.kind).itemsize
    key, value = (bits((case.T, case.H, case.D), case.kind, s) for s in (1, 2))
    keys, values = bits((case.NB, case.H, case.D // x, case.BS, x), case.kind, 3), bits(
        (case.NB, case.H, case.D, case.BS), case.kind, 4)  # fmt: skip
    where = slots(case.S, case.NB * case.BS, 5, case.get("skip", ()))
    word = f"u{key.dtype.itemsize}"
    want_keys, want_values = keys.copy().view(word), values.copy().view(word)
    for i, h, d in np.ndindex(case.S, case.H, case.D):
        if where[i] >= 0:
            b, o = divmod(int(where[i]), case.BS)
            want_keys[b, h, d // x, o, d % x] = key.view(word)[i, h, d]
            want_values[b, h, d, o] = value.view(word)[i, h, d]
    oracle.reshape_and_cache_xpacked(key, value, keys, values, where)
    assert_bytes(keys.view(word), want_keys)
    assert_bytes(values.view(word), want_values)


@checks("reshape_and_cache", "reshape_and_cache_xpacked")
def test_paged_writes_against_vllm():
    for op in ("reshape_and_cache", "reshape_and_cache_xpacked"):
        goldens = op_cases("kv_cache", op)
        assert goldens
        for golden in goldens:
            arguments = golden.call()
            getattr(oracle, op)(**arguments)
            for name, want in golden.outputs.items():
                assert_bytes(arguments[name], want, f"{golden.name} {name}")


F32 = np.float32
OVERLAP = np.lib.stride_tricks.as_strided(np.zeros(64, F32), (2, 4, 1, 8), (32, 8, 32, 4))
FROZEN = np.zeros((2, 4, 1, 8), F32)
FROZEN.flags.writeable = False
SAME = np.zeros((2, 5, 1, 8), F32)
REFUSED = {
    "slot NB * BS": ("slot_mapping", {"slot_mapping": np.int64([0, 8])}),
    "more slots than tokens": ("slot_mapping", {"slot_mapping": np.int64([0, 1, 2, 3])}),
    "int32 slots": ("slot_mapping", {"slot_mapping": np.int32([0, 1])}),
    "strided slots": ("slot_mapping", {"slot_mapping": np.int64([0, 9, 1, 9])[::2]}),
    "slots of rank 2": ("slot_mapping", {"slot_mapping": np.int64([[0, 1]])}),
    "rank 2": ("key", {"key": np.ones((3, 8), F32)}),
    "cache of rank 3": ("key_cache", {"key_cache": np.zeros((2, 4, 8), F32)}),
    "heads": ("value", {"value": np.ones((3, 2, 8), F32)}),
    "lanes": ("value_cache", {"value_cache": np.zeros((2, 4, 1, 9), F32)}),
    "value dtype": ("value", {"value": np.ones((3, 1, 8), np.float16)}),
    "cache dtype": ("key_cache", {"key_cache": np.zeros((2, 4, 1, 8), np.int16)}),
    "two cache dtypes": ("value_cache", {"key_cache": np.zeros((2, 4, 1, 8), np.float16)}),
    "integers": ("key", {"key": np.ones((3, 1, 8), np.int32)}),
    "key lanes apart": ("key", {"key": np.ones((3, 1, 16), F32)[..., ::2]}),
    "key heads apart": ("key", {"key": np.ones((3, 2, 16), F32)[..., :8], "value": np.ones((3, 2, 8), F32),
                                "key_cache": np.zeros((2, 4, 2, 8), F32), "value_cache": np.zeros((2, 4, 2, 8), F32)}),
    "cache lanes apart": ("key_cache", {"key_cache": np.zeros((2, 4, 1, 16), F32)[..., ::2]}),
    "block counts": ("value_cache", {"value_cache": np.zeros((3, 4, 1, 8), F32)}),
    "overlapping cache": ("value_cache", {"value_cache": OVERLAP}),
    "read-only cache": ("key_cache", {"key_cache": FROZEN}),
    "one cache twice": ("value_cache", {"key_cache": SAME[:, :4], "value_cache": SAME[:, :4]}),
    "one key row later": ("value_cache", {"key_cache": SAME[:, :4], "value_cache": SAME[:, 1:5]}),
    "a list": ("key", {"key": [[[1.0]]]}),
}  # fmt: skip


@pytest.mark.parametrize("argument, wrong", REFUSED.values(), ids=REFUSED)
def test_bad_writes_are_refused(argument, wrong):
    arguments = {
        "key": np.ones((3, 1, 8), F32), "value": np.ones((3, 1, 8), F32), "key_cache": np.zeros((2, 4, 1, 8), F32),
        "value_cache": np.zeros((2, 4, 1, 8), F32), "slot_mapping": np.int64([0, 5]), **wrong,
    }  # fmt: skip
    with pytest.raises(ContractError) as refusal:
        oracle.reshape_and_cache(**arguments)
    assert (refusal.value.op, refusal.value.argument) == ("reshape_and_cache", argument)
    assert not arguments["key_cache"].any() and not arguments["value_cache"].any()


@pytest.mark.parametrize("argument, wrong", [
    ("key_cache", {"key_cache": np.zeros((2, 1, 1, 4, 8), F32)}),
    ("key_cache", {"key_cache": np.zeros((2, 1, 1, 4, 4), F32)}),
    ("value_cache", {"value_cache": np.zeros((2, 1, 8, 5), F32)}), ("slot_mapping", {"slot_mapping": np.int64([8])}),
    ("slot_mapping", {"slot_mapping": np.int64([0, 1, 2, 3])}),
    ("key_cache", {"key_cache": np.zeros((2, 1, 2, 4, 8), F32)[..., :4]}),
])  # fmt: skip
def test_bad_packed_writes_are_refused(argument, wrong):
    arguments = {
        "key": np.ones((3, 1, 8), F32), "value": np.ones((3, 1, 8), F32), "key_cache": np.zeros((2, 1, 2, 4, 4), F32),
        "value_cache": np.zeros((2, 1, 8, 4), F32), "slot_mapping": np.int64([0, 5]), **wrong,
    }  # fmt: skip
    with pytest.raises(ContractError) as refusal:
        oracle.reshape_and_cache_xpacked(**arguments)
    assert (refusal.value.op, refusal.value.argument) == ("reshape_and_cache_xpacked", argument)
    assert not arguments["key_cache"].any() and not arguments["value_cache"].any()


_WHICH = {
    "the first of one slot": ("slots[::-1]", "slots", "written"),
    "negative slots wrap": ("last[slots[last] >= 0]", "last", "written"),
    "slot 0 skipped": ("slots[last] >= 0", "slots[last] > 0", "written"),
}
mutations("reshape_and_cache", {
    **_WHICH,
    "value into the keys": ("(value, value_cache)", "(value, key_cache)"),
    "slots from 1": ("slot_mapping[token], ", "slot_mapping[token] - 1, "),
    "tokens in order": ("rows[token]", "rows[: token.size]"),
    "a step too low": ("raw(nx.store(nx.load(rows), dtype))",
                       "raw(np.nextafter(nx.store(nx.load(rows), dtype), dtype.type(0)))", "store_rows"),
    "rounded twice": ("nx.store(nx.load(rows), dtype)",
                      "nx.store(nx.load(nx.store(nx.load(rows), np.dtype('bfloat16'))), dtype)", "store_rows"),
})  # fmt: skip
mutations("reshape_and_cache_xpacked", {
    **_WHICH,
    "packs transposed": ("*packs)", "*packs[::-1]).swapaxes(2, 3)"),
    "slots from 1": ("slot_mapping[token], ", "slot_mapping[token] - 1, "),
    "values by token": ("= raw(value)[token]", "= raw(key)[token]"),
})  # fmt: skip
