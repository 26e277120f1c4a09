"""One forward on its way, and the blocks that layers of all families are made of.

Every `rounding="vllm"` asks for the rounding points of vLLM's CUDA ops; in float32 they round as everything else does.
A result's name says where it is kept during captured steps: results of one name are not needed at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from vtlab import ops
from vtlab.ops.arrays import Arrays
from vtlab.ops.fusion import fused_chain
from vtlab.ops.numerics import round_to

from .attention import attention
from .batch import Batch
from .cache import KVCache, StateCache
from .config import ModelConfig
from .linear import Linear

if TYPE_CHECKING:
    from .weights import Layer, Weights

Keep = Callable[[str, tuple[int, ...], np.dtype], object]


class Step:
    """The batch, the weights, the caches, and where results go.

    tables : what is read at a token's position: the rotary table of each kind of layer, and the family's own.
    keep : (name, shape, dtype) -> where to put a result, or None. kept : what a family makes once for all layers.
    tokens : rows of the results; those of the batch, until `sampled` leaves some of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        tables: Mapping[str, object],
        arrays: Arrays,
        batch: Batch,
        caches: list[KVCache | StateCache],
        keep: Keep,
    ):
        self.config, self.weights, self.layers, self.tables = config, weights, weights.layers, tables
        self.arrays, self.batch, self.caches, self.keep = arrays, batch, caches, keep
        self.kept: dict[str, object] = {}
        self.dtype, self.tokens = weights.embed.dtype, len(batch.token_ids)

    def rows(self, name: str, *shape: int, dtype=None):
        """Where to put a result with a row for each token."""
        return self.keep(name, (self.tokens, *shape), dtype or self.dtype)

    @staticmethod
    def together(*targets):
        """Several `out` as one, or None."""
        return None if targets[0] is None else targets

    # Pieces.

    def lookup(self):
        """Embeddings of the tokens."""
        return self.weights.embed.lookup(self.batch.token_ids, self.rows("embedded", self.config.hidden_size))

    def embed(self):
        """Embeddings of the tokens, scaled where the family scales them by a number in the model's dtype."""
        return self.scale("scaled", self.lookup(), self.config.embedding_scale)

    def scale(self, name: str, x, factor: float):
        """x times `factor` rounded to x's dtype, as torch rounds a number that is a tensor; x itself for 1."""
        return self.times(name, x, float(round_to(np.float64(factor), self.dtype)))

    def times(self, name: str, x, factor: float):
        """x times `factor` in float32, as torch takes a number of Python's; x itself for 1."""
        return x if factor == 1.0 else ops.mul_scalar(x, factor, out=self.rows(name, *x.shape[1:]))

    def add(self, name: str, a, b):
        return ops.add(a, b, out=self.rows(name, *a.shape[1:]))

    def project(self, name: str, x, linear: Linear):
        return linear.apply(x, self._buffers(name, linear))

    def _buffers(self, name: str, linear: Linear):
        def buffer(which, dtype, shape=None):
            return self.keep(f"{name} {which}" if which else name, shape or (self.tokens, linear.out_features), dtype)

        return buffer

    def project_relu(self, name: str, x, linear: Linear):
        """relu(x W^T + b), which rounds once; the bias and the ReLU are a fused chain."""
        if linear.bias is None:
            product = self.project(f"{name} product", x, linear)
            return ops.relu(product, out=self.rows(name, linear.out_features))
        chain = lambda product, bias, out: fused_chain("bias_relu", x=product, bias=bias, out=out)
        return linear.apply(x, self._buffers(name, linear), chain)

    def layer_norm(self, name: str, x, weight, bias):
        """LayerNorm over the last axis; without weights where they are None."""
        return ops.layer_norm(x, weight, bias, eps=self.config.norm_eps, out=self.rows(name, x.shape[1]))

    def norm(self, name: str, x, weight):
        """RMSNorm over the last axis."""
        return ops.rms_norm(x, weight, eps=self.config.norm_eps, rounding="vllm", out=self.rows(name, *x.shape[1:]))

    def add_norm(self, name: str, x, weight, residual):
        """The norm of x + residual, and that sum; where there is no residual, the norm of x, and x."""
        if residual is None:
            return self.norm(name, x, weight), x
        recipe = "fused_add_rms_norm_std" if weight.dtype == x.dtype else "fused_add_rms_norm_vllm"
        out = self._normed_and_residual(name, x.shape[1])
        return fused_chain(recipe, x=x, weight=weight, residual=residual, eps=self.config.norm_eps, out=out)

    def sandwich(self, name: str, x, post_weight, residual, pre_weight):
        """r = norm(x) + residual: the norm of r, and r."""
        out, eps = self._normed_and_residual(name, x.shape[1]), self.config.norm_eps
        operands = {"x": x, "post_weight": post_weight, "residual": residual, "pre_weight": pre_weight}
        return fused_chain("sandwich_norm_vllm", **operands, eps=eps, out=out)

    def after_mlp(self, name: str, index: int, hidden, residual, pre_weight):
        """`sandwich` of the MLP's output in the layer before `index`; before the first layer, the norm alone."""
        if index == 0:
            return self.norm(name, hidden, pre_weight), hidden
        return self.sandwich(name, hidden, self.layers[index - 1].post_ffn_norm, residual, pre_weight)

    def _normed_and_residual(self, name: str, width: int):
        return self.together(self.rows(name, width), self.rows(f"{name}_residual", width))

    def rotate(self, name: str, q, table):
        """Queries turned by the rows of a table at their positions."""
        out = self.rows(name, *q.shape[1:])
        return ops.rope_from_cache(q, None, self.batch.positions, table, is_neox=self.config.rope_is_neox, out=out)

    # Blocks.

    def attention(self, index: int, hidden, tune_q: Callable | None = None):
        """Attention of layer `index` over its cache, from the normed input to the output projection."""
        return attention(self, index, hidden, tune_q)

    def gated_mlp(self, layer: Layer, hidden, activation: Callable):
        """down(activation(gate) * up)"""
        gate_up = self.project("gate_up", hidden, layer.gate_up)
        out = self.rows("activated", layer.down.in_features)
        return self.project("down", activation(gate_up, rounding="vllm", out=out), layer.down)

    def relu_mlp(self, up: Linear, down: Linear, hidden):
        """down(relu(up))"""
        return self.project("down", self.project_relu("activated", hidden, up), down)

    def sampled(self, hidden, residual):
        """The rows to sample of both; from here on there are no others."""
        rows = self.batch.sample_rows
        if rows.size < self.tokens:
            shape = (rows.size, hidden.shape[1])
            hidden = ops.embedding(hidden, rows, out=self.keep("sampled", shape, self.dtype))
            if residual is not None:
                residual = ops.embedding(residual, rows, out=self.keep("sampled_residual", shape, self.dtype))
        self.tokens = rows.size
        return hidden, residual

    def logits(self, hidden):
        """The vocabulary's scores, scaled and capped where the family does; what is left is called "logits"."""
        scale, cap = self.config.logits_scale, self.config.final_logit_softcapping
        scores = self.project("scores" if cap or scale != 1.0 else "logits", hidden, self.weights.head)
        scores = self.times("scaled_scores" if cap else "logits", scores, scale)
        if not cap:
            return scores
        return ops.soft_cap(scores, cap, rounding="vllm_native", out=self.rows("logits", scores.shape[1]))
