"""Around the chunked delta rule's kernels: neighbours in a batch, resumed prompts, scratch, captures, refusals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import gdn_chunk_states, scratch
from vtlab.device.errors import DeviceError
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .device_edges_chunks import starts
from .device_run import Emulated
from .emulation import EmulatedRuntime
from .scalar import draw

CORES = {"Hk": 1, "Hv": 2, "Dk": 128, "Dv": 128, "kind": "bfloat16"}
PLAIN = {"Hk": 2, "Hv": 4, "Dk": 12, "Dv": 8, "kind": "float32"}
FORMS = pytest.mark.parametrize("form", [CORES, PLAIN], ids=["tensor cores", "plain"])


def prompt(form: dict, *lengths: int, seed: int = 0) -> dict:
    """A call of gdn_chunk_prefill on the host."""
    T, (Hk, Hv, Dk, Dv, kind) = sum(lengths), form.values()
    rng = np.random.Generator(np.random.PCG64(seed))
    return {
        "q": draw((T, Hk, Dk), kind, seed), "k": (draw((T, Hk, Dk), "float32", seed + 1) / Dk**0.5).astype(kind),
        "v": draw((T, Hv, Dv), kind, seed + 2), "g": -rng.exponential(0.1, (T, Hv)).astype(np.float32),
        "beta": rng.uniform(0, 1, (T, Hv)).astype(np.float32),
        "state": draw((len(lengths), Hv, Dv, Dk), "float32", seed),
        "query_start_loc": starts(*lengths), "scale": 0.25,
    }  # fmt: skip


def run(device, call: dict, op: str = "gdn_chunk_prefill") -> tuple[np.ndarray, np.ndarray]:
    """(out, the state afterwards)."""
    sent = {name: device.send(value) for name, value in call.items()}
    out = device.call(op, dict(sent))
    return np.array(device.fetch(out)), np.array(device.fetch(sent["state"]))


def cut(call: dict, first: int, last: int, sequence: int, gate: str = "g") -> dict:
    """The tokens first ... last - 1 of one sequence alone."""
    tokens = {name: call[name][first:last] for name in ("q", "k", "v", gate, "beta")}
    return call | tokens | {"state": call["state"][sequence : sequence + 1], "query_start_loc": starts(last - first)}


def sees_itself_alone(device, call: dict, op: str = "gdn_chunk_prefill", gate: str = "g") -> None:
    """Sequences of 3, 0 and 66 tokens: the last has the same bytes alone, in its batch, and beside NaN.

    The empty one keeps its state, and NaN is where it is allowed to be alone.
    """
    whole, states = run(device, call, op)
    alone, state = run(device, cut(call, 3, 69, 2, gate), op)
    assert_bytes(alone, whole[3:])
    assert_bytes(state[0], states[2])
    assert_bytes(states[1], call["state"][1])
    call["v"][1, 0, 5] = call[gate][1, 1] = np.nan
    spoiled, after = run(device, call, op)
    assert_bytes(spoiled[3:], whole[3:])
    assert_bytes(after[1:], states[1:])
    assert_bytes(np.delete(spoiled[:, 0], 5, axis=1), np.delete(whole[:, 0], 5, axis=1))
    assert np.isnan(spoiled[1:3, 0, 5].astype(float)).all() and np.isnan(spoiled[1:3, 1].astype(float)).all()
    assert np.isnan(after[0, 0, 5]).all() and np.isnan(after[0, 1]).all()


def resumes(device, call: dict, op: str = "gdn_chunk_prefill", gate: str = "g") -> None:
    """70 tokens, cut at the end of a chunk."""
    whole, states = run(device, call, op)
    first, state = run(device, cut(call, 0, 64, 0, gate), op)
    rest, last = run(device, cut(call, 64, 70, 0, gate) | {"state": state}, op)
    assert_bytes(np.concatenate([first, rest]), whole)
    assert_bytes(last, states)


def same_in_spoiled_scratch(results: Callable[[], tuple]) -> None:
    """Called again over scratch memory that is full of NaN, it gives the same bytes."""
    want = results()
    for block in scratch.scratch._blocks.values():
        block[...] = 0xFF
    for got, one in zip(results(), want, strict=True):
        assert_bytes(got, one)


@FORMS
def test_a_sequence_does_not_see_its_batch(device, form):
    sees_itself_alone(device, prompt(form, 3, 0, 66))


@FORMS
def test_a_prompt_resumes_at_the_end_of_a_chunk(device, form):
    resumes(device, prompt(form, 70))


@pytest.mark.parametrize("multiprocessors", [0, 1 << 20])
def test_how_work_is_cut_changes_no_byte(device, multiprocessors, monkeypatch):
    """Two stages or three."""
    call = prompt(CORES, 130)
    want = run(device, call)
    monkeypatch.setattr(gdn_chunk_states, "MULTIPROCESSORS", multiprocessors)
    for got, one in zip(run(device, call), want, strict=True):
        assert_bytes(got, one)


def test_heads_at_any_address(device):
    """Off a vector's address the plain kernels serve; near what tensor cores give, and the mirror's bytes."""
    call = prompt(CORES, 5)
    want = oracle.gdn_chunk_prefill.mirror(**call | {"state": call["state"].copy()})
    sent = {name: device.send(value) for name, value in call.items()}
    sent["v"] = device.send(np.pad(call["v"].reshape(-1), (1, 0)))[1:].reshape(call["v"].shape)
    assert_bytes(device.fetch(device.call("gdn_chunk_prefill", sent)), want)


@FORMS
def test_what_scratch_held_does_not_matter(device, form):
    call = prompt(form, 2, 66)
    same_in_spoiled_scratch(lambda: run(device, call))


def test_a_capture_finds_its_scratch_and_waits_for_nobody():
    runtime = EmulatedRuntime()
    device, call = Emulated(runtime), prompt(PLAIN, 20)
    sent = {name: device.send(value) for name, value in call.items()} | {"out": runtime.empty((20, 4, 8), np.float32)}
    runtime.in_capture = True
    with pytest.raises(DeviceError, match="call the op once before the capture"):
        device.call("gdn_chunk_prefill", dict(sent))
    runtime.in_capture = False
    device.call("gdn_chunk_prefill", dict(sent))
    runtime.in_capture, runtime.read = True, None
    device.call("gdn_chunk_prefill", dict(sent))


@pytest.mark.parametrize("spoiled", [[0, 9, 5, 20], [1, 5, 5, 20], [0, 5, 5, 21]])
def test_starts_that_are_none(device, spoiled):
    call = prompt(PLAIN, 5, 0, 15) | {"query_start_loc": np.int32(spoiled)}
    with pytest.raises(ContractError, match="query_start_loc"):
        device.call("gdn_chunk_prefill", {name: device.send(value) for name, value in call.items()})


def test_chunks_that_no_block_has_room_for(device):
    call = {"g": draw((3, 1), "float32", 0), "query_start_loc": starts(3), "chunk_size": 5000}
    assert_bytes(device.fetch(device.call("gdn_chunk_cumsum", {n: device.send(v) for n, v in call.items()})),
                 np.cumsum(call["g"], axis=0))  # fmt: skip
    heads = {name: draw((3, 1, 4), "float32", 0) for name in ("q", "k", "v_new")}
    call = heads | {"h": draw((1, 1, 4, 4), "float32", 0), "gc": call["g"], "scale": 1.0} | call
    del call["g"]
    with pytest.raises(ContractError, match="chunk_size"):
        device.call("gdn_chunk_o", {name: device.send(value) for name, value in call.items()})


def test_another_number_of_states_than_chunks(device):
    call = prompt(PLAIN, 5, 20)
    arguments = {"k": call["k"], "w": np.repeat(call["k"], 2, axis=1), "u": call["v"], "gc": call["g"],
                 "state": call["state"], "query_start_loc": call["query_start_loc"], "chunk_size": 16}  # fmt: skip
    h, _ = device.call("gdn_delta_h", {name: device.send(value) for name, value in arguments.items()})
    assert h.shape == (3, 4, 8, 12)
    assert_bytes(device.fetch(h)[:2], call["state"])
