"""The paged cache of multi-head latent attention on a GPU: launchers of cuda/kv_latent.cu.

What a slot, a table or the bounds of requests say is checked as in `kv_cache`: outside of a capture alone.
"""

from __future__ import annotations

from vtlab.ops import providers

from .early import EARLY
from .gather import gather
from .kv_cache import check_slots
from .launch import PROVIDER, results, start
from .units import grid_of, unit_of


@providers.provider("concat_and_cache_mla", "cuda", PROVIDER)
def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, *, out=None):
    """oracle.kv_latent.concat_and_cache_mla."""
    op, item, (blocks, size, width) = "concat_and_cache_mla", kv_c.dtype.itemsize, kv_cache.shape
    results(op, out, (kv_c, k_pe, kv_cache, slot_mapping))
    check_slots(op, "kv_latent", "latent_slots_fit", slot_mapping, blocks * size)
    if not len(slot_mapping) * blocks * size:
        return
    steps = kv_c.strides[0], k_pe.strides[0], *kv_cache.strides[:2]
    unit = unit_of((kv_c, k_pe, kv_cache), (kv_c.shape[1] * item, width * item, *steps))
    latent, rotated, block_step, row_step = (step // unit for step in steps)
    lanes = width * item // unit
    work, block, chunks = grid_of(len(slot_mapping), lanes)
    args = [
        len(slot_mapping), lanes, chunks, kv_c, latent, kv_c.shape[1] * item // unit, k_pe, rotated, kv_cache,
        block_step, row_step, slot_mapping, size, blocks * size,
    ]  # fmt: skip
    start(op, "kv_latent", f"concat_{unit}{EARLY}", work, block, args)


@providers.provider("gather_mla_cache", "cuda", PROVIDER)
def gather_mla_cache(dst, src_cache, block_table, cu_seq_lens, token_to_seq, *, num_tokens, seq_starts=None, out=None):
    """oracle.kv_latent.gather_mla_cache."""
    op = "gather_mla_cache"
    results(op, out, (dst, src_cache, block_table, cu_seq_lens, token_to_seq, seq_starts))
    gather(
        op, "kv_latent", "gather_latent", num_tokens, src_cache, dst, block_table, cu_seq_lens, token_to_seq, seq_starts
    )
