"""Small wrongs in the files of families, each of which vLLM's tokens notice.

Factors of Gemma 4 before a norm are none of them: the norm takes them out again, but for its epsilon.
"""

from __future__ import annotations

import importlib
import inspect
import types

import pytest

from vtlab.goldens import tiny
from vtlab.models import families
from vtlab.models.config_hf import read
from vtlab.models.decoder import Decoder
from vtlab.models.family import Family
from vtlab.models.weights import Weights
from vtlab.ops.errors import ContractError

from .goldens import token_golden
from .tokens import token_gate

# (golden, module of the family, exact text in it, another text)
WRONGS = {
    "a layer's own embeddings not scaled up": ("gemma4", "gemma4", "found, own**0.5)", "found, 1.0)"),
    "the first layer's embeddings for all": ("gemma4", "gemma4", '["own"][:, index]', '["own"][:, 0]'),
    "no layer scalar": ("gemma4", "gemma4", "hidden, layer.scale)", "hidden, 1.0)"),
    "values' lanes weighted": (
        "gemma4", "gemma4", "np.ones(layer.head_dim,", "np.linspace(0, 2, layer.head_dim, dtype=",
    ),
    "keys and values of the first layer of a kind": (
        "gemma4", "gemma4_config", "{kind: index for index, kind in enumerate(kinds[: max(first, 0)])}",
        "{kind: kinds.index(kind) for kind in kinds[: max(first, 0)]}",
    ),
    "scores scaled by the heads' width": ("gemma4", "gemma4_config", '"softmax_scale": 1.0,\n        "attn', '"attn'),
    "positions two rows early": ("opt", "opt", "table[_FIRST_POSITION:]", "table[:-_FIRST_POSITION]"),
    "no residual around attention": ("opt", "opt", 'step.add("after_attn", hidden, mixed)', "mixed"),
    "norms before the joins": ("opt_350m", "opt", 'given.flag("do_layer_norm_before"),\n                "affine"',
                               'True,\n                "affine"'),
    "no norm at the end": ("opt", "opt", 'if step.config.more["last_norm"]:', "if False:"),
    "every third layer full": ("gemma2", "gemma2", "period: ClassVar[int] = 2", "period: ClassVar[int] = 3"),
    "no caps": ("gemma2", "gemma2", ', **self._caps(given)}', "}"),
    "scores scaled by the heads' width, too": ("gemma2", "gemma2", '{"softmax_scale": scale, **', "{**"),
    "embeddings not scaled": ("gemma", "gemma", 'at_least_one(given, "hidden_size") ** 0.5', "1.0"),
    "no window": ("mistral", "mistral", 'FULL if given.is_null("sliding_window") else SLIDING', "FULL"),
    "pairs of lanes i and half + i": ("glm4", "glm4", '{"rope_is_neox": False}', "{}"),
    "blocks not scaled": ("granite", "granite", '"residual_scale": positive(given, "residual_multiplier", 1.0),', ""),
    "no norm after attention": (
        "olmo2", "olmo2", 'step.norm("post_attn", step.attention(index, stream), layer.post_attn_norm)',
        "step.attention(index, stream)",
    ),
}  # fmt: skip


def wronged(module: str, old: str, new: str, monkeypatch) -> None:
    """The module's functions, or its family, from its source with `new` in the place of `old`."""
    original = importlib.import_module(f"vtlab.models.families.{module}")
    text = inspect.getsource(original)
    assert text.count(old) == 1, f"{module}: {old!r} stands there {text.count(old)} times"
    other = types.ModuleType(original.__name__)
    other.__package__ = original.__package__
    exec(compile(text.replace(old, new), original.__file__, "exec"), vars(other))
    for name, value in vars(other).items():
        if isinstance(value, types.FunctionType):
            monkeypatch.setattr(original, name, value)
        if isinstance(value, type) and issubclass(value, Family) and value.__module__ == original.__name__:
            family = value()
            monkeypatch.setitem(families.FAMILIES, family.name, family)
            for architecture in family.architectures:
                monkeypatch.setitem(families.ARCHITECTURES, architecture, family)


def verdict(name: str) -> str:
    """The gate's on a part of the golden that takes a moment."""
    golden = token_golden(f"{name}_float32")
    lengths = [len(prompt["ids"]) for prompt in golden["prompts"]]
    longest = lengths.index(max(lengths))
    golden["prompts"] = [golden["prompts"][longest]]
    golden["outputs"] = [{key: found[:12] for key, found in golden["outputs"][longest].items()}]
    config = read(tiny.CHECKPOINTS[name], name)
    found = token_gate(golden, Decoder(config, Weights.from_tensors(config, tiny.tensors(name)), max_positions=256))
    return "strict" if found.kind == "strict" and found.max_error < found.least_gap / 2 else "diverged"


@pytest.mark.parametrize("name", sorted({wrong[0] for wrong in WRONGS.values()}))
def test_without_a_wrong_the_part_is_strict(name):
    assert verdict(name) == "strict"


@pytest.mark.mutation
@pytest.mark.parametrize("wrong", WRONGS)
def test_a_wrong_in_a_family_is_noticed(wrong, monkeypatch):
    name, module, old, new = WRONGS[wrong]
    wronged(module, old, new, monkeypatch)
    try:
        assert verdict(name) == "diverged"
    except ContractError as error:
        assert "NaN" in str(error)
