"""Token gate: tokens and log-probabilities against vLLM's, on tiny checkpoints and on one real model."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from vtlab.goldens import tiny
from vtlab.models.decoder import Decoder
from vtlab.models.demo import demo_installed, demo_path
from vtlab.models.loading import load_decoder, load_tokenizer
from vtlab.ops.errors import ContractError

from .goldens import token_golden
from .tokens import token_gate

FAMILIES = ("llama", "qwen3", "gemma3")


@lru_cache
def tiny_decoder(name: str, stored: str, dtype: str, folder: Path) -> Decoder:
    """The tiny checkpoint stored as `stored`, evaluated in `dtype`; its bytes must be those vLLM had."""
    digest = tiny.write_checkpoint(name, folder, stored)
    assert digest == token_golden(f"{name}_{stored}")["provenance"]["checkpoint_digest"]
    return load_decoder(folder, dtype, max_positions=256)


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_tokens_are_vllms(name, tmp_path):
    verdict = token_gate(token_golden(f"{name}_float32"), tiny_decoder(name, "float32", "float32", tmp_path))
    assert verdict.kind == "strict", verdict
    # No step was close: the log-probabilities agree far better than the two most likely tokens differ.
    assert verdict.max_error < verdict.least_gap / 2, verdict


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_tokens_are_vllms_or_tied_with_them(name, tmp_path):
    decoders = (tiny_decoder(name, "bfloat16", dtype, tmp_path) for dtype in ("bfloat16", "float32"))
    verdict = token_gate(token_golden(f"{name}_bfloat16"), *decoders)
    assert verdict.kind in ("strict", "near-tie"), verdict
    # The rule for kernels, on a whole model: our error against float32 is at most twice that of vLLM's own bf16.
    assert verdict.our_error <= 2 * verdict.their_error, verdict


@pytest.mark.skipif(not demo_installed(), reason="the demo extra is not installed")
@pytest.mark.timeout(600)
def test_real_gemma_generates_vllms_tokens():
    """Gemma 3 270M in Q4_K_M, end to end: vLLM had the same dequantised weights, in float32."""
    file, whole = demo_path(), token_golden("gemma3_270m_q4_k_m_float32")
    tokenizer = load_tokenizer(file)
    for prompt in whole["prompts"]:
        assert tokenizer.encode(prompt["text"]) == prompt["ids"]
    shorter = {**whole, "prompts": whole["prompts"][:3], "outputs": []}
    for output in whole["outputs"][:3]:
        shorter["outputs"].append({key: values[:12] for key, values in output.items()})
    verdict = token_gate(shorter, load_decoder(file, max_positions=256))
    assert verdict.kind == "strict" and verdict.max_error < verdict.least_gap / 2, verdict


def test_the_gate_turns_red(tmp_path):
    """A changed token is a divergence in float32; in bf16 a token that is far away is one, and a tie is listed."""
    exact, model = token_golden("qwen3_float32"), tiny_decoder("qwen3", "float32", "float32", tmp_path)
    exact["prompts"], exact["outputs"] = exact["prompts"][:2], exact["outputs"][:2]
    wrong = copy.deepcopy(exact)
    step = int(np.argmax([top[0][1] - top[1][1] for top in wrong["outputs"][1]["logprobs"]]))
    wrong["outputs"][1]["tokens"][step] = wrong["outputs"][1]["logprobs"][step][1][0]
    verdict = token_gate(wrong, model)
    assert verdict.kind == "diverged" and (verdict.positions[0].prompt, verdict.positions[0].step) == (1, step)
    assert "diverged" in str(verdict) and f"prompt 1 step {step}" in str(verdict)
    assert token_gate({**wrong, "dtype": "bfloat16"}, model, model).kind == "diverged"
    shifted = Decoder(model.config, model.weights, 256)
    shifted._tables = {kind: np.roll(table, 1, axis=0) for kind, table in model._tables.items()}
    assert token_gate(exact, shifted).kind == "diverged"
    with pytest.raises(ContractError, match="exact"):
        token_gate({**exact, "dtype": "bfloat16"}, model)
    with pytest.raises(ContractError, match="golden"):
        token_gate({**exact, "outputs": []}, model)
