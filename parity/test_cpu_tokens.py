"""A model's tokens through the CPU tier and through the oracle alone: both are vLLM's."""

from __future__ import annotations

import contextlib

import pytest

from vtlab import ops
from vtlab.goldens import tiny
from vtlab.models.loading import load_decoder
from vtlab.ops import providers

from .goldens import token_golden
from .tokens import token_gate

SERVED = "matmul_bt", "paged_attention", "rms_norm", "rope_and_cache", "silu_and_mul", "embedding"


@pytest.mark.parametrize("names", [(), ("oracle", "composite")], ids=["tier", "oracle"])
def test_float32_tokens_are_vllms(names, tmp_path):
    """`composite` runs the steps of fused chains as ops, which are the oracle's then."""
    golden = token_golden("llama_float32")
    assert tiny.write_checkpoint("llama", tmp_path, "float32") == golden["provenance"]["checkpoint_digest"]
    decoder = load_decoder(tmp_path, "float32", max_positions=256)
    with ops.using(*names) if names else contextlib.nullcontext():
        verdict = token_gate(golden, decoder)
    assert verdict.kind == "strict", verdict
    assert verdict.max_error < verdict.least_gap / 2, verdict
    if not names:
        assert {op: providers.op_provider_stats(op, "cpu").last_selected for op in SERVED} == dict.fromkeys(
            SERVED, "numba"
        )
