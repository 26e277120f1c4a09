"""The latent cache of multi-head latent attention: entries of 512 + 64 in pages of 64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import cupy_empty, cupy_normal, ours, torch_empty, torch_normal
from .bench import TOKENS, Bench
from .kv_blocks import tables
from .kv_cache import blocks_for, cache_ops, cupy_array, slots, torch_array

PAGE, LATENT, ROTATED = 64, 512, 64
WIDTH = LATENT + ROTATED


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield concat_and_cache_mla(T)
    for N in (256, 8192, 65536):
        yield gather_mla_cache(N)


def concat_and_cache_mla(T: int) -> Bench:
    """Both parts are columns of one projection."""
    blocks = blocks_for(T, PAGE)
    where = slots(T, blocks, PAGE)

    def make():
        fused = cupy_normal(T, WIDTH)
        return (fused[:, :LATENT], fused[:, LATENT:], cupy_normal(blocks, PAGE, WIDTH), cupy_array(where)), {}, None

    def vllm():
        fused, cache, at = torch_normal(T, WIDTH), torch_normal(blocks, PAGE, WIDTH), torch_array(where)
        call, one = cache_ops().concat_and_cache_mla, torch_array(np.ones(1, np.float32))
        return lambda: call(fused[:, :LATENT], fused[:, LATENT:], cache, at, "auto", one)

    op = "concat_and_cache_mla"
    return Bench("kv_latent", f"{op} {T}x({LATENT}+{ROTATED})", ours(op, make), {"vllm": vllm}, 4 * T * WIDTH)


def gather_mla_cache(N: int) -> Bench:
    blocks, table, bounds = tables(N, PAGE)
    owners = np.repeat(np.arange(len(table), dtype=np.int32), np.diff(bounds))

    def make():
        arrays = cupy_empty(N, WIDTH), cupy_normal(blocks, PAGE, WIDTH)
        return (*arrays, *map(cupy_array, (table, bounds, owners))), {"num_tokens": N}, None

    def vllm():
        dst, src, one = torch_empty(N, WIDTH), torch_normal(blocks, PAGE, WIDTH), torch_array(np.ones(1, np.float32))
        call, lists = cache_ops().gather_and_maybe_dequant_cache, [torch_array(a) for a in (table, bounds, owners)]
        return lambda: call(src, dst, *lists, N, "auto", one, None)

    name = f"gather_mla_cache {N}x{WIDTH}"
    return Bench("kv_latent", name, ours("gather_mla_cache", make), {"vllm": vllm}, 4 * N * WIDTH)
