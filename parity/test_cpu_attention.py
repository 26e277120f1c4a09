"""Attention in parts: chunks of keys on several threads, merged afterwards, are the bytes of one thread."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from vtlab import ops
from vtlab.device.cpu import threads

from .cpu_wrongs import Wrong, planted

DTYPES = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
LENGTHS, WINDOWS = ((1, 70, 200), (64, 65, 128), (300, 3, 63)), (None, (40, 0), (100, 1 << 20))


def differing() -> list:
    """The cases (heads, width, requests, lengths, window, sinks, dtype) whose bytes depend on the threads."""
    rng, found = np.random.Generator(np.random.PCG64(3)), []
    for case in itertools.product((4, 6), (24, 64), (1, 3), LENGTHS, WINDOWS, (False, True), DTYPES):
        heads, depth, requests, lengths, window, sunk, dtype = case
        keys, values = (rng.standard_normal((40, 16, 2, depth)).astype(dtype) for _ in range(2))
        new = [min(length, count) for length, count in zip(lengths, (1, 2, 3))][:requests]
        q = rng.standard_normal((sum(new), heads, depth)).astype(dtype)
        table = np.stack([rng.permutation(40)[:20] for _ in new]).astype(np.int32)
        starts, lengths = np.cumsum([0, *new]).astype(np.int32), np.array(lengths[:requests], np.int32)
        sinks = rng.standard_normal(heads).astype(np.float32) if sunk else None
        options = {"scale": 0.2, "window": window, "sinks": sinks, "return_lse": True}
        results = set()
        for count in (1, 2, 8):
            with threads.using(count):
                out, lse = ops.paged_attention(q, keys, values, table, lengths, starts, **options)
            results.add(out.tobytes() + lse.tobytes())
        if len(results) > 1:
            found.append(case)
    return found


def test_parts_give_the_bytes_of_the_whole():
    assert differing() == []


@pytest.mark.kernel_mutation
@pytest.mark.parametrize("wrong", [
    Wrong("attention_rows", (), "for part in range(first // CHUNK, last // CHUNK + 1):",
          "for part in range(last // CHUNK, first // CHUNK - 1, -1):"),
    Wrong("attention_rows", (), "merged(state, get_f32(cell, 0), get_f32(cell, 1))",
          "merged(state, get_f32(cell, 0), get_f32(cell, 0))"),
    Wrong("attention_rows", (), "state, mixed, depth, sinks, first <= last",
          "state, mixed, depth, sinks, first < last"),
    Wrong("attention", (), "min(most, CHUNK * part + CHUNK - 1)", "min(most, CHUNK * part + CHUNK)"),
], ids=str)  # fmt: skip
def test_wrongs_are_noticed(wrong, tmp_path, monkeypatch):
    with planted(wrong, tmp_path, monkeypatch):
        assert differing()
