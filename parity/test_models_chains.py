"""Models take the fused chains that exist: what a recipe in ops/fusion/patterns.py covers runs as that chain."""

from __future__ import annotations

from functools import lru_cache

import ml_dtypes
import numpy as np
import pytest

from vtlab import ops
from vtlab.goldens import tiny
from vtlab.models import attention
from vtlab.models.batch import Slice, build
from vtlab.models.config_hf import read
from vtlab.models.decoder import Decoder
from vtlab.models.step import Step
from vtlab.models.weights import Weights
from vtlab.ops import fusion

from .chains_taken import Bypass, bypasses, recorded, spellings

RECIPES = fusion.catalog()


@lru_cache
def decoder(name: str, dtype: str = "float32") -> Decoder:
    config, tensors = read(tiny.CHECKPOINTS[name], name), tiny.tensors(name, dtype)
    if dtype == "bfloat16":
        tensors = {key: value.view(ml_dtypes.bfloat16) for key, value in tensors.items()}
    return Decoder(config, Weights.from_tensors(config, tensors, dtype), max_positions=64)


def found(name: str, dtype: str = "float32") -> list[Bypass]:
    """What a prefill of which one row is sampled and a decode step bypass."""
    model = decoder(name, dtype)
    caches = model.new_caches(1, 16)

    def run():
        for start, tokens in ((0, [5, 6, 7]), (3, [8])):
            model.forward(build([Slice(tokens, start, [0], True)], 16), caches)

    return bypasses(recorded(run), RECIPES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", tiny.CHECKPOINTS)
def test_no_chain_is_bypassed(name, dtype):
    assert [str(one) for one in found(name, dtype)] == []


def by_itself(step: Step, name: str, x, weight, residual):
    if residual is None:
        return step.norm(name, x, weight), x
    return ops.rms_norm(x, weight, residual=residual, eps=step.config.norm_eps, rounding="vllm")


def added_first(step: Step, name: str, x, weight, residual):
    if residual is None:
        return step.norm(name, x, weight), x
    total = step.add(name, residual, x)
    return step.norm(name, total, weight), total


def norm_then_chain(step: Step, name: str, x, post_weight, residual, pre_weight):
    return step.add_norm(name, step.norm(name, x, post_weight), pre_weight, residual)


def add_then_relu(step: Step, name: str, x, linear):
    return ops.relu(step.project(name, x, linear))


def without_the_cache(step: Step, q, k, v, cos_sin, cache):
    q, k = ops.rope_from_cache(q, k, step.batch.positions, cos_sin)
    ops.reshape_and_cache(k, v, cache.key, cache.value, step.batch.slot_mapping)
    return q


WRONGS = {
    "an addition on a norm, called as an op": ("llama", Step, "add_norm", by_itself, "fused_add_rms_norm"),
    "an addition and a norm": ("llama", Step, "add_norm", added_first, "fused_add_rms_norm"),
    "a norm before a chain": ("gemma3", Step, "sandwich", norm_then_chain, "sandwich_norm"),
    "a bias and a ReLU": ("opt", Step, "project_relu", add_then_relu, "bias_relu"),
    "norms of q, k and a rotation": (
        "qwen3",
        attention,
        "_rotate_and_store",
        without_the_cache,
        "attn_qk_norm_rope",
    ),
}


@pytest.mark.mutation
@pytest.mark.parametrize("wrong", WRONGS)
def test_a_model_that_bypasses_a_chain_is_noticed(wrong, monkeypatch):
    name, where, attribute, other, recipe = WRONGS[wrong]
    monkeypatch.setattr(where, attribute, other)
    assert recipe in {one.recipe for one in found(name)}


def test_the_wrongs_change_no_byte():
    """So that it is the check that notices them, and nothing else could."""
    model = decoder("llama")
    batch = build([Slice([5, 6, 7], 0, [0], True)], 16)
    want = model.forward(batch, model.new_caches(1, 16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "add_norm", added_first)
        assert model.forward(batch, model.new_caches(1, 16)).tobytes() == want.tobytes()


def test_a_sum_and_a_norm_are_a_spelling_of_the_chain():
    steps = [[step.op for step in one] for one in spellings(fusion.lookup("sandwich_norm"))]
    assert steps == [["rms_norm", "rms_norm"], ["rms_norm", "add", "rms_norm"]]
    assert len(list(spellings(fusion.lookup("bias_relu")))) == 1


def test_results_of_other_calls_make_no_chain():
    rng = np.random.default_rng(0)
    x, y, bias = rng.normal(size=(2, 8)), rng.normal(size=(2, 8)), rng.normal(size=8)
    x, y, bias = (value.astype(np.float32) for value in (x, y, bias))
    assert bypasses(recorded(lambda: (ops.add(x, bias), ops.relu(y))), RECIPES) == []
    assert [one.recipe for one in bypasses(recorded(lambda: ops.relu(ops.add(x, bias))), RECIPES)] == ["bias_relu"]
    assert bypasses(recorded(lambda: fusion.fused_chain("bias_relu", x=x, bias=bias)), RECIPES) == []
