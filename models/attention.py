"""The attention block of all families: what of it a layer has follows from its tensors and its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtlab import ops

if TYPE_CHECKING:
    from .step import Step


def attention(step: Step, index: int, hidden, tune_q=None):
    """o(attend(rope(q_norm(q)), rope(k_norm(k)), v_norm(v)) sigmoid(gate)) of layer `index`.

    q_norm and k_norm of the layer's tensors are norms of each head, or of all heads together where they are that
    wide. A kind of layer without a rotary table is not rotated. A layer that has the cache of an earlier one has no
    keys and values of its own, one that is not gated no gates. tune_q : (step, rotated q) -> the queries that attend.
    """
    config, batch, layer, cache = step.config.layers[index], step.batch, step.layers[index], step.caches[index]
    cos_sin = step.tables.get(config.kind)
    q, k, v, gate = _heads(step, config, layer, step.project("qkv", hidden, layer.qkv), cos_sin is not None)
    q = _rotate_and_store(step, q, k, v, cos_sin, cache)
    if tune_q is not None:
        q = tune_q(step, q)
    out = ops.paged_attention(
        q,
        cache.key,
        cache.value,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        scale=step.config.softmax_scale,
        window=config.window,
        softcap=step.config.attn_logit_softcapping,
        out=step.rows("attended", *q.shape[1:]),
    )
    if gate is not None:
        out = ops.sigmoid_gate_bf16(out, gate, rounding="vllm", out=step.rows("gated", *out.shape[1:]))
    return step.project("mixed", out.reshape(step.tokens, -1), layer.o)


def _heads(step: Step, config, layer, qkv, rotated: bool):
    """q, k and v by head, normed where the layer has weights for it, and the heads' gates; k and v are None without
    tensors of their own, gates where there are none."""
    if config.kv_layer is not None:
        return _normed(step, "q", _by_head(qkv, config.head_dim), layer), None, None, None
    sizes, gate = (config.q_size * (1 + config.gated), config.kv_size, config.kv_size), None
    if rotated and layer.get("q_norm") is None:
        first, second = sizes[0], sizes[0] + sizes[1]
        parts = qkv[:, :first], qkv[:, first:second], qkv[:, second:]
    else:
        # in memory of their own: norms read them as rows, and so does attention
        out = step.together(*(step.rows(name, size) for name, size in zip("qkv", sizes)))
        parts = ops.qkv_split(qkv, q_size=sizes[0], k_size=sizes[1], v_size=sizes[2], out=out)
    if config.gated:
        form = config.num_heads, config.head_dim
        out = step.together(step.rows("q_alone", *form), step.rows("gate", *form))
        q, gate = ops.attn_gate_split(parts[0], head_dim=config.head_dim, out=out)
        parts = q, *parts[1:]
    q, k, v = (_normed(step, name, _by_head(part, config.head_dim), layer) for name, part in zip("qkv", parts))
    return q, k, v, gate


def _by_head(rows, head_dim: int):
    """[T, heads, head_dim] of rows, or of what has that form."""
    return rows.reshape(len(rows), -1, head_dim)


def _normed(step: Step, name: str, heads, layer):
    weight = layer.get(f"{name}_norm")
    if weight is None:
        return heads
    if weight.shape[0] == heads.shape[2]:
        return step.norm(f"{name}_normed", heads, weight)
    return step.norm(f"{name}_normed", heads.reshape(len(heads), -1), weight).reshape(heads.shape)


def _rotate_and_store(step: Step, q, k, v, cos_sin, cache):
    """Rotated queries; rotated keys and the values go into the cache."""
    positions, slots, is_neox = step.batch.positions, step.batch.slot_mapping, step.config.rope_is_neox
    if k is None:
        return q if cos_sin is None else step.rotate("q_rotated", q, cos_sin)
    if cos_sin is None:
        ops.reshape_and_cache(k, v, cache.key, cache.value, slots)
        return q
    out = step.together(step.rows("q_rotated", *q.shape[1:]), step.rows("k_rotated", *k.shape[1:]))
    q, _ = ops.rope_and_cache(q, k, v, positions, cos_sin, cache.key, cache.value, slots, is_neox=is_neox, out=out)
    return q
