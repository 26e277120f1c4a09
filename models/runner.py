"""One step of a model: eagerly, or for a decode step as one graph for each shape of it, padded on a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtlab import ops
from vtlab.ops.arrays import HOST, Arrays
from vtlab.ops.captured import seen

from .batch import Batch, DecodeInputs
from .buffers import Fresh, Kept
from .decoder import Decoder, Keep
from .report import Report

_STEP = 8


@dataclass(frozen=True, eq=False)
class Scores:
    """What a step gives the sampler, on the model's device: raw logits float32 [S, V]; rows beyond S are padding.

    logprobs float32 [S, V] and `report`, the greedy tokens with their log-probabilities, are None on the host, where
    they are made only for who asks.
    """

    arrays: Arrays
    raw: np.ndarray
    logprobs: np.ndarray | None = None
    report: Report | None = None


class Runner:
    """A decoder with its KV cache of `num_blocks` blocks.

    graphs : replay steps that decode one token of each request from a graph, where the device can.
    """

    @property
    def eager(self) -> str | None:
        """Why such steps run op by op; None where they are replayed."""
        if self.graphs is None:
            return f"no graphs, by choice or because nothing captures calls on {self.arrays.device}"
        return getattr(self.graphs, "refused", {}).get("decode")

    def __init__(self, decoder: Decoder, num_blocks: int, block_size: int, max_num_seqs: int, graphs: bool = True):
        self.decoder, self.arrays = decoder, decoder.arrays
        self.graphs = self.arrays.graphs() if graphs else None
        self.caches = decoder.new_caches(num_blocks, block_size, max_num_seqs)
        self._sizes = range(1, max_num_seqs + 1) if self.arrays is HOST else padded_sizes(max_num_seqs)
        self._max_blocks = num_blocks
        self._fresh, self._kept = Fresh(self.arrays), Kept(self.arrays, self._sizes[-1])
        self.inputs: dict[tuple[int, int], DecodeInputs] = {}
        self._reports: dict[tuple[int, int], Report] = {}

    def run(self, batch: Batch, top: int = 0) -> Scores:
        """The scores of the batch's rows to sample; `top` is how many log-probabilities a report must hold.

        Errors: those of the ops. The step's keys and values may be in the cache then; running it again rewrites them.
        """
        rows, decoding = len(batch.seq_lens), batch.decoding and batch.sample_rows.size == len(batch.seq_lens)
        if self.graphs is None or not decoding or rows > self._sizes[-1]:
            report = None if self.arrays is HOST else Report(self.arrays, batch.sample_rows.size, top)
            return self._step(batch.on(self.arrays), self._fresh, report)
        size = next(size for size in self._sizes if size >= rows)
        width = padded_width(batch.block_table.shape[1], self._max_blocks)
        inputs = self.inputs.get((size, width))
        if inputs is None:
            inputs = self.inputs[size, width] = DecodeInputs(self.arrays, size, width)
        vocab = self.decoder.config.vocab_size
        inputs.load(batch)
        if self.arrays is HOST:
            self.graphs.run("decode", lambda: self._step(inputs.batch, self._kept, None), [inputs.raw])
            return Scores(self.arrays, self._raw(size, vocab))
        report = self._reports.get((size, top))
        if report is None:
            report = self._reports[size, top] = Report(self.arrays, size, top)
        self.graphs.run("decode", lambda: self._step(inputs.batch, self._kept, report), [inputs.raw, report.raw])
        return Scores(self.arrays, self._raw(size, vocab), self._kept("logprobs", (size, vocab), _F32), report)

    def _raw(self, size: int, vocab: int):
        """Where the captured step leaves its logits in float32."""
        return self._kept("raw" if self.decoder.dtype != _F32 else "logits", (size, vocab), _F32)

    def _step(self, batch: Batch, keep: Keep, report: Report | None) -> Scores:
        batch, caches = seen(batch), [seen(cache) for cache in self.caches]
        logits = self.decoder.forward(batch, caches, lambda *form: seen(keep(*form)))
        raw = logits if logits.dtype == _F32 else ops.cast_f32(logits, out=keep("raw", logits.shape, _F32))
        if report is None or not len(raw):
            return Scores(self.arrays, raw)
        logprobs = ops.compute_logprobs(raw, out=keep("logprobs", raw.shape, _F32))
        ops.greedy_argmax(raw, out=report.ids)
        report.gather(logprobs)
        return Scores(self.arrays, raw, logprobs, report)


_F32 = np.dtype(np.float32)


def padded_sizes(most: int) -> tuple[int, ...]:
    """Numbers of requests that graphs are made for: 1, 2, 4, then multiples of 8 up to `most`, which is the last."""
    sizes = {1, 2, 4, *range(_STEP, most, _STEP), most}
    return tuple(sorted(size for size in sizes if size <= most))


def padded_width(blocks: int, most: int) -> int:
    """Blocks of a request that a graph is made for: a power of two from 8 on, so that a few graphs serve all lengths.

    Attention deals its work out over the keys that a table has room for, so a wide table would cost short requests.
    """
    return min(max(_STEP, 1 << (blocks - 1).bit_length()), most)
