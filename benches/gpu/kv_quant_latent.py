"""Quantised caches of latent attention: entries of 656 bytes and the indexer's keys of 128, in pages of 64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_empty, torch_normal
from .bench import TOKENS, Bench
from .kv_blocks import tables
from .kv_cache import blocks_for, cache_ops, cupy_array, slots, torch_array
from .kv_latent import LATENT, PAGE, ROTATED
from .kv_quant import cupy_bytes, torch_bytes

ENTRY, KEY = 656, 128


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield write(T)
        yield write_keys(T)
    for T in TOKENS[2:]:
        yield read(T)
    for N in (256, 8192, 65536):
        yield gather_keys(N)


def write(T: int) -> Bench:
    """Both parts are columns of one projection."""
    blocks = blocks_for(T, PAGE)
    where = slots(T, blocks, PAGE)

    def make():
        fused = cupy_normal(T, LATENT + ROTATED)
        return (fused[:, :LATENT], fused[:, LATENT:], cupy_bytes(blocks, PAGE, ENTRY), cupy_array(where)), {}, None

    def vllm():
        fused, cache, at = torch_normal(T, LATENT + ROTATED), torch_bytes(blocks, PAGE, ENTRY), torch_array(where)
        call, one = cache_ops().concat_and_cache_mla, torch_array(np.ones(1, np.float32))
        return lambda: call(fused[:, :LATENT], fused[:, LATENT:], cache, at, "fp8_ds_mla", one)

    op = "concat_and_cache_ds_mla"
    size = T * (2 * (LATENT + ROTATED) + ENTRY)
    return Bench("kv_quant_latent", f"{op} {T}x({LATENT}+{ROTATED})", ours(op, make), {"vllm": vllm}, size)


def read(T: int) -> Bench:
    """vLLM gathers by a table, here one page after the other."""
    pages = -(-T // PAGE)
    rows = pages * PAGE

    def make():
        return (cupy_bytes(pages, PAGE, ENTRY),), {}, cupy_empty(pages, PAGE, LATENT + ROTATED)

    def vllm():
        cache, out = torch_bytes(pages, PAGE, ENTRY), torch_empty(rows, LATENT + ROTATED)
        call, starts = cache_ops().cp_gather_and_upconvert_fp8_kv_cache, torch_array(np.zeros(1, np.int32))
        table = torch_array(np.arange(pages, dtype=np.int32)[None])
        return lambda: call(cache, out, table, starts, 1, None)

    op, size = "dequantize_ds_mla", rows * (ENTRY + 2 * (LATENT + ROTATED))
    return Bench("kv_quant_latent", f"{op} {rows}x{LATENT + ROTATED}", ours(op, make), {"vllm": vllm}, size)


def write_keys(T: int) -> Bench:
    blocks = blocks_for(T, PAGE)
    where = slots(T, blocks, PAGE)

    def make():
        arrays = cupy_normal(T, KEY), cupy_bytes(blocks, PAGE, KEY + 4), cupy_array(where)
        return arrays, {"ue8m0": True}, None

    def vllm():
        call, arrays = cache_ops().indexer_k_quant_and_cache, (torch_normal(T, KEY), torch_bytes(blocks, PAGE, KEY + 4))
        at = torch_array(where)
        return lambda: call(*arrays, at, KEY, "ue8m0")

    op = "indexer_k_quant_and_cache"
    return Bench("kv_quant_latent", f"{op} {T}x{KEY}", ours(op, make), {"vllm": vllm}, T * (3 * KEY + 4))


def gather_keys(N: int) -> Bench:
    blocks, table, bounds = tables(N, PAGE)

    def make():
        results = cupy_empty(N, KEY, dtype=np.dtype(np.uint8)), cupy_empty(N, dtype=F32)
        return (cupy_bytes(blocks, PAGE, KEY + 4), *results, *map(cupy_array, (table, bounds))), {}, None

    def vllm():
        cache, call = torch_bytes(blocks, PAGE, KEY + 4), cache_ops().cp_gather_indexer_k_quant_cache
        results = torch_empty(N, KEY, dtype="uint8"), torch_empty(N, 4, dtype="uint8")
        lists = [torch_array(array) for array in (table, bounds)]
        return lambda: call(cache, *results, *lists)

    op = "cp_gather_indexer_k_quant_cache"
    return Bench("kv_quant_latent", f"{op} {N}x{KEY}", ours(op, make), {"vllm": vllm}, 2 * N * (KEY + 4))
