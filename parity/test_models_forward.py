"""The decoder against a dense float64 forward that shares no code with it, and against itself in pieces."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab.goldens import tiny
from vtlab.models.batch import Slice, build
from vtlab.models.config import ModelConfig
from vtlab.models.config_hf import read
from vtlab.models.decoder import Decoder
from vtlab.models.weights import Weights

from . import dense_forward

FAMILIES = ("llama", "qwen3", "gemma3")


def decoder(name: str, dtype: str = "float32") -> Decoder:
    config: ModelConfig = read(tiny.CHECKPOINTS[name], name)
    tensors = tiny.tensors(name, dtype)
    if dtype == "bfloat16":
        tensors = {key: value.view(ml_dtypes.bfloat16) for key, value in tensors.items()}
    return Decoder(config, Weights.from_tensors(config, tensors, dtype), max_positions=256)


def run(model: Decoder, pieces: list[list[int]], block_size: int = 16, blocks: list[int] | None = None) -> np.ndarray:
    """Logits of the last token of each piece, the pieces of one sequence run one after another."""
    total = sum(map(len, pieces))
    blocks = blocks or list(range(-(-total // block_size)))
    caches = model.new_caches(max(blocks) + 1, block_size)
    out, start = [], 0
    for piece in pieces:
        out.append(model.forward(build([Slice(piece, start, blocks, sample=True)], block_size), caches))
        start += len(piece)
    return np.concatenate(out)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 17, 70])
def test_logits_equal_the_dense_forward(name, length):
    tokens = np.random.default_rng(length).integers(0, tiny.CHECKPOINTS[name]["vocab_size"], length).tolist()
    want = dense_forward.logits(tiny.CHECKPOINTS[name], tiny.tensors(name), tokens)[-1]
    got = run(decoder(name), [tokens])[0]
    # Each layer stores at most 14 results one after another, each rounded by 2**-24 of itself, and the cosines of a
    # float32 angle below 70 are off by up to 70 * 2**-24; these layers carry a relative error on without growth.
    roundings = 14 * tiny.CHECKPOINTS[name]["num_hidden_layers"] + 4 + length
    assert np.linalg.norm(got - want) <= roundings * 2.0**-24 * np.linalg.norm(want)
    assert got.argmax() == want.argmax()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_and_blocks_change_no_byte(name, dtype):
    model = decoder(name, dtype)
    tokens = np.random.default_rng(3).integers(0, 512, 45).tolist()
    whole = run(model, [tokens])[-1]
    one_by_one = run(model, [[token] for token in tokens])
    assert one_by_one[-1].tobytes() == whole.tobytes()
    for cut in (1, 16, 31, 44):
        assert run(model, [tokens[:cut], tokens[cut:]]).tobytes() == one_by_one[[cut - 1, 44]].tobytes()
    assert run(model, [tokens], block_size=5, blocks=[7, 3, 9, 0, 12, 1, 5, 4, 2])[-1].tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_request_is_blind_to_its_neighbours(name):
    model = decoder(name)
    rng = np.random.default_rng(5)
    sequences = [rng.integers(0, 512, n).tolist() for n in (1, 30, 7, 19)]
    tables = [[0], [1, 2], [3], [4, 5]]
    together = [Slice(tokens, 0, table, sample=True) for tokens, table in zip(sequences, tables)]
    rows = model.forward(build(together, 16), model.new_caches(6, 16))
    for row, item in zip(rows, together):
        alone = model.forward(build([item], 16), model.new_caches(6, 16))
        assert alone[0].tobytes() == row.tobytes()


def test_a_step_that_samples_nothing_still_fills_the_cache():
    model = decoder("qwen3")
    caches = model.new_caches(2, 16)
    first = build([Slice([5, 6, 7], 0, [1], sample=False)], 16)
    assert model.forward(first, caches).shape == (0, 640)
    rest = model.forward(build([Slice([8], 3, [1], sample=True)], 16), caches)
    assert rest.tobytes() == run(model, [[5, 6, 7, 8]]).tobytes()
    assert not caches[0].key[0].any()


def test_softcaps_and_windows_reach_the_ops():
    config = tiny.CHECKPOINTS["gemma3"]
    tokens = list(range(40))
    base = run(decoder("gemma3"), [tokens])
    for change in ({"final_logit_softcapping": 2.0}, {"attn_logit_softcapping": 1.0}, {"sliding_window": 15}):
        changed = read({**config, **change}, "changed")
        model = Decoder(changed, Weights.from_tensors(changed, tiny.tensors("gemma3")), max_positions=64)
        got = run(model, [tokens])
        assert np.abs(got - base).max() > 1e-3, change
        if "final_logit_softcapping" in change:
            np.testing.assert_allclose(got, 2 * np.tanh(base / 2), rtol=4 * 2.0**-24)
