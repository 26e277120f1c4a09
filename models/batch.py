"""One step's work for a forward: the new tokens of several requests, flattened, with where their keys and values go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from vtlab.ops.arrays import HOST, Arrays


@dataclass(frozen=True, eq=False)
class Batch:
    """T new tokens of R requests, request after request.

    Attributes
    ----------
    token_ids, positions : int64 [T]. slot_mapping : int64 [T], the KV slot of each token.
    query_start_loc : int32 [R + 1], where each request's tokens begin. seq_lens : int32 [R], new tokens included.
    block_table : int32 [R, max blocks], padded with block 0.
    state_slots : int32 [R], the slot of each request's recurrent states; -1: none. begun : int32 [R], 0 for a request
        whose tokens are its first, and whose states are zeros whatever its slot holds.
    sample_rows : int64, the tokens whose logits are wanted, ascending.
    decoding : each request has one token, which is not its first.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    state_slots: np.ndarray
    begun: np.ndarray
    sample_rows: np.ndarray
    decoding: bool = False

    def on(self, arrays: Arrays) -> Batch:
        """The same batch where `arrays` are, in one copy; the batch itself on the host."""
        if arrays is HOST:
            return self
        layout = Layout({name: getattr(self, name).shape for name in _DTYPES})
        raw = np.empty(layout.size, np.uint8)
        views = layout.views(raw, self.decoding)
        for name in _DTYPES:
            getattr(views, name)[...] = getattr(self, name)
        return layout.views(arrays.send(raw), self.decoding)


class Layout:
    """A batch in one piece of memory, so that one copy brings it to a device: 16-byte aligned arrays by shape."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self._places, self.size = {}, 0
        for name, shape in shapes.items():
            begin, kind = -(-self.size // 16) * 16, _DTYPES[name]
            self.size = begin + math.prod(shape) * kind.itemsize
            self._places[name] = begin, self.size, kind, shape

    def views(self, raw, decoding: bool) -> Batch:
        """The batch whose arrays lie in `raw`, uint8 [size], on whatever device."""
        arrays = {
            name: raw[begin:end].view(kind).reshape(shape) for name, (begin, end, kind, shape) in self._places.items()
        }
        return Batch(**arrays, decoding=decoding)


_WIDE = ("token_ids", "positions", "slot_mapping", "sample_rows")
_DTYPES = {
    field.name: np.dtype(np.int64 if field.name in _WIDE else np.int32)
    for field in fields(Batch)
    if field.name != "decoding"
}


_PADDING = {"token_ids": 0, "positions": 0, "slot_mapping": -1, "seq_lens": 0, "state_slots": -1}


class DecodeInputs:
    """One new token of each of up to `rows` requests, in memory that stays where it is, padded by rows without work.

    `batch` is what a forward reads, views of `raw`.

    A row of padding has token 0, no slots, no keys and no query of its own, so that it changes no other row.
    """

    def __init__(self, arrays: Arrays, rows: int, max_blocks: int):
        layout = Layout({
            "token_ids": (rows,), "positions": (rows,), "slot_mapping": (rows,), "query_start_loc": (rows + 1,),
            "seq_lens": (rows,), "block_table": (rows, max_blocks), "state_slots": (rows,), "begun": (rows,),
            "sample_rows": (rows,),
        })  # fmt: skip
        self._arrays, self._staging, self.raw = arrays, arrays.staging(layout.size), arrays.empty((layout.size,), "u1")
        self._host, self.batch = layout.views(self._staging, True), layout.views(self.raw, True)
        self._host.sample_rows[...], self._host.begun[...] = np.arange(rows), 1

    def load(self, batch: Batch) -> None:
        """Put a batch of one new token a request here, in one copy that the host does not wait for."""
        count, host = len(batch.seq_lens), self._host
        for name, padding in _PADDING.items():
            target = getattr(host, name)
            target[:count], target[count:] = getattr(batch, name), padding
        host.query_start_loc[: count + 1], host.query_start_loc[count + 1 :] = batch.query_start_loc, count
        host.block_table[...] = 0
        host.block_table[:count, : batch.block_table.shape[1]] = batch.block_table
        self._arrays.upload(self._staging, self.raw)


@dataclass(frozen=True)
class Slice:
    """The new tokens of one request: `tokens` stand at positions start, start + 1, …; `blocks` is its block table.

    slot : of its recurrent states; by default its row in the batch.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: bool
    slot: int | None = None


def build(slices: Sequence[Slice], block_size: int) -> Batch:
    """Lay the slices of a step out as one `Batch`; those of models without blocks have none, and no KV slots."""
    lengths = np.array([len(item.tokens) for item in slices], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    table = np.zeros((len(slices), max((len(item.blocks) for item in slices), default=0)), np.int32)
    positions = [np.arange(item.start, item.start + len(item.tokens), dtype=np.int64) for item in slices]
    slots = []
    for row, (item, where) in enumerate(zip(slices, positions)):
        table[row, : len(item.blocks)] = item.blocks
        found = table[row, where // block_size] if item.blocks else np.full(len(where), -1)
        slots.append(np.where(found < 0, -1, found.astype(np.int64) * block_size + where % block_size))
    return Batch(
        token_ids=np.concatenate([np.asarray(item.tokens, np.int64) for item in slices]),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        query_start_loc=starts.astype(np.int32),
        seq_lens=np.array([item.start + len(item.tokens) for item in slices], np.int32),
        block_table=table,
        state_slots=np.array([row if item.slot is None else item.slot for row, item in enumerate(slices)], np.int32),
        begun=np.array([item.start > 0 for item in slices], np.int32),
        decoding=all(item.start > 0 and len(item.tokens) == 1 for item in slices),
        sample_rows=np.array([end - 1 for end, item in zip(starts[1:], slices) if item.sample], np.int64),
    )
