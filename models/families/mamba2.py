"""Mamba-2: state spaces whose decay is one number for all channels of a head, B and C in groups, a gated norm.

Source: vllm/model_executor/models/mamba2.py, layers/mamba/mamba_mixer2.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from vtlab import ops

from .. import slots
from ..config import ModelConfig, StateConfig
from ..config_hf import at_least_one
from ..fields import Fields
from ..recurrent import carried, convolved
from ..slots import Part, Slot
from ..step import Step
from .mamba import Mamba, decay


class Mamba2(Mamba):
    """more["groups"] : of B and C, and of the gated norm."""

    name = "mamba2"
    architectures = ("Mamba2ForCausalLM",)
    model_types = ("mamba2",)
    defaults: ClassVar = {**Mamba.defaults, "tie_word_embeddings": False, "n_groups": 8, "state_size": 128}

    def numbers(self, given: Fields) -> dict:
        groups, heads = at_least_one(given, "n_groups"), at_least_one(given, "num_heads", 128)
        given.only("rms_norm", (True,), True)
        given.only("norm_before_gate", (False, True), False)
        if heads % groups:
            raise given.error("n_groups", groups, f"a divisor of {heads} heads")
        return {"groups": groups}

    def _state(self, given: Fields) -> StateConfig:
        heads, width = at_least_one(given, "num_heads", 128), at_least_one(given, "head_dim", 64)
        size, groups = at_least_one(given, "state_size"), at_least_one(given, "n_groups")
        inner = at_least_one(given, "intermediate_size", heads * width)
        if inner != heads * width or inner != at_least_one(given, "expand") * at_least_one(given, "hidden_size"):
            raise given.error("num_heads", heads, "heads that are together `expand` times as wide as the hidden states")
        return StateConfig(inner + 2 * groups * size, at_least_one(given, "conv_kernel", 4) - 1, (heads, width, size))

    def layer_slots(self, config: ModelConfig, index: int) -> Iterator[Slot]:
        hidden, state = config.hidden_size, config.layers[index].state
        heads, width, size = state.shape
        inner = heads * width
        yield slots.norm("mix_norm", "norm", None, hidden)
        yield from slots.linear("in_proj", hidden, Part("mixer.in_proj", None, inner + state.channels + heads))
        yield slots.filters("conv", "mixer.conv1d", state.channels, state.taps + 1)
        yield Slot("conv_bias", "mixer.conv1d.bias", None, (state.channels,))
        yield Slot("dt_bias", "mixer.dt_bias", None, (heads,), dtype="float32")
        yield Slot("A", "mixer.A_log", None, (heads,), from_hf=decay, dtype="float32")
        yield Slot("D", "mixer.D", None, (heads,), dtype="float32")
        yield slots.norm("mixer_norm", "mixer.norm", None, inner)
        yield from slots.linear("out_proj", inner, Part("mixer.out_proj", None, hidden))
        # The same for each channel, as the op that decodes wants them, and what lays time steps out likewise.
        for target, file, lanes in (
            ("A_lanes", "A_log", width * size),
            ("D_lanes", "D", width),
            ("dt_lanes", "dt_bias", width),
        ):
            yield Slot(target, f"mixer.{file}", None, (heads,), from_hf=_over(lanes, target), dtype="float32")
        yield slots.constant("over_lanes", np.repeat(np.eye(heads, dtype=np.float32), width, axis=0))

    def mix(self, step: Step, index: int, hidden):
        """out(norm(scan(x, softplus(dt), B, C) silu(z))), with x, B and C through the convolution."""
        layer, state, config = step.layers[index], step.config.layers[index].state, step.config
        heads, width, size = state.shape
        inner, groups, rows = heads * width, config.more["groups"], len(hidden)
        projected = step.project("projected", hidden, layer.in_proj)
        z, mixed, dt = self._parts(step, "projected", projected, inner, state.channels, heads)
        conv = convolved(step, index, mixed, layer)
        x, B, C = self._parts(step, "selected", conv, inner, groups * size, groups * size)
        x, B, C = x.reshape(rows, heads, width), B.reshape(rows, groups, size), C.reshape(rows, groups, size)
        y = (self._decoded if step.batch.decoding else self._scanned)(step, index, x, dt, B, C)
        normed = ops.mamba2_rmsnorm_gated(
            y.reshape(rows, inner), z, layer.mixer_norm, groups=groups, eps=config.norm_eps,
            rounding="vllm" if groups == 1 else "vllm_native", out=step.rows("gated_norm", inner),
        )  # fmt: skip
        return step.project("mixed", normed, layer.out_proj)

    @staticmethod
    def _decoded(step: Step, index: int, x, dt, B, C):
        layer, cache = step.layers[index], step.caches[index].state
        dt = step.project("time_step", dt, layer.over_lanes).reshape(x.shape)
        lanes = lambda one: one.reshape(x.shape[1:])
        return ops.selective_state_update(
            cache, x, dt, layer.A_lanes.reshape(cache.shape[1:]), B, C, lanes(layer.D_lanes), None,
            lanes(layer.dt_lanes), step.batch.state_slots, dt_softplus=True, out=step.rows("ruled", *x.shape[1:]),
        )  # fmt: skip

    @staticmethod
    def _scanned(step: Step, index: int, x, dt, B, C):
        layer, starts, out = step.layers[index], step.batch.query_start_loc, step.rows("ruled", *x.shape[1:])
        scan = lambda states: ops.ssd_recurrent(
            x, dt, layer.A, B, C, states, starts, layer.D, None, layer.dt_bias, dt_softplus=True, out=out
        )
        return carried(step, index, scan)


def _over(lanes: int, target: str):
    """One number a head for each of its lanes."""
    return lambda data: np.repeat(decay(data) if target == "A_lanes" else np.asarray(data, np.float32), lanes)
