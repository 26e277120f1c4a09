"""The forward of llama, qwen3 and gemma3, written once over `ops`.

Two layer layouts occur. llama and qwen3 norm before attention and before the MLP; gemma3 also norms what each of
them returns, before it joins the residual. Additions of the residual ride on the norm that follows them. Every
`rounding="vllm"` asks for the rounding points of vLLM's CUDA ops; in float32 they round as everything else does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtlab import ops
from vtlab.ops.numerics import round_to

from .batch import Batch
from .config import ModelConfig
from .weights import Layer, Weights


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of one layer, [num_blocks, block_size, kv heads, head_dim], written in place."""

    key: np.ndarray
    value: np.ndarray


class Decoder:
    """A model's forward: `forward(batch, caches)` gives the logits of the rows that are to be sampled."""

    def __init__(self, config: ModelConfig, weights: Weights, max_positions: int | None = None):
        self.config, self.weights = config, weights
        self.dtype = weights.embed.dtype
        self.max_positions = min(max_positions or config.max_position_embeddings, config.max_position_embeddings)
        self._embedding_scale = float(round_to(np.float64(config.embedding_scale), self.dtype))
        self._cos_sin = {
            kind: ops.rope_build_cache(
                dict(parameters),
                head_size=config.head_dim,
                max_position=self.max_positions,
                dtype=self.dtype.name,
                emulate="f32",
            )
            for kind, parameters in weights.rope.items()
        }

    def new_caches(self, num_blocks: int, block_size: int) -> list[KVCache]:
        """One zeroed KV cache for each layer."""
        config = self.config
        shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        return [KVCache(np.zeros(shape, self.dtype), np.zeros(shape, self.dtype)) for _ in self.weights.layers]

    def forward(self, batch: Batch, caches: list[KVCache]) -> np.ndarray:
        """Logits [rows to sample, V] in the model's dtype; the new tokens' keys and values are written to `caches`."""
        hidden = ops.embedding(self.weights.embed, batch.token_ids)
        if self.config.gemma:
            hidden = ops.mul_scalar(hidden, self._embedding_scale)
        residual = None
        step = self._sandwich_layer if self.config.gemma else self._pre_norm_layer
        for index, (layer, cache) in enumerate(zip(self.weights.layers, caches)):
            hidden, residual = step(index, layer, hidden, residual, batch, cache)
        rows = batch.sample_rows
        if rows.size == 0:
            return np.empty((0, self.config.vocab_size), self.dtype)
        hidden, _ = self._norm(hidden[rows], self.weights.norm, residual[rows])
        logits = ops.matmul_bt(hidden, self.weights.head)
        cap = self.config.final_logit_softcapping
        return ops.soft_cap(logits, cap, rounding="vllm_native") if cap else logits

    def _pre_norm_layer(self, index, layer: Layer, hidden, residual, batch: Batch, cache: KVCache):
        hidden, residual = self._norm(hidden, layer.attn_norm, residual)
        hidden = self._attention(index, layer, hidden, batch, cache)
        hidden, residual = self._norm(hidden, layer.ffn_norm, residual)
        gate_up = ops.matmul_bt(hidden, layer.gate_up)
        return ops.matmul_bt(ops.silu_and_mul(gate_up, rounding="vllm"), layer.down), residual

    def _sandwich_layer(self, index, layer: Layer, hidden, residual, batch: Batch, cache: KVCache):
        hidden, residual = self._norm(hidden, layer.attn_norm, residual)
        hidden = self._attention(index, layer, hidden, batch, cache)
        hidden = self._scale(hidden, layer.post_attn_norm)
        hidden, residual = self._norm(hidden, layer.ffn_norm, residual)
        gate_up = ops.matmul_bt(hidden, layer.gate_up)
        hidden = ops.matmul_bt(ops.gelu_and_mul(gate_up, rounding="vllm"), layer.down)
        return self._scale(hidden, layer.post_ffn_norm), residual

    def _attention(self, index, layer: Layer, hidden, batch: Batch, cache: KVCache) -> np.ndarray:
        config, tokens = self.config, len(hidden)
        qkv = ops.matmul_bt(hidden, layer.qkv)
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        ends = np.cumsum([count * config.head_dim for count in heads])
        q, k, v = (part.reshape(tokens, -1, config.head_dim) for part in np.split(qkv, ends[:-1], axis=1))
        if config.qk_norm:
            q, k = self._scale(q, layer.q_norm), self._scale(k, layer.k_norm)
        q, k = ops.rope_from_cache(q, k, batch.positions, self._cos_sin[config.layer_types[index]])
        ops.reshape_and_cache(k, v, cache.key, cache.value, batch.slot_mapping)
        out = ops.paged_attention(
            q,
            cache.key,
            cache.value,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            scale=config.softmax_scale,
            window=config.window(index),
            softcap=config.attn_logit_softcapping,
        )
        return ops.matmul_bt(out.reshape(tokens, -1), layer.o)

    def _norm(self, hidden, weight, residual):
        """The norm of hidden + residual, and that sum; the first norm of a model has no residual yet."""
        if residual is None:
            return self._scale(hidden, weight), hidden
        return ops.rms_norm(hidden, weight, residual=residual, eps=self.config.rms_norm_eps, rounding="vllm")

    def _scale(self, x, weight):
        return ops.rms_norm(x, weight, eps=self.config.rms_norm_eps, rounding="vllm")
