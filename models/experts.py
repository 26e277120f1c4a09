"""The block of experts: a router, the experts that it chooses for each token, and one that all tokens share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vtlab import ops

from .slots import Part, Slot, linear

if TYPE_CHECKING:
    from .step import Step
    from .weights import Layer

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)


@dataclass(frozen=True)
class Routing:
    """How tokens choose: `moe_router_topk`'s arguments. inner : the width of an expert, shared : of the shared one."""

    experts: int
    top_k: int
    inner: int
    shared: int
    renormalize: bool = True
    scoring: str = "softmax"
    groups: int = 1
    kept_groups: int = 1
    factor: float = 1.0


def expert_slots(routing: Routing, hidden: int, at: str, names: tuple[str, str, str] | None) -> Iterator[Slot]:
    """Gate and up of all experts one below the other, and down of all of them, as two matrices.

    names : of an expert's gate, up and down in a file that has a tensor for each; None where it has two for all.
    """
    count, inner = routing.experts, routing.inner
    if names is None:
        flat = lambda data: data.reshape(-1, data.shape[2])
        yield Slot("experts_up", f"{at}gate_up_proj", None, (count, 2 * inner, hidden), from_hf=flat)
        yield Slot("experts_down", f"{at}down_proj", None, (count, hidden, inner), from_hf=flat)
        return
    gate, up, down = names
    for expert in range(count):
        parts = Part(f"{at}{expert}.{gate}", None, inner), Part(f"{at}{expert}.{up}", None, inner)
        yield from linear("experts_up", hidden, *parts)
        yield from linear("experts_down", inner, Part(f"{at}{expert}.{down}", None, hidden))


def shared_slots(routing: Routing, hidden: int, at: str) -> Iterator[Slot]:
    """The expert that all tokens share."""
    parts = Part(f"{at}gate_proj", None, routing.shared), Part(f"{at}up_proj", None, routing.shared)
    yield from linear("shared_up", hidden, *parts)
    yield from linear("shared_down", routing.shared, Part(f"{at}down_proj", None, hidden))


def experts(step: Step, layer: Layer, hidden, routing: Routing):
    """sum_r w_r expert_r(hidden) + shared(hidden), times the sigmoid of its gate where it has one."""
    k, inner, width = routing.top_k, routing.inner, hidden.shape[1]
    logits = step.project("router", hidden, layer.router)
    weights, ids = ops.moe_router_topk(
        logits, layer.get("score_bias"), top_k=k, renormalize=routing.renormalize, scoring=routing.scoring,
        num_expert_group=routing.groups, topk_group=routing.kept_groups, routed_scaling_factor=routing.factor,
        out=step.together(step.rows("route_weights", k, dtype=F32), step.rows("route_ids", k, dtype=I32)),
    )  # fmt: skip
    up = layer.experts_up.weight.reshape(routing.experts, 2 * inner, width)
    down = layer.experts_down.weight.reshape(routing.experts, width, inner)
    rows = lambda name, lanes: _choices(step, name, k, lanes)
    each = ops.moe_grouped_gemm(hidden, up, ids, out=rows("experts_up", 2 * inner))
    each = ops.silu_and_mul(each, rounding="vllm", out=rows("experts_activated", inner))
    each = ops.moe_grouped_gemm(each, down, ids, weights, out=rows("experts_down", width))
    routed = ops.moe_sum(each.reshape(len(hidden), k, width), out=step.rows("routed", width))
    return step.add("experts", routed, _shared(step, layer, hidden)) if routing.shared else routed


def _choices(step: Step, name: str, k: int, lanes: int):
    """Where to put a row for each choice of each token: given, so that a GPU need not wait to look at the ids."""
    rows = step.rows(name, k * lanes)
    return step.arrays.empty((step.tokens * k, lanes), step.dtype) if rows is None else rows.reshape(-1, lanes)


def _shared(step: Step, layer: Layer, hidden):
    both = step.project("shared_up", hidden, layer.shared_up)
    out = step.rows("shared_activated", layer.shared_down.in_features)
    out = step.project("shared_down", ops.silu_and_mul(both, rounding="vllm", out=out), layer.shared_down)
    if layer.get("shared_gate") is None:
        return out
    gate = step.project("shared_gate", hidden, layer.shared_gate)
    return ops.shared_expert_gate(out, gate, rounding="vllm", out=step.rows("shared", out.shape[1]))
