"""What the host reads of a step, once: each row's token, its log-probability and rank, and the most likely tokens."""

from __future__ import annotations

import numpy as np

from vtlab import ops
from vtlab.ops.arrays import Arrays

from .request import TokenLogprobs


class Report:
    """Tokens and log-probabilities of `rows` rows in one piece of a device's memory.

    ids : int64 [rows], the token of each row, for the sampler to write. The rest is filled by `gather`.
    """

    def __init__(self, arrays: Arrays, rows: int, top: int):
        self._arrays, self.top = arrays, top
        self._wide = rows, top + 1
        self.raw = arrays.empty((16 * rows + 8 * rows * (top + 1),), np.uint8)
        self.ids, *self._gathered = self._views(self.raw)

    def gather(self, logprobs) -> None:
        """Fill in what float32 log-probabilities [rows, V] say of `ids`."""
        ranks, indices, values = self._gathered
        ops.gather_logprobs(logprobs, self.top, self.ids, out=(indices, values, ranks))

    def read(self) -> list[tuple[int, TokenLogprobs]]:
        """Every row's token and log-probabilities; waits for the device."""
        ids, ranks, indices, values = self._views(self._arrays.fetch(self.raw))
        return [
            (int(token), TokenLogprobs(float(row[0]), int(rank), tuple(zip(best[1:].tolist(), row[1:].tolist()))))
            for token, rank, best, row in zip(ids, ranks, indices, values)
        ]

    def _views(self, raw) -> tuple:
        rows, width = self._wide
        ids, ranks = (raw[8 * rows * i : 8 * rows * (i + 1)].view(np.int64) for i in range(2))
        rest = raw[16 * rows :]
        indices, values = rest[: rest.size // 2].view(np.int32), rest[rest.size // 2 :].view(np.float32)
        return ids, ranks, indices.reshape(rows, width), values.reshape(rows, width)
