"""Around chunked Kimi delta attention's kernels: neighbours in a batch, resumed prompts, scratch, captures."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import kda_chunk_states
from vtlab.device.errors import DeviceError
from vtlab.ops.errors import ContractError

from . import test_device_calls_chunks as chunks
from .compare import assert_bytes, assert_rel_l2
from .device_edges_chunks import starts
from .device_run import Emulated
from .emulation import EmulatedRuntime
from .recurrences import goldens, unit
from .scalar import draw

CORES = {"H": 2, "D": 128, "Dv": 128, "kind": "bfloat16"}
PLAIN = {"H": 2, "D": 12, "Dv": 8, "kind": "float32"}
FORMS = pytest.mark.parametrize("form", [CORES, PLAIN], ids=["tensor cores", "plain"])
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FADING = ("g1", "A_log", "dt_bias")


def prompt(form: dict, *lengths: int, seed: int = 0) -> dict:
    """A call of kda_chunk_prefill on the host; some channels hardly fade, others at once."""
    T, (H, D, Dv, kind) = sum(lengths), form.values()
    rng = np.random.Generator(np.random.PCG64(seed))
    return {
        "q": unit((T, H, D), seed + 1, np.dtype(kind)), "k": unit((T, H, D), seed + 2, np.dtype(kind)),
        "v": draw((T, H, Dv), kind, seed + 3), "g1": draw((T, H, D), kind, seed + 4),
        "beta": rng.uniform(0, 1, (T, H)).astype(np.float32), "A_log": rng.uniform(-1, 2, H).astype(np.float32),
        "dt_bias": rng.uniform(-8, 1, H * D).astype(np.float32),
        "state": draw((len(lengths), H, Dv, D), "float32", seed), "query_start_loc": starts(*lengths),
        "scale": 0.25,
    }  # fmt: skip


PREFILL = {"op": "kda_chunk_prefill", "gate": "g1"}
run = partial(chunks.run, op=PREFILL["op"])


@FORMS
def test_a_sequence_does_not_see_its_batch(device, form):
    chunks.sees_itself_alone(device, prompt(form, 3, 0, 66), **PREFILL)


@FORMS
def test_a_prompt_resumes_at_the_end_of_a_chunk(device, form):
    chunks.resumes(device, prompt(form, 70), **PREFILL)


@FORMS
def test_chunks_stay_near_the_loop(device, form):
    """The loop's kernel on the same GPU, about ten roundings to bfloat16 away: 10 * 2^-9; in float32 none."""
    call = prompt(form, 130)
    out, state = run(device, call)
    fading = {name: device.send(call.pop(name)) for name in FADING}
    sent = {name: device.send(value) for name, value in call.items()}
    sent["g"] = device.call("kda_decay_gate", fading)
    loop = device.call("kda_prefill_recurrent", sent | {"qk_l2norm": False})
    for got, one in ((out, loop), (state, sent["state"])):
        assert_rel_l2(got, device.fetch(one), 10 * 2.0**-9 if form is CORES else 2.0**-18)


def test_prompts_are_vllms(device):
    """vLLM's own, of a GPU, whose factors of A are TF32."""
    found = [g for g in goldens("kda", "kda_chunk_prefill") if g.build == "cuda" and g.inputs["q"].dtype == BFLOAT16]
    assert any(golden.inputs["q"].shape[-1] == 128 for golden in found)
    for golden in found:
        out, state = run(device, golden.call())
        for got, name in ((out, "out"), (state, "state")):
            assert_rel_l2(got, golden.outputs[name].reshape(got.shape), 2.0**-9, str(golden))


def test_one_token_of_a_chunk_forgets_it_all(device):
    """A gate of 2^-2000 and less: finite numbers, and nothing of what was before it."""
    call = prompt(CORES, 40)
    call["g1"][20] = 1000
    forgotten, state = run(device, call)
    assert np.isfinite(forgotten.astype(float)).all() and np.isfinite(state).all()
    fresh, last = run(device, chunks.cut(call, 20, 40, 0, PREFILL["gate"]) | {"state": np.zeros_like(call["state"])})
    assert_rel_l2(forgotten[20:], fresh, 2.0**-8)
    assert_rel_l2(state, last, 2.0**-8)


@pytest.mark.parametrize("token", [12, 17])
def test_infinite_gates_are_nan_where_the_mirrors_are(device, token):
    call = prompt(CORES, 18)
    call["g1"][token, 0, 3] = np.inf
    state = call["state"].copy()
    want = oracle.kda_chunk_prefill.mirror(**call | {"state": state})
    out, after = run(device, call)
    assert_bytes(np.isnan(out.astype(float)), np.isnan(want.astype(float)))
    assert_bytes(np.isnan(after), np.isnan(state))
    assert np.isnan(out[token:, 0].astype(float)).all() and not np.isnan(out[:, 1].astype(float)).any()


@pytest.mark.parametrize("multiprocessors", [0, 1 << 20])
def test_how_work_is_cut_changes_no_byte(device, multiprocessors, monkeypatch):
    """Two stages or three."""
    call = prompt(CORES, 130)
    want = run(device, call)
    monkeypatch.setattr(kda_chunk_states, "MULTIPROCESSORS", multiprocessors)
    for got, one in zip(run(device, call), want, strict=True):
        assert_bytes(got, one)


@pytest.mark.parametrize("name", ["v", "g1"])
def test_heads_at_any_address(device, name):
    """Off a vector's address the plain kernels serve; near what tensor cores give, and the mirror's bytes."""
    call = prompt(CORES, 5)
    want = oracle.kda_chunk_prefill.mirror(**call | {"state": call["state"].copy()})
    sent = {each: device.send(value) for each, value in call.items()}
    sent[name] = device.send(np.pad(call[name].reshape(-1), (1, 0)))[1:].reshape(call[name].shape)
    assert_bytes(device.fetch(device.call("kda_chunk_prefill", sent)), want)


@FORMS
def test_what_scratch_held_does_not_matter(device, form):
    call = prompt(form, 2, 66)
    chunks.same_in_spoiled_scratch(lambda: run(device, call))


@FORMS
def test_a_capture_finds_its_scratch_and_waits_for_nobody(form):
    runtime = EmulatedRuntime()
    device, call = Emulated(runtime), prompt(form, 20)
    sent = {name: device.send(value) for name, value in call.items()}
    sent["out"] = runtime.empty(call["v"].shape, call["v"].dtype)
    runtime.in_capture = True
    with pytest.raises(DeviceError, match="call the op once before the capture"):
        device.call("kda_chunk_prefill", dict(sent))
    runtime.in_capture = False
    device.call("kda_chunk_prefill", dict(sent))
    runtime.in_capture, runtime.read = True, None
    device.call("kda_chunk_prefill", dict(sent))


@pytest.mark.parametrize("spoiled", [[0, 9, 5, 20], [1, 5, 5, 20], [0, 5, 5, 21]])
def test_starts_that_are_none(device, spoiled):
    call = prompt(PLAIN, 5, 0, 15) | {"query_start_loc": np.int32(spoiled)}
    with pytest.raises(ContractError, match="query_start_loc"):
        device.call("kda_chunk_prefill", {name: device.send(value) for name, value in call.items()})


def test_another_number_of_states_than_chunks(device):
    call = prompt(PLAIN, 5, 20)
    arguments = {"kg": call["k"], "w": call["k"], "u": call["v"], "gc": call["g1"], "state": call["state"],
                 "query_start_loc": call["query_start_loc"], "chunk_size": 16}  # fmt: skip
    h, _ = device.call("kda_delta_h", {name: device.send(value) for name, value in arguments.items()})
    assert h.shape == (3, 2, 8, 12)
    assert_bytes(device.fetch(h)[:2], call["state"])
