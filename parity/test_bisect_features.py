"""What each family has of its own is visible in its tiny checkpoint: overlooked, it is found where it acts."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import pytest

from vtlab.goldens import tiny
from vtlab.models.config import FULL, SLIDING
from vtlab.models.config_hf import read
from vtlab.models.decoder import Decoder
from vtlab.models.weights import Weights

from .bisect import bisect, first_wrong
from .goldens import hidden_golden


def merged(data: Mapping, changes: Mapping) -> dict:
    """`changes` worked into a configuration, mappings into its mappings."""
    deeper = {key: merged(data[key], one) if isinstance(one, Mapping) and isinstance(data.get(key), Mapping) else one
              for key, one in changes.items()}  # fmt: skip
    return {**data, **deeper}


@pytest.mark.parametrize(("name", "state", "changes"), [
    ("llama", "layers.0", {"rope_scaling": {"factor": 4.0}}),
    ("llama", "layers.0", {"rope_scaling": {"original_max_position_embeddings": 128}}),
    ("mistral", "layers.0", {"sliding_window": 15}), ("mistral", "layers.0", {"sliding_window": 17}),
    ("mistral", "layers.0", {"sliding_window": None}), ("qwen2", "layers.0", {"rope_theta": 10000.0}),
    ("qwen3", "layers.0", {"rms_norm_eps": 1e-3}), ("gemma", "layers.0", {"rope_theta": 20000.0}),
    ("gemma2", "layers.0", {"sliding_window": 17}), ("gemma2", "layers.0", {"attn_logit_softcapping": None}),
    ("gemma2", "layers.0", {"query_pre_attn_scalar": 64}), ("gemma2", "logits", {"final_logit_softcapping": None}),
    ("gemma2", "layers.1", {"layer_types": [SLIDING] * 4}),
    ("gemma3", "layers.2", {"rope_parameters": {FULL: {"factor": 4.0}}}),
    ("gemma3", "layers.0", {"rope_parameters": {SLIDING: {"rope_theta": 1e6}}}),
    ("gemma4", "layers.0", {"sliding_window": 17}), ("gemma4", "logits", {"final_logit_softcapping": None}),
    ("gemma4", "layers.2", {"rope_parameters": {FULL: {"partial_rotary_factor": 0.5}}}),
    ("gemma4", "layers.2", {"rope_parameters": {FULL: {"rope_type": "default"}}}),
    ("gemma4", "layers.0", {"rope_parameters": {SLIDING: {"rope_theta": 1e6}}}),
    ("glm4", "layers.0", {"partial_rotary_factor": 1.0}), ("glm4", "layers.0", {"partial_rotary_factor": 0.25}),
    ("phi3", "layers.0", {"sliding_window": None}), ("phi3", "layers.0", {"sliding_window": 23}),
    ("phi3", "layers.0", {"original_max_position_embeddings": 256}),
    ("phi3", "layers.0", {"original_max_position_embeddings": 64}),
    ("phi3_short", "layers.0", {"original_max_position_embeddings": 32}),
    ("phi3_short", "layers.0", {"max_position_embeddings": 256}),
    ("olmo2", "layers.0", {"rope_theta": 10000.0}), ("olmo3", "layers.0", {"sliding_window": 17}),
    ("olmo3", "layers.3", {"rope_scaling": None}), ("olmo3", "layers.3", {"rope_scaling": {"beta_slow": 4.0}}),
    ("olmo3", "layers.3", {"layer_types": [SLIDING] * 4}), ("olmo3", "layers.0", {"layer_types": [FULL] * 4}),
    ("granite", "embedded", {"embedding_multiplier": 11.3125}),
    ("granite", "layers.0", {"attention_multiplier": 0.125}),
    ("granite", "layers.0", {"residual_multiplier": 0.549}), ("granite", "logits", {"logits_scaling": 6.01}),
])  # fmt: skip
def test_a_field_read_wrongly_is_found_where_it_acts(name, state, changes):
    config = read(merged(copy.deepcopy(tiny.CHECKPOINTS[name]), changes), name)
    model = Decoder(config, Weights.from_tensors(config, tiny.tensors(name)), max_positions=256)
    assert first_wrong(bisect(hidden_golden(name), model)) == state


@pytest.mark.parametrize(("name", "state", "tensor", "value"), [
    ("qwen2", "layers.1", "model.layers.1.self_attn.q_proj.bias", 0.0),
    ("qwen2", "layers.1", "model.layers.1.self_attn.v_proj.bias", 0.0),
    ("glm4", "layers.2", "model.layers.2.self_attn.k_proj.bias", 0.0),
    ("glm4", "layers.0", "model.layers.0.post_mlp_layernorm.weight", 1.0),
    ("opt", "layers.1", "model.decoder.layers.1.fc1.bias", 0.0),
    ("opt", "layers.2", "model.decoder.layers.2.self_attn_layer_norm.bias", 0.0),
    ("opt", "embedded", "model.decoder.embed_positions.weight", 0.0),
    ("opt_350m", "layers.0", "model.decoder.layers.0.final_layer_norm.weight", 1.0),
    ("opt_350m", "embedded", "model.decoder.project_in.weight", 0.0),
    ("gemma2", "layers.3", "model.layers.3.post_feedforward_layernorm.weight", 0.0),
    ("gemma4", "layers.1", "model.layers.1.layer_scalar", 1.0),
    ("gemma4", "layers.0", "model.embed_tokens_per_layer.weight", 0.0),
    ("gemma4", "layers.0", "model.per_layer_model_projection.weight", 0.0),
    ("gemma4", "layers.4", "model.layers.4.per_layer_projection.weight", 0.0),
    ("olmo2", "layers.1", "model.layers.1.self_attn.q_norm.weight", 1.0),
    ("olmo2", "layers.1", "model.layers.1.self_attn.k_norm.weight", 1.0),
    ("olmo3", "layers.3", "model.layers.3.post_attention_layernorm.weight", 1.0),
])  # fmt: skip
def test_a_tensor_overlooked_is_found_where_it_acts(name, state, tensor, value):
    tensors = dict(tiny.tensors(name))
    tensors[tensor] = np.full_like(tensors[tensor], value)
    config = read(tiny.CHECKPOINTS[name], name)
    model = Decoder(config, Weights.from_tensors(config, tensors), max_positions=256)
    assert first_wrong(bisect(hidden_golden(name), model)) == state


def test_layers_that_share_keys_and_values_have_none_that_matter():
    """Gemma 4's files hold k, v and k_norm for them; whatever these say, nothing changes."""
    tensors, config = dict(tiny.tensors("gemma4")), read(tiny.CHECKPOINTS["gemma4"], "gemma4")
    for name in tensors:
        if name.startswith(("model.layers.3.", "model.layers.4.")) and ".self_attn.k_" in name:
            tensors[name] = np.zeros_like(tensors[name])
    model = Decoder(config, Weights.from_tensors(config, tensors), max_positions=256)
    assert first_wrong(bisect(hidden_golden("gemma4"), model)) is None
