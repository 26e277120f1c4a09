"""Hidden states: those of every family are transformers', and a planted wrong is found in the layer that has it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vtlab.goldens import tiny
from vtlab.models.decoder import Decoder
from vtlab.models.loading import load_decoder
from vtlab.models.weights import Layer, Weights
from vtlab.ops.errors import ContractError

from .bisect import BOUND, bisect, bisect_tiny, first_wrong, run_bisect
from .goldens import hidden_golden

# transformers' Mistral does not scale queries with their position, and it has no Kimi Linear.
KNOWN = [name for name, config in tiny.CHECKPOINTS.items() if "llama_4_scaling" not in config and name != "kimi_linear"]


@pytest.mark.parametrize("name", KNOWN)
def test_hidden_states_are_those_of_transformers(name):
    distances = bisect_tiny(name)
    config = tiny.CHECKPOINTS[name]
    count = config.get("text_config", config)["num_hidden_layers"]
    layers = [f"layers.{index}" for index in range(count)]
    assert [found.state for found in distances] == ["embedded", *layers, "normed", "logits"]
    assert first_wrong(distances) is None, distances


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Decoder:
    folder = tmp_path_factory.mktemp("qwen3")
    tiny.write_checkpoint("qwen3", folder)
    return load_decoder(folder, "float32", max_positions=256)


def wronged(model: Decoder, layer: int | None, target: str) -> Decoder:
    """The model with one tensor a hundredth too large, in a layer or outside of them."""
    larger = lambda tensor: tensor.mapped(larger) if hasattr(tensor, "mapped") else tensor * np.float32(1.01)
    weights, layers = vars(model.weights), list(model.weights.layers)
    if layer is None:
        weights = weights | {target: larger(weights[target])}
    else:
        layers[layer] = Layer(**vars(layers[layer]) | {target: larger(vars(layers[layer])[target])})
    return Decoder(model.config, Weights(**weights | {"layers": tuple(layers)}), model.max_positions)


@pytest.mark.parametrize(("layer", "target", "state"), [
    (0, "o", "layers.0"), (1, "qkv", "layers.1"), (1, "q_norm", "layers.1"), (2, "down", "layers.2"),
    (2, "ffn_norm", "layers.2"), (None, "norm", "normed"), (None, "head", "logits"), (None, "embed", "embedded"),
])  # fmt: skip
def test_a_planted_wrong_is_found_where_it_is(model, layer, target, state):
    distances = bisect(hidden_golden("qwen3"), wronged(model, layer, target))
    assert first_wrong(distances) == state
    assert all(found.rel_l2 < BOUND / 2 for found in distances[: [d.state for d in distances].index(state)])


def test_nan_is_wrong(model):
    poisoned = wronged(model, 1, "down")
    poisoned.weights.layers[1].down.weight[3, 5] = np.nan
    assert first_wrong(bisect(hidden_golden("qwen3"), poisoned)) == "layers.1"


def test_other_states_and_other_models_are_refused(model):
    golden = hidden_golden("qwen3")
    short = {**golden, "states": {name: state for name, state in golden["states"].items() if name != "layers.1"}}
    with pytest.raises(ContractError, match="states"):
        bisect(short, model)
    narrow = {**golden, "states": {name: state[:, :-1] for name, state in golden["states"].items()}}
    with pytest.raises(ContractError, match="shape"):
        bisect(narrow, model)
    with pytest.raises(ContractError, match=r"one of .*qwen3"):
        bisect_tiny("qwen3_float32")


def test_the_command_shows_every_state_and_names_the_first_wrong_one(model, capsys, monkeypatch):
    assert run_bisect("qwen3", as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["first_wrong"] is None and len(found["states"]) == 6
    broken = bisect(hidden_golden("qwen3"), wronged(model, 1, "o"))
    monkeypatch.setitem(run_bisect.__globals__, "bisect_tiny", lambda name, device: broken)
    assert run_bisect("qwen3") == 1
    shown = capsys.readouterr().out
    assert "layers.2" in shown and "first wrong state: layers.1" in shown
