"""Hybrids with experts on a GPU: vLLM's tokens, whatever a step is launched with, and every op a kernel of its own.

With ``--device cuda`` on the GPU; on the emulated one otherwise, where comparisons of runs take shorter texts.
"""

from __future__ import annotations

import numpy as np
import pytest

from vtlab.goldens import tiny
from vtlab.models.engine import Engine
from vtlab.models.sampling_params import SamplingParams
from vtlab.ops import arrays

from . import kimi_forward
from .emulated_arrays import emulated_arrays
from .emulation import compiler
from .generating_tiny import tiny_model
from .goldens import token_golden
from .test_models_recurrent import prompts
from .tokens import teacher_forced, token_gate

FAMILIES = ("qwen3_5_moe", "qwen3_next", "kimi_linear")
VLLMS = FAMILIES[:2]
"""Those that vLLM gave tokens for; it does not run the other on a CPU."""


@pytest.fixture
def machine(request):
    """(arrays of the GPU, True), or of the emulated one with its kernels, and False."""
    if request.config.getoption("--device") == "cuda":
        yield arrays.on("cuda"), True
        return
    if compiler() is None:
        pytest.skip("emulation needs a C++ compiler")
    with emulated_arrays() as (emulated, _):
        yield emulated, False


@pytest.mark.parametrize("name", VLLMS)
def test_tokens_are_vllms_or_tied_with_them(machine, name):
    """Greedy tokens of an engine whose decode steps are replayed; log-probabilities of one forward."""
    device, _ = machine
    exact = tiny_model(name, "float32", stored="bfloat16")
    verdict = token_gate(token_golden(f"{name}_bfloat16"), tiny_model(name, "bfloat16").on(device), exact)
    assert verdict.kind in ("strict", "near-tie"), verdict
    assert verdict.our_error <= 2 * verdict.their_error, verdict


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_launched_replayed_or_alone(machine, name, dtype):
    """Three requests and a row of padding, prompts in chunks: the log-probabilities of each request by itself."""
    device, real = machine
    texts = prompts(*((3, 33, 1) if real else (2, 6, 1)))
    chosen = SamplingParams(max_tokens=12 if real else 4, ignore_eos=True, logprobs=2)
    model = tiny_model(name, dtype).on(device)
    engine = lambda **options: Engine(model, num_blocks=32, block_size=8, device=device, **options)
    replayed = engine(max_num_seqs=5, max_num_batched_tokens=5)
    want = replayed.generate(texts, chosen)
    assert replayed.runner.graphs.replays > 0
    if real or dtype == "float32":
        assert engine(graphs=False).generate(texts, chosen) == want
    some = range(3) if real else (2,)
    assert [engine().generate([texts[at]], chosen)[0] for at in some] == [want[at] for at in some]
    if dtype == "float32":
        host = Engine(tiny_model(name, dtype), num_blocks=32, block_size=8).generate(texts, chosen)
        assert [output.tokens for output in want] == [output.tokens for output in host]


def test_kimi_linear_equals_a_forward_in_float64(machine):
    """As test_models_recurrent's on a CPU."""
    device, real = machine
    model, text = tiny_model("kimi_linear").on(device), prompts(21 if real else 5)[0]
    want = kimi_forward.logits(tiny.CHECKPOINTS["kimi_linear"], tiny.tensors("kimi_linear"), text)
    got = teacher_forced(model, text[:1], [*text[1:], 0])
    assert np.linalg.norm(got - want) <= 24 * len(model.config.layers) * 2.0**-24 * np.linalg.norm(want)
