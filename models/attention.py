"""The attention block of all families: what of it a layer has follows from its tensors and its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtlab import ops

if TYPE_CHECKING:
    from .step import Step


def attention(step: Step, index: int, hidden, tune_q=None):
    """o(attend(rope(q_norm(q)), rope(k_norm(k)), v_norm(v))) of layer `index`.

    q_norm and k_norm of the layer's tensors are norms of each head, or of all heads together where they are that
    wide. A kind of layer without a rotary table is not rotated. A layer that has the cache of an earlier one has no
    keys and values of its own. tune_q : (step, rotated q) -> the queries that attend.
    """
    config, batch, layer, cache = step.config.layers[index], step.batch, step.layers[index], step.caches[index]
    cos_sin = step.tables.get(config.kind)
    q, k, v = _heads(step, config, layer, step.project("qkv", hidden, layer.qkv), cos_sin is not None)
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
    return step.project("mixed", out.reshape(step.tokens, -1), layer.o)


def _heads(step: Step, config, layer, qkv, rotated: bool):
    """q, k and v by head, normed where the layer has weights for it; k and v are None without tensors of their own."""
    if config.kv_layer is not None:
        return _normed(step, "q", _by_head(qkv, config.head_dim), layer), None, None
    sizes = (config.q_size, config.kv_size, config.kv_size)
    if rotated and layer.get("q_norm") is None:
        first, second = sizes[0], sizes[0] + sizes[1]
        parts = qkv[:, :first], qkv[:, first:second], qkv[:, second:]
    else:
        # in memory of their own: norms read them as rows, and so does attention
        out = step.together(*(step.rows(name, size) for name, size in zip("qkv", sizes)))
        parts = ops.qkv_split(qkv, q_size=sizes[0], k_size=sizes[1], v_size=sizes[2], out=out)
    return tuple(_normed(step, name, _by_head(part, config.head_dim), layer) for name, part in zip("qkv", parts))


def _by_head(rows, head_dim: int):
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
