"""Captured decode steps on the CPU: the eager tokens, whoever runs the pieces; and what cannot be captured is not."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
import weakref
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from vtlab import ops, oracle
from vtlab.device.cpu import replay, threads
from vtlab.device.cpu.launch import Kernels
from vtlab.device.cpu.natives import natives
from vtlab.device.cpu.replay import HostGraphs, Launch, Plan
from vtlab.goldens import tiny
from vtlab.models.batch import DecodeInputs
from vtlab.models.buffers import Kept
from vtlab.models.decoder import Decoder
from vtlab.models.engine import Engine
from vtlab.models.loading import load_decoder
from vtlab.models.sampling_params import SamplingParams
from vtlab.models.weights import Weights
from vtlab.ops import providers
from vtlab.ops.captured import Captured, empty, seen

from .cpu_wrongs import Wrong, planted
from .meeting import meeting
from .test_engine import decoder as small_decoder
from .test_models_blocks import BlockGGUF
from .test_models_weights import config_of

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=5, temperature=0.9, top_k=20, seed=5, logprobs=3, ignore_eos=True)
PROMPTS, CHOSEN = [[5, 6, 7, 8], [9] * 60, [3]], [GREEDY, DRAWN, GREEDY]  # a step crosses 64 keys; requests end


def engine(decoder: Decoder, **more) -> Engine:
    return Engine(decoder, num_blocks=32, block_size=8, **more)


def replayed(decoder: Decoder) -> bool:
    """Whether an engine that replays gives the outputs of one that does not, for the second time too."""
    whole, want = engine(decoder), engine(decoder, graphs=False).generate(PROMPTS, CHOSEN)
    same = [whole.generate(PROMPTS, CHOSEN) == want for _ in range(2)]
    assert whole.runner.eager is None and whole.runner.graphs.replays > 10
    return all(same)


@pytest.mark.parametrize("name", tiny.CHECKPOINTS)
def test_replayed_tokens_are_the_eager_ones(name, tmp_path):
    tiny.write_checkpoint(name, tmp_path, "float32")
    decoder = load_decoder(tmp_path, "float32", 128)
    if decoder.config.recurrent:  # its recurrences are the mirror's, which is NumPy's
        whole = engine(decoder)
        whole.generate([[5]], SamplingParams(max_tokens=2, ignore_eos=True))
        assert whole.runner.eager and not whole.runner.graphs.captures
    else:
        assert replayed(decoder)


def test_bfloat16_steps_replay_too(tmp_path):
    tiny.write_checkpoint("gemma3", tmp_path, "bfloat16")
    assert replayed(load_decoder(tmp_path, "bfloat16", 128))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_threads_replays_blocks(count, monkeypatch):
    """Parts of several types stand beside each other, and every launch that can be cut is."""
    monkeypatch.setattr(replay, "_LEAST", 1)
    config = config_of("llama")
    decoder = Decoder(config, Weights.from_gguf(config, BlockGGUF("llama"), blocks=True), 128)
    assert decoder.kv_dtype == np.float16
    with threads.using(count):
        assert replayed(decoder)


def test_a_step_that_the_oracle_serves_runs_op_by_op_and_says_so():
    decoder = small_decoder("llama")
    want = engine(decoder, graphs=False).generate(PROMPTS, CHOSEN)
    providers.disable_op_provider("numba")
    try:
        plain = engine(decoder)
        outputs = plain.generate(PROMPTS, CHOSEN)
        assert "is taken for an array of NumPy's" in plain.runner.eager
        assert plain.runner.graphs.captures == 0
    finally:
        providers.enable_op_provider("numba")
    assert [output.tokens for output in outputs[::2]] == [output.tokens for output in want[::2]]
    assert "graphs" in engine(decoder, graphs=False).runner.eager


@pytest.mark.parametrize("wrong", ["inputs stay", "results move"])
def test_a_step_that_forgets_its_memory_is_noticed(wrong, monkeypatch):
    decoder = small_decoder("llama")
    assert replayed(decoder)
    if wrong == "inputs stay":
        load, loaded = DecodeInputs.load, set()
        once = lambda self, batch: None if self in loaded else (loaded.add(self), load(self, batch))
        monkeypatch.setattr(DecodeInputs, "load", once)
    else:
        monkeypatch.setattr(Kept, "__call__", lambda self, name, shape, dtype: np.zeros(shape, dtype))
    assert not replayed(decoder)


class Chain:
    """x -> relu(x), its rows in reverse."""

    def __init__(self, rows: int = 2):
        self.x, self.rows = np.empty((rows, 2048), np.float32), np.arange(rows)[::-1].copy()
        self.out, self.temporary = np.empty_like(self.x), None

    def __call__(self):
        between = empty(self.x.shape, np.float32)
        self.temporary = weakref.ref(between.memory if isinstance(between, Captured) else between)
        ops.relu(seen(self.x), out=between)
        ops.embedding(between, seen(self.rows), out=seen(self.out))

    def right(self, graphs: HostGraphs, turn: int) -> bool:
        self.x[...] = turn
        graphs.run("chain", self, [self.x, self.out])
        return bool((self.out == turn).all())


def meetings(times: int) -> list[int]:
    """How many of two launches, each looked at by the next, were seen done; for every replay."""
    meeting.load()
    native, copy = natives[meeting.entry], natives[Kernels("elementwise").rows]
    arrived, done, seen_done = (np.zeros((2, 1), np.int64) for _ in range(3))
    launches = []
    for one, two, three in zip(arrived, done, seen_done):
        launches += [Launch(native, 2, 1 << 20, (one, two), 1, 0), Launch(copy, 1, 0, (two, three, 8, 8), 1, 0)]
    plan, found = Plan(launches, 2), []
    for _ in range(times):
        arrived[...] = done[...] = seen_done[...] = 0
        plan.run()
        found.append(int(seen_done.sum()))
    return found


def test_the_next_launch_waits_for_the_last_piece():
    assert meetings(20) == [2] * 20


@pytest.mark.kernel_mutation
@pytest.mark.parametrize("wrong", [
    Wrong("replay", (), "while load_acquire(shared, DONE) + mine < pieces:", "while False:"),
    Wrong("replay", (), "    store_release(0, shared, DONE)\n", ""),
    Wrong("replay", (), "            _piece(row, piece, address(scratch))\n            take(shared, DONE)\n",
          "            take(shared, DONE)\n            _piece(row, piece, address(scratch))\n"),
    Wrong("replay", (), "min(begin + step, get_i64(row, 3))", "begin + step - (piece > 0)"),
], ids=str)  # fmt: skip
def test_wrongs_are_noticed(wrong, tmp_path, monkeypatch):
    with planted(wrong, tmp_path, monkeypatch):
        assert any(min(meetings(20)) < 2 for _ in range(50))  # on a busy machine the two seldom meet


def test_after_a_late_helper_come_runs_without_any(monkeypatch):
    plan, teams = Plan([], 2), []

    def together(lead, follow, team):
        teams.append(team)
        lead(0)
        plan._control[replay.K.LATE] = team > 1 and len(teams) < 10

    monkeypatch.setattr(replay, "together", together)
    for _ in range(18):
        plan.run()
    assert teams == [2, 1, 2, 1, 1, 1, 2, *[1] * 7, 2, 2, 2, 2]


def test_a_plan_keeps_what_it_addresses_and_goes_with_its_graphs():
    graphs, chain = HostGraphs(), Chain()
    assert chain.right(graphs, 1)
    held = chain.temporary
    gc.collect()
    assert held() is not None and chain.right(graphs, 2)
    graphs.invalidate()
    gc.collect()
    assert held() is None


def test_other_threads_arrays_and_providers_make_other_plans():
    graphs, chain = HostGraphs(), Chain()
    for captures, count in ((1, 1), (2, 2), (2, 1), (2, 2)):
        with threads.using(count):
            assert chain.right(graphs, captures) and graphs.captures == captures
    chain.x = chain.x.copy()
    assert chain.right(graphs, 7) and graphs.captures == 3
    with ops.using("numba"):
        assert chain.right(graphs, 8) and graphs.captures == 4
    providers.disable_op_provider("nothing")
    providers.enable_op_provider("nothing")
    assert chain.right(graphs, 9) and graphs.captures == 5
    with ops.using("oracle"):
        assert chain.right(graphs, 3) and graphs.captures == 5 and "chain" in graphs.refused


def test_a_plan_runs_alone_where_others_have_the_threads():
    graphs, chain = HostGraphs(), Chain()
    with threads.using(2):
        assert chain.right(graphs, 1)
        with threads._busy:
            assert chain.right(graphs, 2)


@pytest.mark.parametrize("look", [
    np.asarray, np.ascontiguousarray, np.max, lambda x: x + 1, lambda x: 1 - x, lambda x: x[0, 0],
    lambda x: float(x[0]), lambda x: x[0] == 1, lambda x: np.concatenate([x, x]), lambda x: [*x],
    lambda x: x.T.reshape(-1), lambda x: x.__setitem__(0, 1), lambda x: np.copyto(np.empty((2, 3)), x),
    lambda x: np.empty((2, 3)).__setitem__(0, x), lambda x: x.astype(int), lambda x: x.max(), lambda x: x.tolist(),
    lambda x: oracle.relu.mirror(x), bool,
])  # fmt: skip
def test_a_capture_sees_no_numbers(look):
    """What looks at them ends the capture; the call has run before, and runs every time from then on."""
    x, graphs, looked = np.ones((2, 3), np.float32), HostGraphs(), []

    def call():
        ops.relu(seen(x), out=seen(np.empty_like(x)))
        looked.append(1)
        if isinstance(there := seen(x), Captured):
            look(there)

    for _ in range(3):
        graphs.run("look", call, [x])
    assert len(looked) == 4 and graphs.captures == 0 and graphs.refused["look"]


def test_an_error_of_the_call_is_the_calls():
    graphs = HostGraphs()
    with pytest.raises(ops.ContractError, match="relu"):
        graphs.run("bad", lambda: ops.relu(seen(np.ones(3, np.int32))), [])
    assert not graphs.refused


def test_launchers_start_kernels_by_split_alone():
    """Who calls one by itself is not recorded, and hands it a name where it expects an array."""
    started = []
    for path in Path(replay.__file__).parent.glob("*.py"):
        module = import_module(f"vtlab.device.cpu.{path.stem}") if path.stem != "__init__" else None
        holders = {name: held for name, held in vars(module or object).items() if isinstance(held, Kernels)}
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                holder = holders.get(getattr(call.func.value, "id", None))
                if holder is not None and getattr(holder, call.func.attr) in natives:
                    started.append(f"{path.stem}.{call.func.attr}")
    assert sorted(started) == ["replay.follow", "replay.lead"]


def test_a_forked_child_replays():
    code = """import os
from vtlab.device.cpu import threads
from vtlab.device.cpu.replay import HostGraphs
from vtlab.parity.test_cpu_replay import Chain
with threads.using(2):
    graphs, chain = HostGraphs(), Chain()
    assert chain.right(graphs, 1) and chain.right(graphs, 2)
    graphs._lock.acquire()  # as a thread would that the child does not have
    if (child := os.fork()) == 0:
        os._exit(7 if chain.right(graphs, 3) and graphs.replays == 2 else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"""
    if sys.platform == "win32":
        pytest.skip("no fork here")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "7\n", done
