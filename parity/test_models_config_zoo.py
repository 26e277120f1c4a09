"""GLM-4, Phi-3, OLMo-2 and 3, Granite: what their configurations mean, and the refusal of what is not honoured."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

from vtlab import ops
from vtlab.goldens import tiny
from vtlab.models.config import FULL, SLIDING, ModelConfig
from vtlab.models.config_hf import read
from vtlab.models.decoder import Decoder
from vtlab.models.weights import Weights
from vtlab.ops.errors import FormatError
from vtlab.ops.numerics import round_to

from .bisect import states


def config(name: str, **changes) -> ModelConfig:
    """The tiny checkpoint's configuration, with fields changed or (...) left out."""
    data = copy.deepcopy(tiny.CHECKPOINTS[name]) | changes
    return read({key: value for key, value in data.items() if value is not ...}, f"{name}/config.json")


def test_glm4_turns_half_of_each_head_in_adjacent_pairs():
    for found in (config("glm4"), config("glm4", partial_rotary_factor=..., attention_bias=...)):
        assert found.rope[FULL]["partial_rotary_factor"] == 0.5 and not found.rope_is_neox
        assert found.biased == {"qkv"}
    own = config("glm4", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25})
    assert own.rope[FULL]["partial_rotary_factor"] == 0.25
    assert not config("glm4", attention_bias=False).biased


def test_phi3_longrope_in_all_its_forms():
    scaling = tiny.CHECKPOINTS["phi3"]["rope_scaling"]
    rope = dict(config("phi3").rope[SLIDING])
    gain = math.sqrt(1 + math.log(512 / 32) / math.log(32))
    assert rope["rope_type"] == "longrope" and rope["original_max_position_embeddings"] == 32
    assert rope["short_mscale"] == rope["long_mscale"] == gain and rope["partial_rotary_factor"] == 0.75
    assert dict(config("phi3", rope_scaling={**scaling, "type": "su"}).rope[SLIDING]) == rope
    new = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
           "original_max_position_embeddings": 32, "short_factor": scaling["short_factor"],
           "long_factor": scaling["long_factor"]}  # fmt: skip
    changes = {"rope_parameters": new, "rope_scaling": ..., "rope_theta": ..., "original_max_position_embeddings": ...}
    assert dict(config("phi3", **changes).rope[SLIDING]) == rope
    assert config("phi3", rope_scaling={**scaling, "long_mscale": 1.25}).rope[SLIDING]["long_mscale"] == 1.25
    assert config("phi3", original_max_position_embeddings=512).rope[SLIDING]["long_mscale"] == 1.0


def test_phi3_has_a_window_over_all_layers_or_none():
    assert [layer.window for layer in config("phi3").layers] == [(23, 0)] * 3
    for none in (None, 0, ...):
        assert [layer.window for layer in config("phi3", sliding_window=none).layers] == [None] * 3


@pytest.mark.parametrize(("positions", "factors"), [(32, "short"), (33, "long"), (256, "long")])
def test_longropes_factors_follow_from_what_the_model_is_served_up_to(positions, factors):
    """A right table turns as each pair's factor says, stretched by m, whichever rows its cache had before."""
    found = config("phi3")
    model = Decoder(found, Weights.from_tensors(found, tiny.tensors("phi3")), max_positions=positions)
    factor = np.array(tiny.CHECKPOINTS["phi3"]["rope_scaling"][f"{factors}_factor"])
    angle = 31 / (factor * 10000.0 ** (np.arange(12) / 12))
    gain = math.sqrt(1 + math.log(16) / math.log(32))
    want = gain * np.concatenate([np.cos(angle), np.sin(angle)])
    # An angle below 32 in float32 is off by at most 2 * 32 * 2^-24, and m makes that a half more.
    np.testing.assert_allclose(model._tables[SLIDING][31], want, atol=1.5 * 2 * 32 * 2.0**-24)
    assert len(model._tables[SLIDING]) == positions


def test_olmo3_scales_the_rope_of_full_layers_alone():
    found = config("olmo3")
    assert found.rope[SLIDING] == {"rope_type": "default", "rope_theta": 500000.0}
    assert found.rope[FULL]["rope_type"] == "yarn" and found.rope[FULL]["rope_theta"] == 500000.0
    assert [layer.window for layer in found.layers] == [(15, 0)] * 3 + [None]
    assert config("olmo3", layer_types=...).layer_types == found.layer_types
    yarn = {**tiny.CHECKPOINTS["olmo3"]["rope_scaling"], "rope_theta": 500000.0}
    nested = {SLIDING: {"rope_type": "default", "rope_theta": 500000.0}, FULL: yarn}
    new = config("olmo3", rope_parameters=nested, rope_scaling=..., rope_theta=...)
    assert {kind: dict(one) for kind, one in new.rope.items()} == {kind: dict(one) for kind, one in found.rope.items()}


def test_olmo3s_published_attention_factor_is_yarns():
    """vLLM does not read attention_factor: it makes cosines and sines larger by 0.1 ln(factor) + 1 all the same."""
    rope = dict(config("olmo3").rope[FULL])
    cache = ops.rope_build_cache(rope, head_size=32, max_position=256)
    assert abs(float(cache[0, 0]) - rope["attention_factor"]) <= 2.0**-23


def test_granites_multipliers():
    found = config("granite")
    assert (found.embedding_scale, found.softmax_scale, found.residual_scale) == (11.3, 0.11, 0.55)
    assert found.logits_scale == 1 / 6 and found.biased == set()
    biased = config("granite", attention_bias=True, mlp_bias=True)
    assert biased.biased == {"qkv", "o", "gate_up", "down"}
    plain = config("granite", embedding_multiplier=..., attention_multiplier=..., residual_multiplier=...,
                   logits_scaling=...)  # fmt: skip
    assert (plain.embedding_scale, plain.softmax_scale, plain.residual_scale, plain.logits_scale) == (1, 1, 1, 1)


def test_granites_multipliers_are_not_rounded_to_bfloat16():
    """torch multiplies a bfloat16 tensor with a Python number in float32; Gemma's multiplier is a bfloat16 tensor."""
    found = config("granite")
    model = Decoder(found, Weights.from_tensors(found, tiny.tensors("granite"), "bfloat16"), max_positions=64)
    rows = model.weights.embed.weight[[5, 6, 7]].astype(np.float64)
    want = round_to(rows * np.float64(np.float32(11.3)), model.dtype)
    assert states(model, [5, 6, 7])["embedded"].tobytes() == want.tobytes()
    assert (want != round_to(rows * 11.3125, model.dtype)).any()


@pytest.mark.parametrize(("name", "field", "changes"), [
    ("glm4", "hidden_act", {"hidden_act": "gelu"}), ("glm4", "attention_bias", {"attention_bias": "yes"}),
    ("phi3", "attention_bias", {"attention_bias": True}), ("phi3", "sliding_window", {"sliding_window": "wide"}),
    ("phi3", "original_max_position_embeddings", {"original_max_position_embeddings": 0}),
    ("phi3", "rope_scaling.rope_type", {"rope_scaling": {"type": "spiral"}}),
    ("olmo2", "attention_bias", {"attention_bias": True}), ("olmo2", "hidden_act", {"hidden_act": "gelu"}),
    ("olmo3", "rope_parameters", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}}),
    ("olmo3", "sliding_window", {"sliding_window": 0}), ("olmo3", "layer_types", {"layer_types": [FULL]}),
    ("granite", "logits_scaling", {"logits_scaling": 0.0}), ("granite", "hidden_act", {"hidden_act": "gelu"}),
    ("granite", "residual_multiplier", {"residual_multiplier": "1"}),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(name, field, changes):
    with pytest.raises(FormatError) as error:
        config(name, **changes)
    assert error.value.field == field and error.value.file == f"{name}/config.json"
