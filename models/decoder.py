"""The forward of llama, qwen3 and gemma3, written once over `ops`: it runs where its weights are.

Two layer layouts occur. llama and qwen3 norm before attention and before the MLP; gemma3 also norms what each of
them returns, before it joins the residual. Additions of the residual ride on the norm that follows them. Every
`rounding="vllm"` asks for the rounding points of vLLM's CUDA ops; in float32 they round as everything else does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vtlab import ops
from vtlab.ops import arrays as places
from vtlab.ops.arrays import Arrays
from vtlab.ops.numerics import round_to

from .batch import Batch
from .buffers import Fresh
from .config import ModelConfig
from .weights import Layer, Weights

Keep = Callable[[str, tuple[int, ...], np.dtype], object]


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of one layer, [num_blocks, block_size, kv heads, head_dim], written in place."""

    key: np.ndarray
    value: np.ndarray


class Decoder:
    """A model's forward: `forward(batch, caches)` gives the logits of the rows that are to be sampled.

    device : "cpu", "cuda", or the arrays of a device; the weights are sent there. `arrays` are those that it has.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        max_positions: int | None = None,
        device: str | Arrays = "cpu",
    ):
        self.config, self.arrays = config, places.of(device)
        self.weights = weights if self.arrays is places.HOST else weights.mapped(self.arrays.send)
        self.dtype = weights.embed.dtype
        self.max_positions = min(max_positions or config.max_position_embeddings, config.max_position_embeddings)
        self._embedding_scale = float(round_to(np.float64(config.embedding_scale), self.dtype))
        self._fresh = Fresh(self.arrays)
        self._cos_sin = {
            kind: self.arrays.send(
                ops.rope_build_cache(
                    dict(parameters),
                    head_size=config.head_dim,
                    max_position=self.max_positions,
                    dtype=self.dtype.name,
                    emulate="f32",
                )
            )
            for kind, parameters in weights.rope.items()
        }

    def on(self, device: str | Arrays) -> Decoder:
        """The same model there: itself where it is there already, else with copies of its weights."""
        arrays = places.of(device)
        if arrays is self.arrays:
            return self
        return Decoder(self.config, self.weights.mapped(self.arrays.fetch), self.max_positions, arrays)

    def new_caches(self, num_blocks: int, block_size: int) -> list[KVCache]:
        """One zeroed KV cache for each layer."""
        config = self.config
        shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        zeros = self.arrays.zeros
        return [KVCache(zeros(shape, self.dtype), zeros(shape, self.dtype)) for _ in self.weights.layers]

    def forward(self, batch: Batch, caches: list[KVCache], keep: Keep | None = None):
        """Logits [rows to sample, V] in the model's dtype; the new tokens' keys and values are written to `caches`.

        The batch lives where the model does. keep : (name, shape, dtype) -> where to put a result, or None for fresh
        memory; results of one name are not needed at the same time.
        """
        run = _Forward(self, batch, keep or self._fresh)
        hidden = ops.embedding(self.weights.embed, batch.token_ids, out=run.rows("embedded", self.config.hidden_size))
        if self.config.gemma:
            out = run.rows("scaled", self.config.hidden_size)
            hidden = ops.mul_scalar(hidden, self._embedding_scale, out=out)
        residual = None
        step = run.sandwich_layer if self.config.gemma else run.pre_norm_layer
        for index, (layer, cache) in enumerate(zip(self.weights.layers, caches)):
            cos_sin = self._cos_sin[self.config.layer_types[index]]
            hidden, residual = step(layer, cache, cos_sin, self.config.window(index), hidden, residual)
        return run.logits(hidden, residual, self.weights)


class _Forward:
    """One forward on its way: the batch, and where results go."""

    def __init__(self, decoder: Decoder, batch: Batch, keep: Keep):
        self.config, self.dtype, self.arrays = decoder.config, decoder.dtype, decoder.arrays
        self.batch, self.keep, self.tokens = batch, keep, len(batch.token_ids)

    def rows(self, name: str, *shape: int):
        """Where to put a result with a row for each token."""
        return self.keep(name, (self.tokens, *shape), self.dtype)

    def pre_norm_layer(self, layer: Layer, cache: KVCache, cos_sin, window, hidden, residual):
        hidden, residual = self.norm("attn", hidden, layer.attn_norm, residual)
        hidden = self.attention(layer, cache, cos_sin, window, hidden)
        hidden, residual = self.norm("ffn", hidden, layer.ffn_norm, residual)
        return self.mlp(layer, hidden, ops.silu_and_mul), residual

    def sandwich_layer(self, layer: Layer, cache: KVCache, cos_sin, window, hidden, residual):
        hidden, residual = self.norm("attn", hidden, layer.attn_norm, residual)
        hidden = self.attention(layer, cache, cos_sin, window, hidden)
        hidden = self.scale("post_attn", hidden, layer.post_attn_norm)
        hidden, residual = self.norm("ffn", hidden, layer.ffn_norm, residual)
        return self.scale("post_ffn", self.mlp(layer, hidden, ops.gelu_and_mul), layer.post_ffn_norm), residual

    def mlp(self, layer: Layer, hidden, activation: Callable):
        gate_up = self.project("gate_up", hidden, layer.gate_up)
        out = self.rows("activated", layer.down.shape[1])
        return self.project("down", activation(gate_up, rounding="vllm", out=out), layer.down)

    def attention(self, layer: Layer, cache: KVCache, cos_sin, window, hidden):
        config, batch = self.config, self.batch
        q, k, v = self.heads(layer, self.project("qkv", hidden, layer.qkv))
        if config.qk_norm:
            q, k = self.scale("q_normed", q, layer.q_norm), self.scale("k_normed", k, layer.k_norm)
        rotated = self.together(self.rows("q_rotated", *q.shape[1:]), self.rows("k_rotated", *k.shape[1:]))
        q, _ = ops.rope_and_cache(
            q, k, v, batch.positions, cos_sin, cache.key, cache.value, batch.slot_mapping, out=rotated
        )
        out = ops.paged_attention(
            q,
            cache.key,
            cache.value,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            scale=config.softmax_scale,
            window=window,
            softcap=config.attn_logit_softcapping,
            out=self.rows("attended", *q.shape[1:]),
        )
        return self.project("mixed", out.reshape(self.tokens, -1), layer.o)

    def heads(self, layer: Layer, qkv):
        """The heads of q, k and v: in memory of their own where norms follow, which read them as rows."""
        config = self.config
        sizes = (config.q_size, config.kv_size, config.kv_size)
        if config.qk_norm:
            out = self.together(*(self.rows(name, size) for name, size in zip("qkv", sizes)))
            parts = ops.qkv_split(qkv, q_size=sizes[0], k_size=sizes[1], v_size=sizes[2], out=out)
        else:
            first, second = sizes[0], sizes[0] + sizes[1]
            parts = qkv[:, :first], qkv[:, first:second], qkv[:, second:]
        return tuple(part.reshape(self.tokens, -1, config.head_dim) for part in parts)

    def logits(self, hidden, residual, weights: Weights):
        """The last norm and the vocabulary's scores of the rows to sample."""
        config, rows = self.config, self.batch.sample_rows
        if rows.size == 0:
            return self.arrays.empty((0, config.vocab_size), self.dtype)
        if rows.size < self.tokens:
            shape = (rows.size, config.hidden_size)
            hidden = ops.embedding(hidden, rows, out=self.keep("sampled", shape, self.dtype))
            residual = ops.embedding(residual, rows, out=self.keep("sampled_residual", shape, self.dtype))
        self.tokens = rows.size
        hidden, _ = self.norm("final", hidden, weights.norm, residual)
        logits = self.project("logits", hidden, weights.head)
        cap = config.final_logit_softcapping
        out = self.rows("capped", config.vocab_size) if cap else None
        return ops.soft_cap(logits, cap, rounding="vllm_native", out=out) if cap else logits

    def project(self, name: str, x, weight):
        return ops.matmul_bt(x, weight, out=self.rows(name, weight.shape[0]))

    def norm(self, name: str, hidden, weight, residual):
        """The norm of hidden + residual, and that sum; the first norm of a model has no residual yet."""
        if residual is None:
            return self.scale(name, hidden, weight), hidden
        width = hidden.shape[1]
        out = self.together(self.rows(name, width), self.rows(f"{name}_residual", width))
        eps = self.config.rms_norm_eps
        return ops.rms_norm(hidden, weight, residual=residual, eps=eps, rounding="vllm", out=out)

    def scale(self, name: str, x, weight):
        out = self.rows(name, *x.shape[1:])
        return ops.rms_norm(x, weight, eps=self.config.rms_norm_eps, rounding="vllm", out=out)

    @staticmethod
    def together(*targets):
        """Several `out` as one, or None."""
        return None if targets[0] is None else targets
