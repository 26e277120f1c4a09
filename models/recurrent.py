"""Blocks of recurrent layers: the short convolution, the gated delta rule, and how states come and go.

A step that decodes one token of each request changes the states where they are; any other takes copies along its
tokens, from zeros for a request's first ones, and puts them back. Either way each token does the same arithmetic, one
after another, so that no cut of a prompt changes a byte: the chunked forms, whose sums depend on it, are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from vtlab import ops

if TYPE_CHECKING:
    from .step import Step
    from .weights import Layer

F32 = np.dtype(np.float32)


def convolved(step: Step, index: int, x, layer: Layer):
    """silu(conv(x)) of [T, channels], whose rows may be strided, along each request from its slot's last inputs."""
    batch, cache, bias = step.batch, step.caches[index].conv, layer.get("conv_bias")
    weight, out = layer.conv.weight.reshape(x.shape[1], -1), step.rows("convolved", x.shape[1])
    if batch.decoding:
        return ops.causal_conv1d_update(x, weight, cache, bias, batch.state_slots, rounding="vllm", out=out)
    return ops.causal_conv1d_fwd(
        x, weight, cache, batch.query_start_loc, batch.begun, bias, batch.state_slots,
        rounding="vllm", out=out,
    )  # fmt: skip


def carried(step: Step, index: int, along: Callable):
    """along(states) with the states [R, ...] of the batch's requests, which go back to their slots afterwards."""
    batch, cache = step.batch, step.caches[index].state
    states = step.keep("states", (len(batch.seq_lens), *cache.shape[1:]), F32)
    states = ops.gdn_state_gather(cache, batch.state_slots, batch.begun, out=states)
    out = along(states)
    ops.gdn_state_scatter(cache, states, batch.state_slots)
    return out


def gated_delta(step: Step, index: int, hidden):
    """o(norm(rule(silu(conv([q | k | v])), a, b)) silu(z)): Qwen's gated delta rule, without what rotates."""
    layer, more = step.layers[index], step.config.more
    keys, width = more["linear_key_heads"] * more["linear_key_dim"], more["linear_value_dim"]
    heads = more["linear_value_heads"]
    mixed = 2 * keys + heads * width
    qkvz, ba = step.project("qkvz", hidden, layer.qkvz), step.project("ba", hidden, layer.ba)
    conv = convolved(step, index, qkvz[:, :mixed], layer)
    vectors = (more["linear_key_heads"], more["linear_key_dim"])
    out = step.together(
        step.rows("q_unit", *vectors), step.rows("k_unit", *vectors), step.rows("v_mixed", heads, width),
        step.rows("decay", heads, dtype=F32), step.rows("strength", heads, dtype=F32),
    )  # fmt: skip
    parts = ops.gdn_post_conv(
        conv, ba[:, heads:], ba[:, :heads], layer.A_log, layer.dt_bias,
        num_k_heads=vectors[0], head_k_dim=vectors[1], head_v_dim=width, out=out,
    )  # fmt: skip
    out, scale = step.rows("ruled", heads, width), vectors[1] ** -0.5
    if step.batch.decoding:
        out = ops.gdn_decode(*parts, step.caches[index].state, step.batch.state_slots, scale=scale, out=out)
    else:
        starts = step.batch.query_start_loc
        out = carried(step, index, lambda states: ops.gdn_prefill(*parts, states, starts, scale=scale, out=out))
    # Heads in a merged product do not step evenly: a kernel would copy them, for which a captured step has no room.
    split = step.together(*(step.rows(name, lanes) for name, lanes in (("z", heads * width), ("none", 0), ("no", 0))))
    z, _, _ = ops.qkv_split(qkvz[:, mixed:], q_size=heads * width, k_size=0, v_size=0, out=split)
    gate, normed = z.reshape(out.shape), step.rows("gated_norm", heads, width)
    normed = ops.rms_norm_gated(out, gate, layer.linear_norm, eps=step.config.norm_eps, out=normed)
    return step.project("mixed", normed.reshape(len(normed), -1), layer.linear_out)
