"""Every family: vLLM's tokens, requests that are blind to each other, and the same weights from either kind of file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from vtlab.gguf.reader import read_gguf
from vtlab.goldens import tiny
from vtlab.models.batch import Slice, build
from vtlab.models.config_hf import read
from vtlab.models.decoder import Decoder
from vtlab.models.engine import Engine
from vtlab.models.families import ARCHITECTURES, FAMILIES, GGUF_ARCHITECTURES
from vtlab.models.linear import Linear
from vtlab.models.loading import load_decoder
from vtlab.models.sampling_params import SamplingParams
from vtlab.models.weights import Weights
from vtlab.ops.errors import FormatError

from .generating_tiny import RECURRENT
from .goldens import list_goldens, token_golden
from .test_models_device import device  # noqa: F401  a fixture
from .test_models_tokens import FAMILIES as FIRST
from .test_models_tokens import tiny_decoder
from .tiny_gguf import ARCHITECTURES as WRITABLE
from .tiny_gguf import write_tiny_gguf
from .tokens import token_gate

ZOO = tuple(name for name in tiny.CHECKPOINTS if name not in (*FIRST, *RECURRENT))
STREAMS = {entry.name for entry in list_goldens() if entry.kind == "tokens"}


@lru_cache
def decoder(name: str, dtype: str = "float32") -> Decoder:
    config, tensors = read(tiny.CHECKPOINTS[name], name), tiny.tensors(name, dtype)
    if dtype == "bfloat16":
        tensors = {key: value.view(ml_dtypes.bfloat16) for key, value in tensors.items()}
    return Decoder(config, Weights.from_tensors(config, tensors, dtype), max_positions=128)


def run(model: Decoder, pieces: list[list[int]], table: list[int]) -> np.ndarray:
    """Logits of the last token of each piece of one sequence, the pieces run one after another."""
    caches, out, start = model.new_caches(max(table) + 1, 8), [], 0
    for piece in pieces:
        out.append(model.forward(build([Slice(piece, start, table, sample=True)], 8), caches))
        start += len(piece)
    return np.concatenate(out)


@pytest.mark.parametrize("name", ZOO)
def test_float32_tokens_are_vllms(name, tmp_path):
    verdict = token_gate(token_golden(f"{name}_float32"), tiny_decoder(name, "float32", "float32", tmp_path))
    assert verdict.kind == "strict", verdict
    # No step was close: the log-probabilities agree far better than the two most likely tokens differ.
    assert verdict.max_error < verdict.least_gap / 2, verdict


@pytest.mark.parametrize("name", [name for name in ZOO if f"{name}_bfloat16" in STREAMS])
def test_bfloat16_tokens_are_vllms_or_tied_with_them(name, tmp_path):
    decoders = (tiny_decoder(name, "bfloat16", dtype, tmp_path) for dtype in ("bfloat16", "float32"))
    verdict = token_gate(token_golden(f"{name}_bfloat16"), *decoders)
    assert verdict.kind in ("strict", "near-tie"), verdict
    assert verdict.our_error <= 2 * verdict.their_error, verdict


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ZOO)
def test_chunks_blocks_and_neighbours_change_no_byte(name, dtype):
    model, rng = decoder(name, dtype), np.random.default_rng(3)
    tokens, other = rng.integers(0, 512, 40).tolist(), rng.integers(0, 512, 21).tolist()
    whole = run(model, [tokens], [0, 1, 2, 3, 4])[-1]
    assert run(model, [tokens[:17], tokens[17:39], tokens[39:]], [6, 2, 0, 5, 1])[-1].tobytes() == whole.tobytes()
    both = [Slice(other, 0, [0, 1, 2], True), Slice(tokens, 0, [3, 4, 5, 6, 7], True)]
    assert model.forward(build(both, 8), model.new_caches(8, 8))[1].tobytes() == whole.tobytes()
    assert np.isfinite(whole.astype(np.float32)).all()


@pytest.mark.parametrize("name", ["gemma4", "opt", "opt_350m", "gemma2", "phi3", "olmo2", "granite"])
def test_graphs_change_no_token(device, name):  # noqa: F811
    """Buffers that a captured step keeps are enough: no result is overwritten while it is needed."""
    model, chosen = decoder(name), SamplingParams(max_tokens=5, ignore_eos=True)
    prompts = [list(range(3, 3 + length)) for length in (3, 20, 1)]
    replayed = Engine(model, num_blocks=16, block_size=8, device=device)
    launched = Engine(model, num_blocks=16, block_size=8, device=device, graphs=False)
    assert replayed.generate(prompts, chosen) == launched.generate(prompts, chosen)
    assert replayed.runner.graphs.replays > 0


@pytest.mark.parametrize("name", WRITABLE)
def test_a_gguf_file_gives_the_weights_of_the_safetensors(name, tmp_path):
    write_tiny_gguf(name, tmp_path / "tiny.gguf")
    got, want = load_decoder(tmp_path / "tiny.gguf", max_positions=128), decoder(name)
    assert flat(got.weights).keys() == flat(want.weights).keys()
    for target, value in flat(want.weights).items():
        assert raw(flat(got.weights)[target]) == raw(value), target
    same = ("vocab_size", "hidden_size", "tie_word_embeddings", "rope_is_neox", "attn_logit_softcapping",
            "final_logit_softcapping", "biased")  # fmt: skip
    assert {key: getattr(got.config, key) for key in same} == {key: getattr(want.config, key) for key in same}
    for key in ("norm_eps", "embedding_scale", "residual_scale", "logits_scale"):
        assert getattr(got.config, key) == pytest.approx(getattr(want.config, key), rel=2.0**-24)
    if name != "mistral":  # its window has no key
        assert kept_apart(name, got.config.layers) == kept_apart(name, want.config.layers)
        for kind, table in want._tables.items():
            # Divisors and factors are float32 there: an angle below 128 moves by at most 128 * 2^-24.
            np.testing.assert_allclose(got._tables[kind][:128], table[:128], atol=2 * 128 * 2.0**-24)


def kept_apart(name: str, layers: tuple) -> list:
    """What a GGUF file says of the layers. llama.cpp has no key for the layer types of Gemma 3: five slide, one not."""
    every = {"gemma3": 6}.get(name)
    kinds = [layer.kind if every is None else index % every for index, layer in enumerate(layers)]
    return [
        (kind, layer.q_size, layer.kv_size, layer.head_dim, layer.intermediate_size, layer.kv_layer)
        for kind, layer in zip(kinds, layers)
    ]


def flat(weights: Weights) -> dict[str, object]:
    layers = {f"{i}.{target}": value for i, layer in enumerate(weights.layers) for target, value in vars(layer).items()}
    return {key: value for key, value in vars(weights).items() if key not in ("layers", "rope")} | layers


def raw(tensor: Linear | np.ndarray | float) -> bytes:
    if isinstance(tensor, Linear):
        return tensor.weight.tobytes() + (b"" if tensor.bias is None else tensor.bias.tobytes())
    return np.asarray(tensor).tobytes()


def test_every_family_that_llama_cpp_has_is_written():
    families = {GGUF_ARCHITECTURES[arch].name for arch in WRITABLE.values()}
    assert families | {"mistral"} == {family.name for family in FAMILIES.values() if family.gguf_names}
    assert {ARCHITECTURES[config["architectures"][0]].name for config in tiny.CHECKPOINTS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", ["llama", "gemma4", "phi3", "olmo3"])
@pytest.mark.parametrize("fault", ["missing", "extra", "shape"])
def test_a_broken_gguf_is_refused_by_the_name_of_the_tensor(name, fault, tmp_path):
    write_tiny_gguf(name, tmp_path / "tiny.gguf")
    config = load_decoder(tmp_path / "tiny.gguf", max_positions=128).config
    file = read_gguf(tmp_path / "tiny.gguf")
    victim = "blk.1.attn_output.weight"
    if fault == "missing":
        del file.tensors[victim]
    elif fault == "extra":
        file.tensors["blk.1.attn_sinks.weight"] = file.tensors[victim]
        victim = "blk.1.attn_sinks.weight"
    else:
        file.tensors[victim] = file.tensors["output_norm.weight"]
    with pytest.raises(FormatError) as error:
        Weights.from_gguf(config, file)
    assert error.value.field == victim


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("fault", ["missing", "extra", "shape"])
def test_a_broken_checkpoint_is_refused_by_the_name_of_the_tensor(name, fault):
    config, tensors = read(tiny.CHECKPOINTS[name], name), dict(tiny.tensors(name))
    victim = next(key for key in tensors if ".1." in key and key.endswith(("o_proj.weight", "out_proj.weight")))
    if fault == "missing":
        del tensors[victim]
    elif fault == "extra":
        tensors[victim := victim.replace(".1.", ".1.sinks.")] = np.zeros((2, 2), np.float32)
    else:
        tensors[victim] = tensors[victim][:-1]
    with pytest.raises(FormatError) as error:
        Weights.from_tensors(config, tensors)
    assert error.value.field == victim


def test_a_folder_of_every_family_loads(tmp_path):
    for name in ZOO:
        tiny.write_checkpoint(name, tmp_path / name, "bfloat16")
        model = load_decoder(Path(tmp_path / name), max_positions=64)
        assert model.dtype == ml_dtypes.bfloat16 and model.family.name in (name, *_SIBLINGS.get(name, ()))


_SIBLINGS = {"opt_350m": ("opt",), "phi3_short": ("phi3",), "mistral_scaled": ("mistral",)}
