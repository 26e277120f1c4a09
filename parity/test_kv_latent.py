"""The latent cache of MLA: writes and gathers against plain loops over words, in DeepSeek's geometry and small ones."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.dtypes import dtype
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .harness import case, checks, mutations
from .test_kv_cache import bits, slots

QUICK = settings(max_examples=30, deadline=None, derandomize=True)
WORDS = {2: np.uint16, 4: np.uint32}


def words(array):
    return array.view(WORDS[array.dtype.itemsize])


def padded_pages(NB, BS, D, kind, seed):
    """(allocation, view [NB, BS, D]): 3 elements follow each entry, 2 rows each page; all are random bits."""
    whole = bits((NB, BS + 2, D + 3), kind, seed)
    return whole, whole[:, :BS, :D]


WRITES = [
    case(T=1, S=1, NB=1, BS=1, R=1, P=1, kind="float32"),
    case(T=5, S=5, NB=3, BS=4, R=3, P=2, kind="float32", skip=(2, 0)),
    case(T=7, S=4, NB=2, BS=3, R=2, P=5, kind="float16", skip=(0, 1, 3)),
    case(T=3, S=0, NB=1, BS=2, R=4, P=1, kind="bfloat16"),
    case(T=9, S=7, NB=2, BS=16, R=512, P=64, kind="bfloat16", skip=(3,)),
    case(T=6, S=6, NB=1, BS=64, R=512, P=64, kind="bfloat16"),
    case(T=2, S=2, NB=2, BS=8, R=256, P=64, kind="float16", skip=(1,)),
]


@checks("concat_and_cache_mla", cases=WRITES)
def test_latent_write_against_loop(case):
    """Both parts are columns of one wider projection; padding, skipped slots and the gaps of the cache stay."""
    fused = bits((case.T, 5 + case.R + case.P + 2), case.kind, 1)
    kv_c, k_pe = fused[:, 5 : 5 + case.R], fused[:, 5 + case.R : 5 + case.R + case.P]
    whole, cache = padded_pages(case.NB, case.BS, case.R + case.P, case.kind, 2)
    where = slots(case.S, case.NB * case.BS, 3, case.get("skip", ()))
    want = words(whole).tolist()
    for i, slot in enumerate(where.tolist()):
        if slot >= 0:
            page, row = slot // case.BS, slot % case.BS
            want[page][row][: case.R + case.P] = words(kv_c)[i].tolist() + words(k_pe)[i].tolist()
    before = fused.copy()
    assert oracle.concat_and_cache_mla(kv_c, k_pe, cache, where) is None
    assert_bytes(words(whole), np.array(want, WORDS[whole.dtype.itemsize]).reshape(whole.shape))
    assert_bytes(fused, before)


@checks("concat_and_cache_mla")
def test_latent_write_by_hand():
    """Slot 3 is row 1 of page 1; a NaN keeps its payload, a zero its sign."""
    latent = np.uint32([[0x7FA00001, 0x80000000], [0xFF800000, 0x00000001]]).view(np.float32)
    rotated = np.uint32([[0xFFC12345], [0x3F800000]]).view(np.float32)
    cache = np.full((2, 2, 3), 7, np.uint32)
    oracle.concat_and_cache_mla(latent, rotated, cache.view(np.float32), np.int64([3, 0]))
    assert cache.tolist() == [
        [[0xFF800000, 0x00000001, 0x3F800000], [7, 7, 7]],
        [[7, 7, 7], [0x7FA00001, 0x80000000, 0xFFC12345]],
    ]


@checks("concat_and_cache_mla")
def test_of_latents_with_one_slot_the_last_stays():
    kv_c, k_pe = bits((6, 4), "bfloat16", 1), bits((6, 2), "bfloat16", 2)
    cache = np.zeros((2, 2, 6), kv_c.dtype)
    oracle.concat_and_cache_mla(kv_c, k_pe, cache, np.int64([3, 0, 3, -1, 3, 2]))
    for token, slot in ((4, 3), (1, 0), (5, 2)):
        assert_bytes(cache.reshape(4, 6)[slot], np.concatenate([kv_c[token], k_pe[token]]))
    assert not words(cache)[0, 1].any()


@checks("concat_and_cache_mla")
@QUICK
@given(st.lists(st.integers(-2, 11), max_size=8), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 3, 4]))
def test_latent_writes_equal_a_dictionary_of_slots(where, R, P, BS):
    """Any slots, repeated ones too: what a dictionary holds after the same assignments in order."""
    kv_c, k_pe = bits((len(where) + 1, R), "float16", 1), bits((len(where) + 1, P), "float16", 2)
    cache = bits((12 // BS, BS, R + P), "float16", 3)
    held = {slot: cache[slot // BS, slot % BS].tobytes() for slot in range(12)}
    for i, slot in enumerate(where):
        if slot >= 0:
            held[slot] = kv_c[i].tobytes() + k_pe[i].tobytes()
    oracle.concat_and_cache_mla(kv_c, k_pe, cache, np.array(where, np.int64))
    assert cache.tobytes() == b"".join(held[slot] for slot in range(12))


@checks("concat_and_cache_mla", "reshape_and_cache")
def test_a_latent_write_is_a_paged_write_of_one_head():
    """The concatenated entry as the one key head of `reshape_and_cache` goes to the same place."""
    kv_c, k_pe = bits((9, 512), "bfloat16", 1), bits((9, 64), "bfloat16", 2)
    where = slots(8, 48, 3, (2, 5))
    cache = bits((3, 16, 576), "bfloat16", 4)
    keys = cache.copy()[:, :, None]
    entry = np.concatenate([words(kv_c), words(k_pe)], 1).view(kv_c.dtype)[:, None]
    oracle.reshape_and_cache(entry, entry, keys, keys.copy(), where)
    oracle.concat_and_cache_mla(kv_c, k_pe, cache, where)
    assert_bytes(cache, keys[:, :, 0])


def gathered(dst, cache, table, bounds, owners, count, starts):
    """`dst` as nested lists of words after the gather, by the definition."""
    rows, BS = words(dst).tolist(), cache.shape[1]
    for i in range(count):
        owner = owners[i]
        if i >= bounds[owner + 1]:
            continue
        position = i - bounds[owner] + (starts[owner] if starts is not None else 0)
        page = 0
        while position >= BS:
            page, position = page + 1, position - BS
        rows[i] = words(cache)[table[owner][page]][position].tolist()
    return np.array(rows, words(dst).dtype).reshape(dst.shape)


STALE = 2**31 - 1
GATHERS = [
    case(table=[[4, 0, 1], [3, 2, 1]], bounds=[0, 3, 6], starts=[2, 0], count=5, beyond=[1]),
    case(table=[[2, 1], [0, 3]], bounds=[0, 3, 6], owners=[0, 0, 0, 0, 1, 1]),
    case(table=[[4, 0, 1], [1, 1, -9], [STALE, -1, 9], [2, 3, 4]], bounds=[0, 5, 8, 8, 14]),
    case(table=[[4, 0, 1], [1, 3, 9], [9, 9, 9], [9, 9, 4]], bounds=[0, 1, 3, 3, 5], starts=[4, 2, 0, 4]),
    case(table=[[-1, 0, STALE]], bounds=[0, 2], starts=[2]),
    case(table=[[3, 3, 3], [3, 3, 3]], bounds=[0, 6, 9], starts=[0, 2]),
    case(table=[[7]], bounds=[0, 0]),
    case(table=[[2, 9], [9, 9]], bounds=[0, 3, 5], count=2),
    case(table=[[2, 1], [0, 9]], bounds=[0, 3, 4], count=7, owners=[0, 0, 0, 1, 1, 1, 0]),
    case(table=[[0, 1, 2]], bounds=[0, 5], D=576, starts=[0]),
]


@checks("gather_mla_cache", cases=GATHERS)
def test_latent_gather_against_loop(case):
    """Permuted, shared and stale pages, chunks that begin on a later page, a request without tokens, tokens beyond
    the end of their request, fewer tokens than rows; source and target have gaps, and no poison goes."""
    lengths = np.diff(case.bounds)
    owners = case.get("owners", [b for b, n in enumerate(lengths) for _ in range(n)])
    count, D = case.get("count", len(owners)), case.get("D", 3)
    _, cache = padded_pages(5, 2, D, "bfloat16", 1)
    whole = bits((count + 2, D + 4), "bfloat16", 2)
    dst = whole[:, 2 : 2 + D]
    starts = case.get("starts")
    expected = words(whole).copy()
    expected[:, 2 : 2 + D] = gathered(dst, cache, case.table, case.bounds, owners, count, starts)
    before = cache.copy()
    listed = np.int32(owners[:count] + case.get("beyond", [STALE, -5]))
    result = oracle.gather_mla_cache(
        dst, cache, np.int32(case.table), np.int32(case.bounds), listed,
        num_tokens=count, seq_starts=None if starts is None else np.int32(starts),
    )  # fmt: skip
    assert result is None
    assert_bytes(words(whole), expected)
    assert_bytes(cache, before)


@checks("gather_mla_cache")
@QUICK
@given(st.data(), st.sampled_from(["float32", "float16", "bfloat16"]), st.integers(1, 3))
def test_any_latent_gather_against_loop(data, kind, BS):
    requests = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=4))
    bounds = np.cumsum([0, *(length for length, _ in requests)])
    starts = [BS * pages for _, pages in requests]
    table = [data.draw(st.lists(st.integers(0, 3), min_size=7, max_size=7)) for _ in requests]
    owners = [data.draw(st.integers(max(b - 1, 0), b)) for b, (length, _) in enumerate(requests) for _ in range(length)]
    owners += [data.draw(st.integers(0, len(requests) - 1)) for _ in range(2)]
    count = data.draw(st.integers(0, len(owners)))
    cache, dst = bits((4, BS, 2), kind, 1), bits((len(owners), 2), kind, 2)
    want = gathered(dst, cache, table, bounds, owners, count, starts)
    oracle.gather_mla_cache(
        dst, cache, np.int32(table), np.int32(bounds), np.int32(owners), num_tokens=count, seq_starts=np.int32(starts)
    )
    assert_bytes(words(dst), want)


@checks("gather_mla_cache", "concat_and_cache_mla", cases=[case(BS=16), case(BS=64)])
def test_chunks_gather_what_was_written(case):
    """A context of 150 latents of 512 + 64, written to permuted pages, comes back in chunks of 0, BS and 2 BS."""
    kv_c, k_pe = bits((150, 512), "bfloat16", 1), bits((150, 64), "bfloat16", 2)
    table = np.int32([[7, 2, 9, 0, 5, 1, 3, 8, 4, 6]])
    cache = bits((10, case.BS, 576), "bfloat16", 3)
    position = np.arange(150)
    oracle.concat_and_cache_mla(kv_c, k_pe, cache, table[0, position // case.BS] * np.int64(case.BS)
                                + position % case.BS)  # fmt: skip
    for start in (0, case.BS, 2 * case.BS):
        count = min(case.BS + 3, 150 - start)
        dst = bits((count, 576), "bfloat16", 4)
        oracle.gather_mla_cache(
            dst, cache, table, np.int32([0, count]), np.zeros(count, np.int32), num_tokens=count,
            seq_starts=np.int32([start]),
        )  # fmt: skip
        assert_bytes(dst[:, :512], kv_c[start : start + count])
        assert_bytes(dst[:, 512:], k_pe[start : start + count])


@checks("gather_mla_cache", "cp_gather_cache")
def test_both_gathers_agree_on_whole_requests():
    table, bounds = np.int32([[4, 0, 1], [1, 1, 9], [9, 9, 9], [2, 3, 4]]), np.int32([0, 5, 8, 8, 12])
    cache, dst, other = bits((5, 2, 6), "float32", 1), bits((13, 6), "float32", 2), bits((13, 6), "float32", 2)
    starts = np.int32([0, 0, 2, 2])
    oracle.cp_gather_cache(cache, other, table, bounds, seq_starts=starts)
    owners = np.repeat(np.arange(4, dtype=np.int32), np.diff(bounds))
    oracle.gather_mla_cache(dst, cache, table, bounds, owners, num_tokens=12, seq_starts=starts)
    assert_bytes(dst, other)


F32 = np.float32
SAME = np.zeros((40,), F32)


def _frozen(*shape):
    array = np.zeros(shape, F32)
    array.flags.writeable = False
    return array


def quantised(shape, kind):
    return np.zeros(shape, dtype(kind))


def _overlapping(*shape):
    return np.lib.stride_tricks.as_strided(np.zeros(64, F32), shape, (4,) * len(shape))


BAD_WRITES = {
    "slot NB * BS": ("slot_mapping", {"slot_mapping": np.int64([0, 8])}),
    "more slots than tokens": ("slot_mapping", {"slot_mapping": np.int64([0, 1, 2, 3])}),
    "int32 slots": ("slot_mapping", {"slot_mapping": np.int32([0, 1])}),
    "strided slots": ("slot_mapping", {"slot_mapping": np.int64([0, 9, 1, 9])[::2]}),
    "slots of rank 2": ("slot_mapping", {"slot_mapping": np.int64([[0, 1]])}),
    "latents of rank 3": ("kv_c", {"kv_c": np.ones((3, 1, 4), F32)}),
    "rotated of rank 1": ("k_pe", {"k_pe": np.ones(3, F32)}),
    "cache of rank 4": ("kv_cache", {"kv_cache": np.zeros((2, 4, 1, 6), F32)}),
    "fewer rotated rows": ("k_pe", {"k_pe": np.ones((2, 2), F32)}),
    "more rotated rows": ("k_pe", {"k_pe": np.ones((4, 2), F32)}),
    "no latent": ("kv_c", {"kv_c": np.ones((3, 0), F32), "kv_cache": np.zeros((2, 4, 2), F32)}),
    "no rotated": ("k_pe", {"k_pe": np.ones((3, 0), F32), "kv_cache": np.zeros((2, 4, 4), F32)}),
    "narrow cache": ("kv_cache", {"kv_cache": np.zeros((2, 4, 5), F32)}),
    "wide cache": ("kv_cache", {"kv_cache": np.zeros((2, 4, 7), F32)}),
    "rotated dtype": ("k_pe", {"k_pe": np.ones((3, 2), np.float16)}),
    "cache dtype": ("kv_cache", {"kv_cache": np.zeros((2, 4, 6), ml_dtypes.bfloat16)}),
    "float64": ("kv_c", {"kv_c": np.ones((3, 4))}),
    "latent lanes apart": ("kv_c", {"kv_c": np.ones((3, 8), F32)[:, ::2]}),
    "rotated lanes apart": ("k_pe", {"k_pe": np.ones((3, 4), F32)[:, ::2]}),
    "latent rows overlap": ("kv_c", {"kv_c": _overlapping(3, 4)}),
    "cache lanes apart": ("kv_cache", {"kv_cache": np.zeros((2, 4, 12), F32)[..., ::2]}),
    "overlapping cache": ("kv_cache", {"kv_cache": _overlapping(2, 4, 6)}),
    "read-only cache": ("kv_cache", {"kv_cache": _frozen(2, 4, 6)}),
    "latents of the cache": ("kv_cache", {"kv_cache": np.zeros((2, 4, 6), F32)}),
    "rotated of the cache": ("kv_cache", {"kv_cache": np.zeros((2, 4, 6), F32)}),
    "a list": ("kv_c", {"kv_c": [[1.0]]}),
}
BAD_WRITES["latents of the cache"][1]["kv_c"] = BAD_WRITES["latents of the cache"][1]["kv_cache"][0, :3, :4]
BAD_WRITES["rotated of the cache"][1]["k_pe"] = BAD_WRITES["rotated of the cache"][1]["kv_cache"][1, :3, 4:]


@pytest.mark.parametrize("argument, wrong", BAD_WRITES.values(), ids=BAD_WRITES)
def test_bad_latent_writes_are_refused(argument, wrong):
    arguments = {
        "kv_c": np.ones((3, 4), F32), "k_pe": np.ones((3, 2), F32), "kv_cache": np.zeros((2, 4, 6), F32),
        "slot_mapping": np.int64([0, 5]), **wrong,
    }  # fmt: skip
    with pytest.raises(ContractError) as refusal:
        oracle.concat_and_cache_mla(**arguments)
    assert (refusal.value.op, refusal.value.argument) == ("concat_and_cache_mla", argument)
    assert not np.any(arguments["kv_cache"])


QUANTISED = ["float8_e4m3fn", "float8_e5m2", "uint8", "int8"]


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_caches_are_refused_by_name(kind):
    """Neither op converts: not into or out of a cache of fp8, nor of its bytes, nor between quantised arrays."""
    rows, slot = np.ones((1, 4), F32), np.int64([0])
    where = np.int32([[0]]), np.int32([0, 1]), np.int32([0])
    calls = [
        ("kv_cache", lambda: oracle.concat_and_cache_mla(rows, rows, quantised((1, 1, 8), kind), slot)),
        ("kv_cache", lambda: oracle.concat_and_cache_mla(rows, rows, quantised((1, 1, 656), kind), slot)),
        ("kv_c", lambda: oracle.concat_and_cache_mla(*[quantised((1, 4), kind)] * 2, quantised((1, 1, 8), kind), slot)),
        ("src_cache", lambda: oracle.gather_mla_cache(rows.copy(), quantised((1, 1, 4), kind), *where, num_tokens=1)),
        ("dst", lambda: oracle.gather_mla_cache(
            quantised((1, 4), kind), quantised((1, 1, 4), kind), *where, num_tokens=1)),
    ]  # fmt: skip
    for argument, call in calls:
        with pytest.raises(ContractError) as refusal:
            call()
        assert refusal.value.argument == argument
        assert refusal.value.got == f"dtype {kind}"


BAD_GATHERS = {
    "a page beyond MB": ("block_table", {"seq_starts": np.int32([2, 0])}),
    "MB of 0": ("block_table", {"block_table": np.zeros((2, 0), np.int32)}),
    "a block beyond NB": ("block_table", {"block_table": np.int32([[0, 3], [0, 0]])}),
    "a negative block": ("block_table", {"block_table": np.int32([[0, 1], [-1, 0]])}),
    "int64 blocks": ("block_table", {"block_table": np.int64([[0, 1], [0, 0]])}),
    "other requests": ("cu_seq_lens", {"cu_seq_lens": np.int32([0, 3])}),
    "no leading 0": ("cu_seq_lens", {"cu_seq_lens": np.int32([1, 3, 4])}),
    "descending bounds": ("cu_seq_lens", {"cu_seq_lens": np.int32([0, 5, 4])}),
    "int64 bounds": ("cu_seq_lens", {"cu_seq_lens": np.int64([0, 3, 4])}),
    "request B": ("token_to_seq", {"token_to_seq": np.int32([0, 0, 0, 2])}),
    "request -1": ("token_to_seq", {"token_to_seq": np.int32([0, 0, -1, 1])}),
    "a token before its request": ("token_to_seq", {"token_to_seq": np.int32([0, 0, 1, 1])}),
    "the same on a later page": ("token_to_seq", {"token_to_seq": np.int32([0, 0, 1, 1]),
                                                  "seq_starts": np.int32([0, 2])}),
    "int64 requests": ("token_to_seq", {"token_to_seq": np.int64([0, 0, 0, 1])}),
    "more tokens than dst": ("num_tokens", {"num_tokens": 6, "token_to_seq": np.int32([0, 0, 0, 1, 1, 1])}),
    "more tokens than requests": ("num_tokens", {"num_tokens": 5}),
    "negative tokens": ("num_tokens", {"num_tokens": -1}),
    "half a token": ("num_tokens", {"num_tokens": 0.5}),
    "starts off a page": ("seq_starts", {"seq_starts": np.int32([0, 1])}),
    "negative starts": ("seq_starts", {"seq_starts": np.int32([-2, 0])}),
    "starts of other requests": ("seq_starts", {"seq_starts": np.int32([0])}),
    "starts off a page without tokens": ("seq_starts", {"seq_starts": np.int32([0, 1]), "num_tokens": 0}),
    "widths": ("src_cache", {"src_cache": np.ones((3, 2, 5), F32)}),
    "pages without rows": ("src_cache", {"src_cache": np.ones((3, 0, 4), F32)}),
    "cache of rank 4": ("src_cache", {"src_cache": np.ones((3, 2, 1, 4), F32)}),
    "cache dtype": ("src_cache", {"src_cache": np.ones((3, 2, 4), np.float16)}),
    "cache lanes apart": ("src_cache", {"src_cache": np.ones((3, 2, 8), F32)[..., ::2]}),
    "dst lanes apart": ("dst", {"dst": np.zeros((5, 8), F32)[:, ::2]}),
    "overlapping dst": ("dst", {"dst": _overlapping(5, 4)}),
    "read-only dst": ("dst", {"dst": _frozen(5, 4)}),
    "dst of the cache": ("dst", {"dst": SAME[16:36].reshape(5, 4), "src_cache": SAME[:24].reshape(3, 2, 4)}),
}  # fmt: skip


@pytest.mark.parametrize("argument, wrong", BAD_GATHERS.values(), ids=BAD_GATHERS)
def test_bad_latent_gathers_are_refused(argument, wrong):
    arguments = {
        "dst": np.zeros((5, 4), F32), "src_cache": np.ones((3, 2, 4), F32),
        "block_table": np.int32([[0, 1], [2, 0]]), "cu_seq_lens": np.int32([0, 3, 4]),
        "token_to_seq": np.int32([0, 0, 0, 1]), "num_tokens": 4, **wrong,
    }  # fmt: skip
    with pytest.raises(ContractError) as refusal:
        oracle.gather_mla_cache(**arguments)
    assert (refusal.value.op, refusal.value.argument) == ("gather_mla_cache", argument)
    assert not np.any(arguments["dst"]), "a refused call wrote"


mutations("concat_and_cache_mla", {
    "rotated part first": ("offset, :latent] = raw(kv_c)[token]", "offset, -latent:] = raw(kv_c)[token]"),
    "latent only": ("entries[block, offset, latent:] = raw(k_pe)[token]", "pass"),
    "slots from 1": ("slot_mapping[token], ", "slot_mapping[token] - 1, "),
    "tokens in order": ("raw(k_pe)[token]", "raw(k_pe)[: token.size]"),
    "the first of one slot": ("token = written(slot_mapping)", "token = written(slot_mapping[::-1])"),
    "negative slots wrap": ("written(slot_mapping)", "written(abs(slot_mapping))"),
    "padding stored": ("written(slot_mapping)", "np.arange(kv_c.shape[0]) % max(slot_mapping.size, 1)"),
})  # fmt: skip
mutations("gather_mla_cache", {
    "starts ignored": ("cu_seq_lens, seq_starts, src", "cu_seq_lens, None, src"),
    "first request's table": ("block_table[request, page]", "block_table[0 * request, page]"),
    "pages in order": ("[block_table[request, page], offset]", "[page, offset]"),
    "tokens packed": ("raw(dst)[token] =", "raw(dst)[: token.size] ="),
    "no skip": ("np.arange(num_tokens) < cu_seq_lens[1:][request]", "np.arange(num_tokens) >= 0", "_gathered"),
    "skip one early": ("np.arange(num_tokens) <", "1 + np.arange(num_tokens) <", "_gathered"),
    "skip one late": ("np.arange(num_tokens) <", "np.arange(num_tokens) <=", "_gathered"),
    "all of token_to_seq": ("num_tokens)\n    page", "token_to_seq.size)\n    page"),
})  # fmt: skip
