"""The forward of every family over `ops`: it runs where its weights are."""

from __future__ import annotations

import numpy as np

from vtlab import ops
from vtlab.ops import arrays as places
from vtlab.ops.arrays import Arrays
from vtlab.ops.dtypes import FLOATS
from vtlab.ops.dtypes import dtype as dtype_of
from vtlab.ops.errors import ContractError

from .batch import Batch
from .block_linear import BlockLinear
from .buffers import Fresh
from .cache import KVCache, StateCache
from .config import LayerConfig, ModelConfig, StateConfig
from .families import FAMILIES
from .step import Keep, Step
from .weights import Weights


class Decoder:
    """A model's forward: `forward(batch, caches)` gives the logits of the rows that are to be sampled.

    device : "cpu", "cuda", or the arrays of a device; the weights are sent there. `arrays` are those that it has.
    kv_dtype : of keys and values in their cache, into which they are rounded once where it is another than the model's;
    by default the model's, but float16, as in llama.cpp, for a float32 model on the CPU whose matrices stay in the
    blocks of a GGUF file.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        max_positions: int | None = None,
        device: str | Arrays = "cpu",
        kv_dtype: str | None = None,
    ):
        if kv_dtype not in (None, *FLOATS):
            raise ContractError("load", "kv_dtype", kv_dtype, " or ".join(FLOATS))
        self.config, self.family, self.arrays = config, FAMILIES[config.family], places.of(device)
        self.weights = weights if self.arrays is places.HOST else weights.mapped(self.arrays.send)
        self.dtype, self._kv_choice = weights.embed.dtype, kv_dtype
        self.kv_dtype = dtype_of(kv_dtype) if kv_dtype else self._usual_kv_dtype()
        self.max_positions = min(max_positions or config.max_position_embeddings, config.max_position_embeddings)
        self._fresh = Fresh(self.arrays)
        tables = {kind: self._rotary(kind) for kind in weights.rope} | self.family.tables(config, self.max_positions)
        self._tables = {name: self.arrays.send(table) for name, table in tables.items()}

    def _rotary(self, kind: str):
        """cos and sin of every position, for the layers of a kind; of LongRoPE's two tables, the long one for a model
        that is served beyond its original context."""
        head_dim = next(layer.head_dim for layer in self.config.layers if layer.kind == kind)
        parameters, positions = dict(self.weights.rope[kind]), self.max_positions
        table = ops.rope_build_cache(
            parameters, head_size=head_dim, max_position=positions, dtype=self.dtype.name, emulate="f32"
        )
        if parameters["rope_type"] != "longrope":
            return table
        original = parameters["original_max_position_embeddings"]
        return table[original:] if positions > original else table[:original]

    def on(self, device: str | Arrays) -> Decoder:
        """The same model there: itself where it is there already, else with copies of its weights."""
        arrays = places.of(device)
        if arrays is self.arrays:
            return self
        here = self.weights.mapped(self.arrays.fetch)
        return Decoder(self.config, here, self.max_positions, arrays, self._kv_choice)

    def _usual_kv_dtype(self) -> np.dtype:
        kept = (value for layer in self.weights.layers for value in vars(layer).values())
        as_ggml = self.dtype == np.float32 and any(isinstance(value, BlockLinear) for value in kept)
        return np.dtype(np.float16) if as_ggml and self.arrays is places.HOST else self.dtype

    def new_caches(self, num_blocks: int, block_size: int, num_slots: int | None = None) -> list[KVCache | StateCache]:
        """A zeroed cache for each layer: keys and values in blocks, or states in slots, by default as many of these as
        blocks; layers that share keys and values have one and the same."""
        caches: list[KVCache | StateCache] = []
        for layer in self.config.layers:
            if layer.state is not None:
                caches.append(self._states(layer.state, num_blocks if num_slots is None else num_slots))
                continue
            if layer.kv_layer is not None:
                caches.append(caches[layer.kv_layer])
                continue
            caches.append(KVCache(*(self._pages(num_blocks, block_size, layer) for _ in range(2))))
        return caches

    def _pages(self, num_blocks: int, block_size: int, layer: LayerConfig):
        """Zeroed pages; on the host the tokens of a head lie side by side in a page, where one thread reads them."""
        heads, width = layer.num_key_value_heads, layer.head_dim
        if self.arrays is places.HOST:
            return self.arrays.zeros((num_blocks, heads, block_size, width), self.kv_dtype).transpose(0, 2, 1, 3)
        return self.arrays.zeros((num_blocks, block_size, heads, width), self.kv_dtype)

    def _states(self, layer: StateConfig, slots: int) -> StateCache:
        conv = self.arrays.zeros((slots, layer.channels, layer.taps), self.dtype)
        return StateCache(conv, self.arrays.zeros((slots, *layer.shape), np.dtype(np.float32)))

    def forward(self, batch: Batch, caches: list[KVCache | StateCache], keep: Keep | None = None):
        """Logits [rows to sample, V] in the model's dtype; `caches` take the new tokens' keys, values and states.

        The batch lives where the model does. keep : (name, shape, dtype) -> where to put a result, or None for fresh
        memory; results of one name are not needed at the same time.
        """
        step = Step(self.config, self.weights, self._tables, self.arrays, batch, caches, keep or self._fresh)
        hidden, residual = self.family.embed(step), None
        for index in range(len(self.weights.layers)):
            hidden, residual = self.family.layer(step, index, hidden, residual)
        if batch.sample_rows.size == 0:
            return self.arrays.empty((0, self.config.vocab_size), self.dtype)
        return self.family.head(step, *step.sampled(hidden, residual))


__all__ = ["Decoder", "KVCache", "Keep", "StateCache"]
