"""Models on a GPU: vLLM's tokens again, and the same ones whether a step is launched op by op or replayed.

With ``--device cuda`` on the GPU. Without, the same steps on the emulated one, which refuses whatever a captured step
may not do; there the oracle stands in for the kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from vtlab.models.batch import DecodeInputs, Slice, build
from vtlab.models.demo import demo_installed
from vtlab.models.engine import Engine
from vtlab.models.loading import load_decoder
from vtlab.models.request import Output
from vtlab.models.runner import Runner, padded_sizes, padded_width
from vtlab.models.sampling_params import SamplingParams
from vtlab.ops import arrays, dispatch, fusion
from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import TRUTH
from vtlab.ops.outputs import write_out
from vtlab.ops.table import lookup

from .emulated_arrays import Array, RecordingRuntime, emulated_arrays
from .emulation import compiler
from .gate_tokens import select_tokens
from .goldens import token_golden
from .test_engine import decoder as small_decoder
from .test_engine import prompt
from .test_models_tokens import FAMILIES, tiny_decoder
from .tokens import token_gate

CHAIN = fusion.slot_of("")
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture
def device(request, monkeypatch):
    """Arrays of the GPU, or of the emulated one with the oracle in the kernels' place."""
    if request.config.getoption("--device") == "cuda":
        yield arrays.on("cuda")
        return
    with emulated_arrays() as (emulated, machine):
        host = dispatch.providers.call

        def call(op, where, arguments):
            return stand_in(machine, op, arguments) if where == "cuda" else host(op, where, arguments)

        monkeypatch.setattr(dispatch.providers, "call", call)
        yield emulated


def stand_in(machine: RecordingRuntime, op: str, arguments: dict):
    """The oracle as a kernel: fresh results take memory, work waits for the replay while a step is captured."""
    run, makes, out = oracle_of(op), made_by(op), arguments.pop("out", None)
    plain = {name: value.view(np.ndarray) if isinstance(value, Array) else value for name, value in arguments.items()}
    if out is None and makes:
        results = run(plain)
        sent = tuple(machine.send(result) for result in (results if isinstance(results, tuple) else (results,)))
        return sent if isinstance(results, tuple) else sent[0]

    def work():
        results = run(plain)
        if out is not None:
            write_out(op, out, results)

    machine.do(work)
    return out


def oracle_of(op: str) -> Callable[[dict], object]:
    """An op, or a fused chain as its ops one by one."""
    name = op.removeprefix(CHAIN)
    if name == op:
        return partial(lookup(op).run, TRUTH)
    recipe = fusion.lookup(name)

    def run(arguments: dict):
        operands, params = ({key: arguments[key] for key in keys} for keys in (recipe.operands, recipe.params))
        return fusion.compose(recipe, recipe.steps, evaluated, operands, params)

    return run


def evaluated(op: str, arguments: dict):
    return lookup(op).evaluate(TRUTH, **arguments)


def made_by(op: str) -> bool:
    return op.startswith(CHAIN) or bool(lookup(op).contract.returns)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_vllms(device, name, dtype, tmp_path):
    """The gate's greedy tokens come from an engine, whose decode steps are replayed."""
    exact = tiny_decoder(name, dtype, "float32", tmp_path)
    model = tiny_decoder(name, dtype, dtype, tmp_path).on(device)
    verdict = token_gate(token_golden(f"{name}_{dtype}"), model, None if dtype == "float32" else exact)
    assert verdict.kind == "strict" or (dtype == "bfloat16" and verdict.kind == "near-tie"), verdict


@pytest.mark.skipif(compiler() is None, reason="emulation needs a C++ compiler")
@pytest.mark.parametrize("name", (*FAMILIES, "gemma4", "opt"))
def test_the_kernels_give_vllms_tokens_without_a_gpu(name, tmp_path):
    """The emulated kernels in place of the stand-ins, on a part of the golden that takes a few seconds."""
    golden = token_golden(f"{name}_float32")
    golden["prompts"] = golden["prompts"][1:3]
    golden["outputs"] = [{key: found[:6] for key, found in output.items()} for output in golden["outputs"][1:3]]
    with emulated_arrays() as (emulated, machine):
        verdict = token_gate(golden, tiny_decoder(name, "float32", "float32", tmp_path).on(emulated))
        assert verdict.kind == "strict" and verdict.max_error < verdict.least_gap / 2, verdict
        assert machine.launched.count("argmax_rows") == 6


def test_real_models_generate_vllms_tokens(request, device):
    """The demo model where it is installed, and the GGUF files of goldens in VTLAB_GGUF, on a GPU."""
    files = [name for name in os.environ.get("VTLAB_GGUF", "").split(os.pathsep) if name]
    sources = select_tokens((*files, *["demo"] * demo_installed())) if files or demo_installed() else []
    if request.config.getoption("--device") != "cuda" or not sources:
        pytest.skip("needs a GPU (--device cuda) and a model (VTLAB_GGUF, or the demo extra)")
    for source in sources:
        golden = token_golden(source.golden)
        verdict = token_gate(golden, load_decoder(source.file, golden["dtype"], 256).on(device))
        assert verdict.kind == "strict", (source.golden, verdict)


@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_change_no_token(device, name):
    """Requests of every kind come and go, so that steps of several padded sizes mix with prefills."""
    prompts = [prompt(seed, length) for seed, length in enumerate((3, 30, 7, 1, 12))]
    chosen = [
        GREEDY, SamplingParams(max_tokens=5, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0.9, top_k=20, min_p=0.01, seed=5, logprobs=3, ignore_eos=True),
        GREEDY,
        SamplingParams(max_tokens=6, repetition_penalty=1.3, logprobs=1, bad_words=[[4]], logit_bias={7: 2.0},
                       min_tokens=2, stop_token_ids=[3], allowed_token_ids=range(500), ignore_eos=True),
    ]  # fmt: skip
    model = small_decoder(name)
    on_host = Engine(model, num_blocks=32, block_size=8).generate(prompts, chosen)
    launched = Engine(model, num_blocks=32, block_size=8, device=device, graphs=False)
    replayed = Engine(model, num_blocks=32, block_size=8, device=device)
    want = launched.generate(prompts, chosen)
    for _ in range(2):
        assert replayed.generate(prompts, chosen) == want
    assert replayed.runner.graphs.replays > replayed.runner.graphs.captures > 0
    assert launched.runner.graphs is None
    assert [output.tokens for output in want] == [output.tokens for output in on_host]
    assert list(map(ranks, want)) == list(map(ranks, on_host))
    assert any(rank > 1 for rank, _ in ranks(want[2]))


def ranks(output: Output) -> list[tuple[int, list[int]]]:
    """Each token's rank and the most likely ids: what rounding leaves alone."""
    return [(found.rank, [token for token, _ in found.top]) for found in output.logprobs or ()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_padded_replay_gives_the_bytes_of_the_step_alone(device, dtype, tmp_path):
    """Row by row, and nobody's keys or values but the step's own change."""
    model = tiny_decoder("gemma3", dtype, dtype, tmp_path).on(device)
    with device.queue():
        whole, alone = (Runner(model, 12, 8, 8, graphs=graphs) for graphs in (True, False))
        slices = [Slice(prompt(row, 5 + row), 0, [2 * row, 2 * row + 1], True) for row in range(3)]
        for runner in (whole, alone):
            runner.run(build(slices, 8))
        for step in range(4):
            steps = [
                Slice([7 * row + step], len(item.tokens) + step, item.blocks, True) for row, item in enumerate(slices)
            ]
            scores = whole.run(build(steps, 8))
            assert scores.raw.shape[0] == 4
            got = device.fetch(scores.raw)
            for row, item in enumerate(steps):
                want = device.fetch(alone.run(build([item], 8)).raw)
                assert got[row].tobytes() == want[0].tobytes()
        for mine, other in zip(whole.caches, alone.caches):
            assert device.fetch(mine.key).tobytes() == device.fetch(other.key).tobytes()
            assert device.fetch(mine.value).tobytes() == device.fetch(other.value).tobytes()
        assert (whole.graphs.captures, whole.graphs.replays) == (1, 3)


def test_a_replayed_step_is_one_upload_one_launch_and_one_read(request, device):
    if request.config.getoption("--device") == "cuda":
        pytest.skip("the emulated runtime counts")
    engine = Engine(small_decoder("qwen3"), num_blocks=32, block_size=8, device=device)
    machine = engine.runner.graphs.runtime
    streams = [engine.stream(prompt(seed, 4), SamplingParams(max_tokens=20, ignore_eos=True)) for seed in range(3)]
    for stream in streams:
        next(stream)
    for _ in range(2):
        engine.step()
    before = machine.uploads, machine.reads, machine.sends, engine.runner.graphs.replays
    engine.step()
    after = machine.uploads, machine.reads, machine.sends, engine.runner.graphs.replays
    assert [new - old for new, old in zip(after, before)] == [1, 1, 0, 1]


def test_nan_logits_are_refused_there_too(device):
    model = small_decoder()
    weights = model.weights
    weights = type(weights)(**{**vars(weights), "norm": np.full(128, np.nan, np.float32)})
    broken = type(model)(model.config, weights, 256, device)
    engine = Engine(broken, num_blocks=8, block_size=8)
    with pytest.raises(ContractError, match="NaN"):
        engine.generate([[1, 2], [3]], GREEDY)
    assert engine.scheduler.idle and engine.blocks.num_free == 8


def test_a_model_goes_to_a_device_and_back(device):
    model = small_decoder("llama")
    there = model.on(device)
    assert there.on(device) is there and model.on("cpu") is model
    assert type(there.weights.head.weight) is not np.ndarray and there.arrays is device
    assert small_decoder("qwen3").on(device).weights.head is not None
    tied = small_decoder("qwen3").on(device).weights
    assert tied.head is tied.embed
    back = there.on("cpu")
    assert back.weights.layers[1].qkv.weight.tobytes() == model.weights.layers[1].qkv.weight.tobytes()


def test_rows_of_padding_have_no_work(device):
    inputs = DecodeInputs(device, 4, 6)
    full = build([Slice([9], 17 + row, [row, 5, 4], True) for row in range(4)], 8)
    with device.queue():
        inputs.load(full)
        device.fetch(inputs.batch.token_ids)
        inputs.load(build([Slice([3], 8, [2, 1], True)], 8))
        fields = {name: array for name, array in vars(inputs.batch).items() if name != "decoding"}
        found = {name: device.fetch(array).tolist() for name, array in fields.items()}
    assert inputs.batch.decoding and found == {
        "token_ids": [3, 0, 0, 0], "positions": [8, 0, 0, 0], "slot_mapping": [8, -1, -1, -1],
        "query_start_loc": [0, 1, 1, 1, 1], "seq_lens": [9, 0, 0, 0], "sample_rows": [0, 1, 2, 3],
        "block_table": [[2, 1, 0, 0, 0, 0]] + [[0] * 6] * 3, "state_slots": [0, -1, -1, -1], "begun": [1, 1, 1, 1],
    }  # fmt: skip


def test_a_batch_crosses_in_one_piece(device):
    batch = build([Slice([1, 2, 3], 5, [4, 2], True), Slice([8], 0, [1], False)], 8)
    there = batch.on(device)
    assert not there.decoding and build([Slice([1], 5, [4], True)], 8).on(device).decoding
    for name, host in vars(batch).items():
        if name == "decoding":
            continue
        got = device.fetch(getattr(there, name))
        assert (got.dtype, got.shape, got.tobytes()) == (host.dtype, host.shape, host.tobytes())
    assert batch.on(arrays.HOST) is batch


@pytest.mark.parametrize(("most", "sizes"), [
    (1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20)), (32, (1, 2, 4, 8, 16, 24, 32)),
])  # fmt: skip
def test_padded_sizes_end_at_the_most_requests_of_a_step(most, sizes):
    assert padded_sizes(most) == sizes


@pytest.mark.parametrize(
    ("blocks", "most", "width"), [(1, 100, 8), (8, 100, 8), (9, 100, 16), (65, 100, 100), (3, 5, 5)]
)
def test_padded_widths_hold_the_blocks(blocks, most, width):
    assert padded_width(blocks, most) == width >= blocks


def test_a_request_that_outgrows_its_table_gets_a_wider_graph(device):
    chosen = SamplingParams(max_tokens=40, ignore_eos=True)
    model = small_decoder("llama")
    replayed = Engine(model, num_blocks=30, block_size=2, device=device)
    assert replayed.generate([prompt(1, 5)], chosen) == Engine(model, num_blocks=30, block_size=2).generate(
        [prompt(1, 5)], chosen
    )
    assert replayed.runner.graphs.captures == 3
    assert [inputs.batch.block_table.shape for inputs in replayed.runner.inputs.values()] == [(1, 8), (1, 16), (1, 30)]


def test_a_stop_token_before_the_minimum_is_not_the_arg_max_there_either(device):
    model = small_decoder("llama")
    host = Engine(model, num_blocks=30, block_size=8)
    free = host.generate([prompt(1, 5)], GREEDY)[0].tokens
    chosen = SamplingParams(max_tokens=6, min_tokens=5, ignore_eos=True, stop_token_ids=[free[2]])
    want = host.generate([prompt(1, 5)], chosen)
    assert want[0].tokens != free[:6]
    assert Engine(model, num_blocks=30, block_size=8, device=device).generate([prompt(1, 5)], chosen) == want


def test_a_draw_sees_the_capped_logits(device):
    """A cap of 1 leaves hardly anything of what the logits prefer."""
    small = small_decoder("gemma3")
    model = type(small)(replace(small.config, final_logit_softcapping=1.0), small.weights, 256)
    chosen = SamplingParams(max_tokens=6, temperature=0.3, seed=1, ignore_eos=True)
    want = Engine(model, num_blocks=30, block_size=8).generate([prompt(1, 5)], chosen)
    assert want != Engine(small, num_blocks=30, block_size=8).generate([prompt(1, 5)], chosen)
    assert Engine(model, num_blocks=30, block_size=8, device=device).generate([prompt(1, 5)], chosen) == want


def test_an_engine_on_a_device_that_is_not_there_is_refused():
    with pytest.raises(ContractError, match="'metal', want one of cpu"):
        Engine(small_decoder(), device="metal")
