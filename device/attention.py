"""Attention on a GPU: picks among the kernels of cuda/attention.cu, which all give a row the mirror's bytes.

Nothing here reads metadata from the device: how the rows spread over the requests is the kernels' to find out.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .launch import KINDS, MULTIPROCESSORS, PROVIDER, kind, results, start, vectors
from .runtime import current
from .scratch import scratch

_CHUNK = 64
_NAMES = {KINDS["float32"]: "f32", KINDS["bfloat16"]: "bf16", KINDS["float16"]: "f16"}
_DECODE = {  # dtype of the cache -> (widest head, {query heads a block: most warps}, vectors a lane)
    "bf16": ((64, {4: 16}, 1), (128, {1: 16, 2: 8, 4: 16}, 2), (256, {1: 8, 4: 8}, 4), (512, {2: 8}, 8)),
    "f16": ((128, {4: 8}, 2), (256, {4: 8}, 4), (512, {2: 8}, 8)),
    "f32": ((128, {4: 8}, 2), (256, {4: 8}, 4), (512, {2: 8}, 8)),
}
"""The kernels of attention_decode, as the .cu file has them."""
_PREFILL = ((128, 64), (256, 32), (512, 16))
"""Widest head -> pairs of row and query head a block."""
_WIDEST = 512
_FEW_ROWS = 32
"""Up to here every row is treated as a decode step: one block a row and key head, and more blocks for a long row."""
_BLOCK_SHARED = 99 << 10  # what a block may have on the smallest device
_FEW_PIECES = 1024
"""Up to so many (row, head, chunk), query heads of a key head go into blocks of their own; measured on an H200."""
_WARPS = (16, 8, 4)
"""Warps a block: the most with which the blocks run at once, 16 warps a multiprocessor."""
_PARTIAL = 1 << 27  # bytes of partial results from which on rows are not split
_PLACES = 16 * _CHUNK
_FAR = 1 << 30


def _pitch(width: int, item: int) -> int:
    """Bytes between rows of a tile in shared memory: an odd number of 16, so that neighbours meet in no bank."""
    return 16 * (-(-width // 8) * 8 * item // 16 | 1)


class _Call:
    """One call's arguments as the kernels take them; `rows` and `items` of work are added by what is launched."""

    def __init__(self, op, q, k, v, strides, table, seq_lens, starts, page_size, scale, causal, window, softcap, sinks,
                 lse_includes_sink, alibi_slopes, p_round, out, lse):  # fmt: skip
        self.op, self.tokens, self.heads, self.width = op, *q.shape
        if self.width > _WIDEST:
            raise ContractError(op, "q", f"heads of {self.width}", f"at most {_WIDEST} on a GPU")
        self.kv_heads, item = k.shape[-2], k.dtype.itemsize
        self.group = self.heads // self.kv_heads
        self.requests = 1 if starts is None else len(starts) - 1
        self.keys = k.shape[0] if starts is None else table.shape[1] * page_size
        self.name, self.item = _NAMES[kind(k)], item
        self.pitch, self.padded = _pitch(self.width, item), -(-self.width // 8) * 8
        left, right = (_FAR, _FAR) if window is None else (min(int(side), _FAR) for side in window)
        self.chunks = max(1, min(-(-self.keys // _CHUNK), (left + right) // _CHUNK + 2))
        steps = [stride // item for each in strides for stride in each]
        whole = vectors(self.width, (k, steps[0]), (v, steps[3]))
        wide = whole and all(step * item % 16 == 0 for step in steps)
        shared = isinstance(causal, (bool, np.bool_))
        self._args = [
            q, kind(q), k, v, *steps, int(wide), table, 0 if table is None else table.shape[1], page_size, seq_lens,
            starts, self.requests, self.tokens, self.keys, self.heads, self.kv_heads, self.width, np.float32(scale),
            np.float32(softcap), sinks, alibi_slopes, None if shared else causal, int(shared and bool(causal)), left,
            right, KINDS["float32" if p_round is None else p_round], int(lse_includes_sink), out, lse,
        ]  # fmt: skip

    def run(self) -> None:
        if not self.tokens or not self.heads:
            return
        if self.tokens in (1, self.requests) or self.tokens <= _FEW_ROWS:
            self._decode(self.tokens, by_request=False)
            return
        several = self.requests > 1
        if several:
            self._decode(self.requests, by_request=True)
        self._prefill(skip_single=several)

    def _decode(self, items: int, by_request: bool) -> None:
        _, offered, times = next(each for each in _DECODE[self.name] if self.width <= each[0])
        together = self._together(items, offered)
        blocks = items * self.kv_heads * -(-self.group // together)
        width = 64 * times
        step = 4 * width * self.item
        each = max(2 * step, min(8192, 8 * step)) + _PLACES + together * 4 * (max(width, _CHUNK) + 4)
        rest = together * 4 * (2 * width + 4)
        warps, splits = self._cut(blocks, min(offered[together], (current().shared_memory() - rest) // each))
        partial = items * self.heads * self.chunks
        if partial * (self.width + 2) * 4 > _PARTIAL or not self.width:
            splits = 1
        parts = tops = totals = None
        if splits > 1:
            block = scratch.take("attention", partial * (self.width + 2) * 4)
            parts = current().pointer(block)
            tops = parts + 4 * partial * self.width
            totals = tops + 4 * partial
        args = [*self._args, self.pitch, parts, tops, totals, self.chunks, splits, int(by_request)]
        kernel = f"attention_decode_{self.name}_{together}x{times}"
        start(self.op, "attention", kernel, blocks * splits, (32 * warps, 1), args, warps * each + rest)
        if splits > 1:
            start(self.op, "attention", "attention_join", items * self.heads * -(-self.width // 128), (128, 1), args)

    def _together(self, items: int, offered: dict[int, int]) -> int:
        """Query heads a block: those of one key head, which share its loads, or fewer where warps would be few."""
        whole = next((count for count in offered if count >= self.group), max(offered))
        pieces = items * self.kv_heads * self.chunks
        return next((n for n in offered if n == whole or pieces * -(-self.group // n) <= _FEW_PIECES), whole)

    def _cut(self, blocks: int, most: int) -> tuple[int, int]:
        """(warps a block, blocks that share a row's chunks)."""
        for warps in _WARPS:
            if warps <= most and 8 * MULTIPROCESSORS < blocks * warps <= 16 * MULTIPROCESSORS:
                return warps, 1
        if blocks > MULTIPROCESSORS:
            return _WARPS[-1], 1
        warps = 8 if most >= 8 and blocks * -(-self.chunks // 8) >= MULTIPROCESSORS - 4 else _WARPS[-1]
        return warps, max(1, min(-(-self.chunks // warps), 4 * MULTIPROCESSORS // blocks))

    def _prefill(self, skip_single: bool) -> None:
        widest, pairs = next(each for each in _PREFILL if self.width <= each[0])
        tile = 16 if self.item == 4 or widest == 512 else 64 if widest == 128 else 32
        group_rows = min(self.group, pairs)
        rows_each = pairs // group_rows
        tiles = self.tokens // rows_each + self.requests + 1
        fixed = _PLACES + pairs * 4 * (self.padded + 4 + _CHUNK + 4 + 7)
        stages = 2 if fixed + 2 * tile * self.pitch <= _BLOCK_SHARED else 1
        args = [*self._args, self.pitch, tiles, group_rows, int(skip_single), stages]
        grid = tiles * self.kv_heads * -(-self.group // group_rows)
        kernel = f"attention_prefill_{self.name}_{widest}"
        start(self.op, "attention", kernel, grid, (256, 1), args, fixed + stages * tile * self.pitch)


def _targets(op, q, return_lse, out, inputs):
    forms = [(q.shape, q.dtype)] + ([((q.shape[1], q.shape[0]), np.dtype(np.float32))] if return_lse else [])
    written = results(op, out, inputs, *forms)
    return written, written[0], written[1] if return_lse else None


@providers.provider("attention", "cuda", PROVIDER)
def attention(
    q, k, v, *, scale, causal=True, window=None, softcap=0.0, sinks=None, lse_includes_sink=True, alibi_slopes=None,
    return_lse=False, p_round=None, out=None,
):  # fmt: skip
    """oracle.attention.attention: paged attention over one request whose keys are one page."""
    written, target, lse = _targets("attention", q, return_lse, out, (q, k, v, sinks, alibi_slopes))
    strides = [(0, each.strides[0], each.strides[1]) for each in (k, v)]
    _Call("attention", q, k, v, strides, None, None, None, 1, scale, causal, window, softcap, sinks,
          lse_includes_sink, alibi_slopes, p_round, target, lse).run()  # fmt: skip
    return written if return_lse else target


@providers.provider("paged_attention", "cuda", PROVIDER)
def paged_attention(
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, *, scale, causal=True, window=None, softcap=0.0,
    sinks=None, lse_includes_sink=True, alibi_slopes=None, return_lse=False, p_round=None, out=None,
):  # fmt: skip
    """oracle.attention.paged_attention. Metadata stays on the device and is trusted there: pages must exist."""
    several = None if isinstance(causal, (bool, np.bool_)) else causal
    metadata = (block_table, seq_lens, query_start_loc, several)
    inputs = (q, k_cache, v_cache, sinks, alibi_slopes, *metadata)
    written, target, lse = _targets("paged_attention", q, return_lse, out, inputs)
    strides = [cache.strides[:3] for cache in (k_cache, v_cache)]
    _Call("paged_attention", q, k_cache, v_cache, strides, block_table, seq_lens, query_start_loc, k_cache.shape[1],
          scale, causal, window, softcap, sinks, lse_includes_sink, alibi_slopes, p_round, target,
          lse).run()  # fmt: skip
    return written if return_lse else target
