"""Around Mamba-2's kernels: neighbours in a batch, resumed prompts, what is not finite, scratch, captures, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import ops, oracle
from vtlab.device import runtime, scratch
from vtlab.device.errors import DeviceError
from vtlab.models.engine import Engine
from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from . import test_device_calls_chunks as chunks
from .compare import assert_bytes, assert_rel_l2
from .device_edges_chunks import starts
from .device_run import Emulated
from .emulated_arrays import emulated_arrays
from .emulation import EmulatedRuntime, compiler
from .generating_tiny import tiny_model
from .scalar import draw
from .test_models_recurrent import GREEDY, prompts

CORES = {"H": 2, "P": 64, "G": 1, "N": 64, "kind": "bfloat16"}
PLAIN = {"H": 4, "P": 5, "G": 2, "N": 9, "kind": "float32"}
FORMS = pytest.mark.parametrize("form", [CORES, PLAIN], ids=["tensor cores", "plain"])
TOKENS = ("x", "dt", "B", "C", "z")


def prompt(form: dict, *lengths: int, seed: int = 0) -> dict:
    """A call of ssd_chunk_prefill on the host."""
    T, (H, P, G, N, kind) = sum(lengths), form.values()
    return {
        "x": draw((T, H, P), kind, seed), "dt": draw((T, H), kind, seed + 1),
        "A": -np.exp(draw((H,), "float32", seed + 2)), "B": draw((T, G, N), kind, seed + 3),
        "C": draw((T, G, N), kind, seed + 4), "query_start_loc": starts(*lengths), "D": draw((H,), "float32", seed + 5),
        "z": draw((T, H, P), kind, seed + 6), "dt_bias": draw((H,), "float32", seed + 7) - 2,
        "initial_states": draw((len(lengths), H, P, N), "float32", seed + 8), "chunk_size": 64, "dt_softplus": True,
    }  # fmt: skip


def run(device, call: dict) -> tuple[np.ndarray, np.ndarray]:
    """(out, final_states)."""
    results = device.call("ssd_chunk_prefill", {name: device.send(value) for name, value in call.items()})
    return tuple(np.array(device.fetch(one)) for one in results)


def looped(device, call: dict) -> tuple[np.ndarray, np.ndarray]:
    """The same by the loop over tokens."""
    sent = {name: device.send(value) for name, value in call.items() if name != "chunk_size"}
    sent["state"] = sent.pop("initial_states")
    out = device.call("ssd_recurrent", dict(sent))
    return np.array(device.fetch(out)), np.array(device.fetch(sent["state"]))


def unchecked(device, op: str, arguments: dict):
    """A call whose arrays only the device looks into, as on a GPU; the emulated one's are also the host's."""
    if not isinstance(device, Emulated):
        return device.call(op, arguments)
    with runtime.using(device.runtime), ops.using(device.provider):
        return providers.get_op(op, "cuda")(**arguments)


def cut(call: dict, first: int, last: int, sequence: int) -> dict:
    """The tokens first ... last - 1 of one sequence alone."""
    tokens = {name: call[name][first:last] for name in TOKENS}
    state = call["initial_states"][sequence : sequence + 1]
    return call | tokens | {"initial_states": state, "query_start_loc": starts(last - first)}


@FORMS
@pytest.mark.parametrize("along", [run, looped])
def test_a_sequence_does_not_see_its_batch(device, form, along):
    """Alone, in a batch, and beside NaN: the same bytes; an empty sequence keeps its state."""
    call = prompt(form, 3, 0, 66)
    whole, states = along(device, call)
    alone, state = along(device, cut(call, 3, 69, 2))
    assert_bytes(alone, whole[3:])
    assert_bytes(state[0], states[2])
    assert_bytes(states[1], call["initial_states"][1])
    call["x"][1, 0, 4] = call["dt"][1, 1] = np.nan
    spoiled, after = along(device, call)
    assert_bytes(spoiled[3:], whole[3:])
    assert_bytes(after[1:], states[1:])
    assert np.isnan(spoiled[1:3, 0, 4].astype(float)).all() and np.isnan(spoiled[1:3, 1].astype(float)).all()
    assert_bytes(np.delete(spoiled[:, 0], 4, axis=1), np.delete(whole[:, 0], 4, axis=1))


@FORMS
@pytest.mark.parametrize("along, at", [(run, 64), (looped, 33)])
def test_a_prompt_resumes(device, form, along, at):
    """In chunks at the end of one, in the loop anywhere."""
    call = prompt(form, 70)
    whole, states = along(device, call)
    first, state = along(device, cut(call, 0, at, 0))
    rest, last = along(device, cut(call, at, 70, 0) | {"initial_states": state})
    assert_bytes(np.concatenate([first, rest]), whole)
    assert_bytes(last, states)


def test_chunks_are_the_loop(device):
    call = prompt(CORES, 150)
    for got, want in zip(run(device, call), looped(device, call), strict=True):
        assert_rel_l2(got, want, 2.0**-7)


@pytest.mark.parametrize("name, at", [("x", (130, 0, 3)), ("B", (130, 0, 5)), ("C", (1, 0, 2)), ("dt", (70, 0))])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_its_whole_chunk(device, name, at, bad):
    """As in the truth, whose weights above the diagonal are 0, and 0 times such a number is NaN."""
    call = prompt(CORES | {"H": 1}, 200) | {"chunk_size": 192, "z": None}
    call[name][at] = bad
    with np.errstate(invalid="ignore", over="ignore"):
        want = oracle.ssd_chunk_prefill(**call)
    assert np.isnan(want[0].astype(float)).any()
    for got, one in zip(run(device, call), want, strict=True):
        assert_rel_l2(got, one, 2.0**-8)


@pytest.mark.parametrize("name", ["x", "B", "z"])
def test_heads_at_any_address(device, name):
    """Off a vector's address the plain kernels serve: the mirror's bytes."""
    call = prompt(CORES | {"H": 1}, 5)
    want = oracle.ssd_chunk_prefill.mirror(**call)
    sent = {key: device.send(value) for key, value in call.items()}
    sent[name] = device.send(np.pad(call[name].reshape(-1), (1, 0)))[1:].reshape(call[name].shape)
    for got, one in zip(device.call("ssd_chunk_prefill", sent), want, strict=True):
        assert_bytes(device.fetch(got), one)


@FORMS
def test_what_scratch_held_does_not_matter(device, form):
    call = prompt(form, 2, 66)
    chunks.same_in_spoiled_scratch(lambda: run(device, call))


@FORMS
def test_a_capture_finds_its_scratch_and_waits_for_nobody(form, monkeypatch):
    monkeypatch.setattr(scratch.scratch, "_blocks", {})
    runtime = EmulatedRuntime()
    device, call = Emulated(runtime), prompt(form, 20)
    room = runtime.empty(call["x"].shape, call["x"].dtype), runtime.empty(call["initial_states"].shape, np.float32)
    sent = {name: device.send(value) for name, value in call.items()} | {"out": room}
    runtime.in_capture = True
    with pytest.raises(DeviceError, match="call the op once before the capture"):
        device.call("ssd_chunk_prefill", dict(sent))
    runtime.in_capture = False
    want = [np.array(one) for one in device.call("ssd_chunk_prefill", dict(sent))]
    runtime.in_capture, runtime.read = True, None
    for got, one in zip(device.call("ssd_chunk_prefill", dict(sent)), want, strict=True):
        assert_bytes(got, one)


@pytest.mark.parametrize("spoiled", [[0, 9, 5, 20], [1, 5, 5, 20], [0, 5, 5, 21]])
@pytest.mark.parametrize("op", ["ssd_chunk_prefill", "ssd_recurrent"])
def test_starts_that_are_none(device, spoiled, op):
    call = prompt(PLAIN, 5, 0, 15) | {"query_start_loc": np.int32(spoiled)}
    if op == "ssd_recurrent":
        del call["chunk_size"]
        call["state"] = call.pop("initial_states")
    with pytest.raises(ContractError, match="query_start_loc"):
        unchecked(device, op, {name: device.send(value) for name, value in call.items()})


def stages(device) -> dict[str, dict]:
    """Arguments of the single stages, on the device: 20 tokens in chunks of 16, 16 and 4 of two sequences."""
    heads, groups = draw((20, 2, 3), "float32", 0), draw((20, 1, 4), "float32", 1)
    sums, states = -np.ones((2, 3, 8), np.float32), draw((3, 2, 3, 4), "float32", 2)
    cuts, owner, first = np.int32([0, 8, 16, 20]), np.int32([0, 1, 1]), states[:2]
    calls = {
        "ssd_chunk_cumsum": {"dt": heads[:, :, 0].copy(), "A": sums[:, 0, 0].copy(), "chunk_size": 8},
        "ssd_chunk_state": {"x": heads, "B": groups, "dt": -sums, "dA_cumsum": sums},
        "ssd_bmm_chunk": {"C": groups, "B": groups, "chunk_size": 8},
        "ssd_chunk_scan": {"CB": np.ones((3, 1, 8, 8), np.float32), "x": heads, "dt": -sums, "dA_cumsum": sums,
                           "C": groups, "states": states, "seq_idx": owner, "initial_states": first},
    }  # fmt: skip
    passing = {"states": states, "dA_cumsum": sums, "last_chunk_indices": np.int32([0, 2]), "initial_states": first}
    sent = {op: call | {"cu_chunk_seqlens": cuts} for op, call in calls.items()} | {"ssd_state_passing": passing}
    return {op: {name: device.send(value) for name, value in call.items()} for op, call in sent.items()}


@pytest.mark.parametrize("op", ["ssd_chunk_cumsum", "ssd_chunk_state", "ssd_bmm_chunk", "ssd_chunk_scan"])
@pytest.mark.parametrize("spoiled", [[0, 9, 16, 20], [1, 8, 16, 20], [0, 8, 8, 20], [0, 8, 16, 21], [0, 16, 8, 20]])
def test_cuts_that_are_none(device, op, spoiled):
    call = stages(device)[op]
    with pytest.raises(ContractError, match="cu_chunk_seqlens"):
        unchecked(device, op, call | {"cu_chunk_seqlens": device.send(np.int32(spoiled))})


def test_a_capture_leaves_out_what_does_not_fit():
    """Cuts, indices and sequences beyond the end, which nobody can refuse then: what fits is as before."""
    device = Emulated(EmulatedRuntime())
    calls = stages(device)
    want = {op: device.call(op, dict(call)) for op, call in calls.items()}
    device.runtime.in_capture = True
    for op, name, spoiled in (
        ("ssd_chunk_state", "cu_chunk_seqlens", [0, 8, 16, 70]), ("ssd_bmm_chunk", "cu_chunk_seqlens", [0, 8, 16, -1]),
        ("ssd_chunk_scan", "cu_chunk_seqlens", [0, 8, 16, 900]), ("ssd_chunk_scan", "seq_idx", [0, 1, 70000]),
        ("ssd_state_passing", "last_chunk_indices", [0, 1 << 30]),
    ):  # fmt: skip
        got = unchecked(device, op, calls[op] | {name: device.send(np.int32(spoiled))})
        kept = 16 if op == "ssd_chunk_scan" else 2
        assert_bytes(got[:kept], want[op][:kept])


@pytest.mark.parametrize("op, name, spoiled", [
    ("ssd_chunk_scan", "seq_idx", [0, 1, 0]), ("ssd_chunk_scan", "seq_idx", [-1, 0, 1]),
    ("ssd_chunk_scan", "seq_idx", [0, 1, 2]), ("ssd_state_passing", "last_chunk_indices", [-2, 2]),
    ("ssd_state_passing", "last_chunk_indices", [2, 1]), ("ssd_state_passing", "last_chunk_indices", [0, 1]),
    ("ssd_state_passing", "last_chunk_indices", [0, 3]),
])  # fmt: skip
def test_numbers_of_chunks_that_are_none(device, op, name, spoiled):
    call = stages(device)[op]
    with pytest.raises(ContractError, match=name):
        unchecked(device, op, call | {name: device.send(np.int32(spoiled))})


def test_chunks_that_no_block_has_room_for(device):
    call = prompt(PLAIN, 3) | {"chunk_size": 5000}
    with pytest.raises(ContractError, match="chunk_size"):
        run(device, call)


@pytest.mark.skipif(compiler() is None, reason="emulation needs a C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mamba_2_goes_through_its_prompts(dtype):
    """The tokens of the host, prompts cut where a step is full."""
    room = {"num_blocks": 32, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 9}
    texts = prompts(1, 13, 6)
    want = Engine(tiny_model("mamba2", dtype), **room).generate(texts, GREEDY)
    with emulated_arrays() as (emulated, machine):
        got = Engine(tiny_model("mamba2", dtype).on(emulated), **room).generate(texts, GREEDY)
        assert "ssd_recurrent_any" in machine.launched
    assert [one.tokens for one in got] == [one.tokens for one in want]
