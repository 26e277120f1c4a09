"""Mamba: layers of one selective state space each, without attention and without an MLP.

Source: vllm/model_executor/models/mamba.py, layers/mamba/mamba_mixer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from vtlab import ops
from vtlab.ops.numerics import round_to

from .. import slots
from ..config import RECURRENT, LayerConfig, ModelConfig, StateConfig
from ..config_hf import at_least_one, common, positive
from ..family import Family
from ..fields import Fields
from ..recurrent import carried, convolved
from ..slots import Part, Slot
from ..step import Step

_NO_LIMIT = 2**31 - 1


def decay(A_log: np.ndarray) -> np.ndarray:
    """A = -exp(A_log) in float32."""
    return round_to(-np.exp(A_log.astype(np.float64)), np.float32)


class Mamba(Family):
    """more["rank"] : lanes that the time steps are projected from."""

    name = "mamba"
    architectures = ("MambaForCausalLM",)
    model_types = ("mamba",)
    defaults: ClassVar = {"layer_norm_epsilon": 1e-5, "use_conv_bias": True, "tie_word_embeddings": True, "expand": 2}
    hf_layers = "backbone.layers"

    def hf(self, given: Fields) -> dict:
        given.only(self.activation_field, (self.activation,), self.activation)
        given.only("use_bias", (False,), False)
        given.only("use_conv_bias", (True,), True)
        # A state has no length: there is no position that such a model cannot take.
        defaults = {"max_position_embeddings": _NO_LIMIT, **given.defaults}
        boundless = Fields(given.data, given.file, given.prefix, defaults)
        found = {"family": self.name, **common(boundless, self.layers(given))}
        return found | {"norm_eps": positive(given, "layer_norm_epsilon"), "more": self.numbers(given)}

    def numbers(self, given: Fields) -> dict:
        """What `more` holds."""
        hidden = at_least_one(given, "hidden_size")
        whole = given.get("time_step_rank") in (None, "auto")
        return {"rank": -(-hidden // 16) if whole else at_least_one(given, "time_step_rank")}

    def layers(self, given: Fields) -> tuple[LayerConfig, ...]:
        one = LayerConfig(RECURRENT, 0, 0, 0, 0, state=self._state(given))
        return (one,) * at_least_one(given, "num_hidden_layers")

    @staticmethod
    def _inner(given: Fields) -> int:
        expanded = at_least_one(given, "expand") * at_least_one(given, "hidden_size")
        return at_least_one(given, "intermediate_size", expanded)

    def _state(self, given: Fields) -> StateConfig:
        inner, taps = self._inner(given), at_least_one(given, "conv_kernel", 4) - 1
        return StateConfig(inner, taps, (1, inner, at_least_one(given, "state_size", 16)))

    def outside_slots(self, config: ModelConfig) -> Iterator[Slot]:
        vocab, hidden = config.vocab_size, config.hidden_size
        yield from slots.linear("embed", hidden, Part("backbone.embeddings", None, vocab))
        yield slots.norm("norm", "backbone.norm_f", None, hidden)
        if not config.tie_word_embeddings:
            yield from slots.linear("head", hidden, Part("lm_head", None, vocab))

    def layer_slots(self, config: ModelConfig, index: int) -> Iterator[Slot]:
        hidden, layer, rank = config.hidden_size, config.layers[index], config.more["rank"]
        inner, size = layer.state.channels, layer.state.shape[-1]
        yield slots.norm("mix_norm", "norm", None, hidden)
        yield from slots.linear("in_proj", hidden, Part("mixer.in_proj", None, 2 * inner))
        yield slots.filters("conv", "mixer.conv1d", inner, layer.state.taps + 1)
        yield Slot("conv_bias", "mixer.conv1d.bias", None, (inner,))
        yield from slots.linear("x_proj", inner, Part("mixer.x_proj", None, rank + 2 * size))
        yield from slots.linear("dt_proj", rank, Part("mixer.dt_proj", None, inner))
        yield Slot("dt_bias", "mixer.dt_proj.bias", None, (inner,), dtype="float32")
        yield Slot("A", "mixer.A_log", None, (inner, size), from_hf=decay, dtype="float32")
        yield Slot("D", "mixer.D", None, (inner,), dtype="float32")
        yield from slots.linear("out_proj", inner, Part("mixer.out_proj", None, hidden))

    def layer(self, step: Step, index: int, hidden, residual):
        # a name of its own beside the layer before, whose sum is still read
        hidden, residual = step.add_norm(f"mix {index % 2}", hidden, step.layers[index].mix_norm, residual)
        return self.mix(step, index, hidden), residual

    def mix(self, step: Step, index: int, hidden):
        """out(scan(x, softplus(dt), B, C) silu(z)), x through the convolution; dt, B and C are projected from x."""
        layer, rank = step.layers[index], step.config.more["rank"]
        inner, size = step.config.layers[index].state.channels, step.config.layers[index].state.shape[-1]
        x, z, _ = self._parts(step, "projected", step.project("projected", hidden, layer.in_proj), inner, inner, 0)
        x = convolved(step, index, x, layer)
        low, B, C = self._parts(step, "selected", step.project("selected", x, layer.x_proj), rank, size, size)
        dt = step.project("time_step", low, layer.dt_proj)
        mixed = self._decoded if step.batch.decoding else self._scanned
        return step.project("mixed", mixed(step, index, x, z, dt, B, C), layer.out_proj)

    @staticmethod
    def _parts(step: Step, name: str, rows, *sizes: int):
        out = step.together(*(step.rows(f"{name} {part}", size) for part, size in enumerate(sizes)))
        return ops.qkv_split(rows, q_size=sizes[0], k_size=sizes[1], v_size=sizes[2], out=out)

    @staticmethod
    def _decoded(step: Step, index: int, x, z, dt, B, C):
        layer, alone = step.layers[index], lambda rows: rows[:, None]
        out = ops.selective_state_update(
            step.caches[index].state, alone(x), alone(dt), layer.A.weight[None], alone(B), alone(C), layer.D[None],
            alone(z), layer.dt_bias[None], step.batch.state_slots, dt_softplus=True,
            out=step.rows("ruled", 1, x.shape[1]),
        )  # fmt: skip
        return out[:, 0]

    @staticmethod
    def _scanned(step: Step, index: int, x, z, dt, B, C):
        """Channels first, as the scan has them."""
        layer, starts = step.layers[index], step.batch.query_start_loc
        first = lambda rows: rows.T.copy()
        scan = lambda states: ops.selective_scan(
            first(x), first(dt), layer.A.weight, first(B)[None], first(C)[None], states[:, 0], starts, layer.D,
            first(z), layer.dt_bias, delta_softplus=True,
        )  # fmt: skip
        return carried(step, index, scan).T.copy()
