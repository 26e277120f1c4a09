"""One step's work for a forward: the new tokens of several requests, flattened, with where their keys and values go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Batch:
    """T new tokens of R requests, request after request.

    Attributes
    ----------
    token_ids, positions : int64 [T]. slot_mapping : int64 [T], the KV slot of each token.
    query_start_loc : int32 [R + 1], where each request's tokens begin. seq_lens : int32 [R], new tokens included.
    block_table : int32 [R, max blocks], padded with block 0. sample_rows : int64, the tokens whose logits are wanted.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    sample_rows: np.ndarray


@dataclass(frozen=True)
class Slice:
    """The new tokens of one request: `tokens` stand at positions start, start + 1, …; `blocks` is its block table."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: bool


def build(slices: Sequence[Slice], block_size: int) -> Batch:
    """Lay the slices of a step out as one `Batch`."""
    lengths = np.array([len(item.tokens) for item in slices], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    table = np.zeros((len(slices), max((len(item.blocks) for item in slices), default=0)), np.int32)
    positions = [np.arange(item.start, item.start + len(item.tokens), dtype=np.int64) for item in slices]
    slots = []
    for row, (item, where) in enumerate(zip(slices, positions)):
        table[row, : len(item.blocks)] = item.blocks
        slots.append(table[row, where // block_size].astype(np.int64) * block_size + where % block_size)
    return Batch(
        token_ids=np.concatenate([np.asarray(item.tokens, np.int64) for item in slices]),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        query_start_loc=starts.astype(np.int32),
        seq_lens=np.array([item.start + len(item.tokens) for item in slices], np.int32),
        block_table=table,
        sample_rows=np.array([end - 1 for end, item in zip(starts[1:], slices) if item.sample], np.int64),
    )
