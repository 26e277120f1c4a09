"""Paged caches of another dtype than the model's on the CPU tier: written rounded once, attended to as they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from vtlab import ops, oracle
from vtlab.device import kv_cache, rope_fused
from vtlab.device.cpu import threads
from vtlab.device.cpu.tier import tier
from vtlab.ops import providers

from .cpu_wrongs import Wrong, planted
from .device_cases import SPECIAL
from .test_kv_cache import assert_numbers, pages, slots

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
TWO_ROWS = pytest.mark.skipif(tier() != "avx512", reason="rows of queries go one by one elsewhere")
PAIRS = (F32, F16), (F32, BF16), (BF16, F16), (F16, F32)


def differing_writes() -> Iterator[tuple]:
    """The cases (dtype, dtype of the cache, layout, width) whose caches are not the mirror's."""
    rng = np.random.Generator(np.random.PCG64(5))
    for (kind, cache), layout, width in itertools.product(PAIRS, ("nhd", "hnd", "halves"), (5, 16, 72)):
        rows = rng.standard_normal((2, 7, 3 * width + 4)) * 2.0 ** rng.integers(-26, 17, (2, 7, 3 * width + 4))
        rows[:, :, ::9] = SPECIAL[rng.integers(0, len(SPECIAL), rows[:, :, ::9].shape)]
        with np.errstate(over="ignore"):
            key, value = (side[:, 2 : 2 + 3 * width].reshape(7, 3, width) for side in rows.astype(kind))
        results = []
        for run in (oracle.reshape_and_cache.mirror, ops.reshape_and_cache):
            whole, keys, values = pages(layout, 3, 4, 3, width, cache.name)
            run(key, value, keys, values, slots(6, 12, 1, (2,)))
            results.append(whole)
        try:
            assert_numbers(results[1], results[0])
        except AssertionError:
            yield kind.name, cache.name, layout, width


def differing_attention() -> Iterator[tuple]:
    """The cases (dtype, heads, width, lengths, window) that give other bytes than the mirror, or than other threads."""
    rng = np.random.Generator(np.random.PCG64(6))
    cases = itertools.product((3, 4), (64, 24, 80), ((F32, (130,), None), (BF16, (1, 70), (40, 0))))
    for heads, width, (kind, lengths, window) in cases:
        new = [min(3, length) if len(lengths) > 1 else 1 for length in lengths]
        for group in (heads, 1):
            whole = (rng.standard_normal((12, heads // group, 16, 2 * width)) * 4).astype(F16).transpose(0, 2, 1, 3)
            keys, values = whole[..., :width], whole[..., width:]
            q = rng.standard_normal((sum(new), heads, width)).astype(kind)
            table = np.stack([rng.permutation(12)[:9] for _ in new]).astype(np.int32)
            rest = table, np.array(lengths, np.int32), np.cumsum([0, *new]).astype(np.int32)
            want = oracle.paged_attention.mirror(q, keys, values, *rest, scale=0.2, window=window)
            for count in (1, 2):
                with threads.using(count):
                    got = ops.paged_attention(q, keys, values, *rest, scale=0.2, window=window)
                if got.tobytes() != want.tobytes():
                    yield kind.name, heads, group, width, lengths, window, count


def test_caches_of_another_dtype_are_written_as_the_mirror_does():
    assert list(differing_writes()) == []
    assert providers.op_provider_stats("reshape_and_cache", "cpu").last_selected == "numba"


def test_attention_over_float16_keys_is_the_mirrors():
    assert list(differing_attention()) == []
    assert providers.op_provider_stats("paged_attention", "cpu").last_selected == "numba"


def test_rotated_keys_go_rounded_into_such_a_cache():
    rng = np.random.Generator(np.random.PCG64(7))
    q, k, v = (rng.standard_normal((4, heads, 32)).astype(F32) for heads in (4, 2, 2))
    table, at, where = rng.standard_normal((9, 32)).astype(F32), np.int64([3, 8, 0, 1]), np.int64([6, -1, 1, 7])
    results = []
    for run in (oracle.rope_and_cache.mirror, ops.rope_and_cache):
        keys, values = np.zeros((2, 2, 4, 2, 32), F16)
        results.append((*run(q, k, v, at, table, keys, values, where), keys, values))
    for name, got, want in zip(("q", "k", "keys", "values"), *results[::-1]):
        assert got.tobytes() == want.tobytes(), name
    assert results[1][2][1, 2].tobytes() == results[1][1][0].astype(F16).tobytes()
    assert results[1][3][1, 3].tobytes() == v[3].astype(F16).tobytes()


def test_gpus_decline_such_caches():
    key, cache, where = np.ones((1, 1, 8), F32), np.zeros((1, 1, 1, 8), F16), np.zeros(1, np.int64)
    assert kv_cache.reshape_and_cache(key, key, cache, cache, where) is NotImplemented
    table = np.ones((2, 8), F32)
    assert rope_fused.rope_and_cache(key, key, key, where, table, cache, cache, where) is NotImplemented


@pytest.mark.kernel_mutation
@pytest.mark.parametrize("wrong, differing", [
    (Wrong("rope", (), "store(load(from_key, d, width - d, kind), to_key, d, width - d, cache_kind)",
           "store(load(from_key, d, width - d, kind), to_key, d, width - d, kind)"), differing_writes),
    (Wrong("rope", (), "from_value = address(value) + token * v_row + h * width * size",
           "from_value = address(value) + token * v_row + h * width"), differing_writes),
    (Wrong("rope", (), "store(load(from_value, d, width - d, kind), to_value, d, width - d, cache_kind)",
           "store(load(from_value, d, width - d, kind), to_value, d, width - d - 1, cache_kind)"), differing_writes),
    (Wrong("attention", (), "_sums_f16(p, values, first, last, depth, to)",
           "_sums_f16(p, values, first, last - 1, depth, to)"), differing_attention),
    pytest.param(Wrong("attention", (), "fma(one, v, c), fma(two, v, y)", "fma(one, v, c), fma(two, v, z)"),
                 differing_attention, marks=TWO_ROWS),
    pytest.param(Wrong("attention", (), "fma(one, k, d), fma(two, k, h)", "fma(one, k, d), fma(two, k, g)"),
                 differing_attention, marks=TWO_ROWS),
    pytest.param(Wrong("attention", (), "other = to + (apart if parts > 1", "other = to + (4 * padded if parts > 1"),
                 differing_attention, marks=TWO_ROWS),
], ids=lambda value: str(value) if isinstance(value, Wrong) else "")  # fmt: skip
def test_wrongs_are_noticed(wrong, differing, tmp_path, monkeypatch):
    with planted(wrong, tmp_path, monkeypatch):
        assert next(differing(), None)
