"""Around the recurrent kernels: strided rows, any cut of work and sequences, slots that lie, captures."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import causal_conv, causal_conv_spec, gdn, kda, linear_attention, ssm, state_cache

from .compare import assert_bytes
from .device_doors import assert_refused, past_the_door
from .device_run import Emulated, tupled
from .scalar import draw
from .side_streams import side_stream


def assert_call(device, op, host, views=lambda arguments: arguments):
    """The op on the device gives the mirror's results and leaves its states; `views` cuts what is passed."""
    sent = {name: device.send(value) for name, value in host.items()}
    want = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in host.items()}
    got = tupled(device.call(op, views(dict(sent))))
    for one, other in zip(got, tupled(getattr(oracle, op).mirror(**views(want))), strict=True):
        assert_bytes(device.fetch(one), other, op)
    for name, value in want.items():
        if isinstance(value, np.ndarray):
            assert_bytes(device.fetch(sent[name]), value, f"{op}, {name}")


def packed(B=5, Hk=1, Hv=2, D=128, shift=0, kind="bfloat16"):
    width = (2 * Hk + Hv) * D
    return {
        "mixed_qkv": draw((B, width + shift), kind, 1),
        "a": draw((B, Hv + shift), kind, 2),
        "b": draw((B, Hv + shift), kind, 3),
        "A_log": draw((Hv,), "float32", 4),
        "dt_bias": draw((Hv,), kind, 5),
        "state": draw((B + 1, Hv, D, D), "float32", 6),
        "state_idx": np.int32([5, 0, -1, 2, 1]),
        "scale": 0.1,
    }


@pytest.mark.parametrize("shift", [0, 1, 8])
def test_rows_of_wider_projections(device, shift):
    def views(given):
        return given | {name: given[name][:, shift:] for name in ("mixed_qkv", "a", "b")}

    assert_call(device, "gdn_packed_decode", packed(shift=shift), views)
    conv = {
        "x": draw((5, 24 + shift), "bfloat16", 1),
        "weight": draw((24, 4), "bfloat16", 2),
        "conv_state": draw((6, 24, 3), "bfloat16", 3),
        "state_idx": np.int32([5, 0, -1, 2, 1]),
    }
    cut = lambda given: given | {"x": given["x"][:, shift:]}
    assert_call(device, "causal_conv1d_update", conv, cut)
    starts = {"query_start_loc": np.int32([0, 1, 5]), "has_initial_state": np.int8([1, 0])}
    assert_call(device, "causal_conv1d_fwd", conv | starts | {"state_idx": np.int32([3, 1])}, cut)


@pytest.mark.parametrize("run", [1, 2, 3, 5, 8])
def test_how_long_a_threads_run_is_changes_no_byte(device, run, monkeypatch):
    """Runs that begin and end anywhere in sequences of any length; who owns a sequence's first tokens moves."""
    for name in ("_RUN", "_TURN"):
        monkeypatch.setattr(causal_conv, name, run)
    lengths = (2, 1, 0, 7, 3, 1, 1, 12, 4)
    given = {
        "x": draw((31, 8), "bfloat16", 1),
        "weight": draw((8, 4), "bfloat16", 2),
        "bias": draw((8,), "float32", 3),
        "conv_state": draw((10, 8, 3), "bfloat16", 4),
        "query_start_loc": np.cumsum([0, *lengths]).astype(np.int32),
        "has_initial_state": np.int32([1, 0, 1, 1, 0, 1, 1, 0, 1]),
        "state_idx": np.int32([3, 1, 0, 4, -1, 9, 2, 5, 6]),
    }
    assert_call(device, "causal_conv1d_fwd", given)
    given = {
        "bcx": draw((31, 24), "bfloat16", 1),
        "weight": draw((8, 3), "bfloat16", 2),
        "conv_state": draw((9, 8, 2), "bfloat16", 4),
        "query_start_loc": given["query_start_loc"],
        "has_initial_state": given["has_initial_state"],
    }
    assert_call(device, "short_conv", given)


@pytest.mark.parametrize("op, D", [("gdn_prefill", 128), ("gdn_prefill", 24), ("kda_prefill_recurrent", 128)])
def test_a_prefill_in_pieces_is_the_whole(device, op, D):
    T, H = 9, 2
    shape = (T, H, D) if op.startswith("kda") else (T, H)
    given = {
        "q": draw((T, H, D), "bfloat16", 1),
        "k": draw((T, H, D), "bfloat16", 2) / 16,
        "v": draw((T, H, 32), "bfloat16", 3),
        "g": -np.abs(draw(shape, "float32", 4)),
        "beta": np.abs(draw((T, H), "float32", 5)) / 4,
    }
    given["k"] = given["k"].astype(given["q"].dtype)
    begin = draw((1, H, 32, D), "float32", 6)
    whole = device.send(begin)
    call = lambda part, state: device.fetch(
        device.call(
            op,
            {name: device.send(np.ascontiguousarray(value[part])) for name, value in given.items()}
            | {"state": state, "query_start_loc": device.send(np.int32([0, part.stop - part.start])), "scale": 0.5},
        )
    )
    want = call(slice(0, T), whole)
    state = device.send(begin)
    parts = [call(slice(first, last), state) for first, last in ((0, 1), (1, 6), (6, 6), (6, 9))]
    assert_bytes(np.concatenate(parts), want)
    assert_bytes(device.fetch(state), device.fetch(whole))


def test_a_row_may_write_the_slot_that_another_reads(device):
    given = {
        "state": draw((3, 2, 32, 128), "float32", 1),
        "x": draw((3, 2, 32), "bfloat16", 2),
        "dt": draw((3, 2, 32), "bfloat16", 3),
        "A": -np.abs(draw((2, 32, 128), "float32", 4)),
        "B": draw((3, 1, 128), "bfloat16", 5),
        "C": draw((3, 1, 128), "bfloat16", 6),
        "dt_softplus": True,
        "state_idx": np.int32([0, 1, 1]),
        "dst_idx": np.int32([1, 2, 0]),
    }
    assert_call(device, "selective_state_update", given)
    assert_call(device, "selective_state_update", given | {"state_idx": np.int32([2, -1, 0])})
    assert_call(device, "selective_state_update", given | {"dst_idx": np.int32([-1, 2, 0])})


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_heads_with_one_decay(device, kind):
    """A broadcast view, as Mamba-2 passes it: the kernel that reads one number a head."""
    B = 2
    A = np.broadcast_to(-np.float32([0.5, 2])[:, None, None], (2, 64, 128))
    host = {
        "state": draw((B + 1, 2, 64, 128), kind, 1),
        "x": draw((B, 2, 64), "bfloat16", 2),
        "dt": draw((B, 2, 64), "bfloat16", 3),
        "B": draw((B, 2, 128), "bfloat16", 5),
        "C": draw((B, 2, 128), "bfloat16", 6),
        "z": draw((B, 2, 64), "bfloat16", 7),
    }
    sent = {name: device.send(value) for name, value in host.items()}
    numbers = device.send(np.ascontiguousarray(A[:, :1, :1]))
    lib = np if isinstance(numbers, np.ndarray) else device.cupy
    got = device.call("selective_state_update", sent | {"A": lib.broadcast_to(numbers, A.shape), "dt_softplus": True})
    assert_bytes(device.fetch(got), oracle.selective_state_update.mirror(**host, A=A, dt_softplus=True))
    assert_bytes(device.fetch(sent["state"]), host["state"])


def _decoded():
    return {
        "q": draw((2, 1, 8), "float32", 1),
        "k": draw((2, 1, 8), "float32", 2),
        "v": draw((2, 1, 4), "float32", 3),
        "g": -np.abs(draw((2, 1), "float32", 4)),
        "beta": draw((2, 1), "float32", 5),
        "state": draw((3, 1, 4, 8), "float32", 6),
        "state_idx": np.int32([2, 0]),
        "scale": 0.5,
    }


def _channelled():
    return _decoded() | {"g": -np.abs(draw((2, 1, 8), "float32", 4))}


def _packed():
    return packed() | {"state_idx": np.int32([5, 0, 4, 2, 1])}


def _lightning():
    return {
        "q": draw((2, 1, 8), "float32", 1),
        "k": draw((2, 1, 8), "float32", 2),
        "v": draw((2, 1, 8), "float32", 3),
        "kv_state": draw((3, 1, 8, 8), "float32", 4),
        "slope": np.float32([0.5]),
        "state_idx": np.int32([2, 0]),
    }


def _updated():
    return {
        "x": draw((2, 8), "float32", 1),
        "weight": draw((8, 4), "float32", 2),
        "conv_state": draw((3, 8, 3), "float32", 3),
        "state_idx": np.int32([2, 0]),
    }


def _drafted():
    return _updated() | {
        "x": draw((2, 2, 8), "float32", 1),
        "conv_state": draw((3, 8, 4), "float32", 3),
        "num_accepted_tokens": np.int32([1, 2]),
    }


def _forward():
    return _updated() | {
        "x": draw((5, 8), "float32", 1),
        "query_start_loc": np.int32([0, 2, 5]),
        "has_initial_state": np.int8([1, 0]),
    }


def _mamba():
    return {
        "state": draw((3, 1, 4, 8), "float32", 1),
        "x": draw((2, 1, 4), "float32", 2),
        "dt": draw((2, 1, 4), "float32", 3),
        "A": -np.abs(draw((1, 4, 8), "float32", 4)),
        "B": draw((2, 1, 8), "float32", 5),
        "C": draw((2, 1, 8), "float32", 6),
        "state_idx": np.int32([2, 0]),
        "dst_idx": np.int32([1, 0]),
    }


def _prefilled():
    given = _decoded() | {"state": draw((1, 1, 4, 8), "float32", 6), "query_start_loc": np.int32([0, 2])}
    del given["state_idx"]
    return given


def _gathered():
    return {"cache": draw((3, 8), "bfloat16", 1), "state_idx": np.int32([2, 0])}


def _scattered():
    return _gathered() | {"working": draw((2, 8), "float32", 2)}


SLOTTED = [
    (gdn, "gdn_packed_decode", _packed),
    (gdn, "gdn_decode", _decoded),
    (kda, "kda_decode", _channelled),
    (linear_attention, "linear_attention_decode", _lightning),
    (causal_conv, "causal_conv1d_update", _updated),
    (causal_conv_spec, "causal_conv1d_update_spec", _drafted),
    (causal_conv, "causal_conv1d_fwd", _forward),
]
LIES = [
    *(
        (*call, {"state_idx": np.int32([slot, 0, 1, 2, 3][: len(call[2]()["state_idx"])])}, "state_idx")
        for call in SLOTTED
        for slot in (0, 6)
    ),
    (ssm, "selective_state_update", _mamba, {"state_idx": np.int32([3, 0])}, "state_idx"),
    (ssm, "selective_state_update", _mamba, {"dst_idx": np.int32([3, 0])}, "dst_idx"),
    (ssm, "selective_state_update", _mamba, {"dst_idx": np.int32([1, 1])}, "dst_idx"),
    (ssm, "selective_state_update", _mamba, {"state_idx": np.int32([1, 1]), "dst_idx": None}, "state_idx"),
    *(
        (
            causal_conv_spec,
            "causal_conv1d_update_spec",
            _drafted,
            {"num_accepted_tokens": np.int32([1, wrong])},
            "num_accepted_tokens",
        )
        for wrong in (0, 3)
    ),
    *(
        (module, op, made, {"query_start_loc": np.int32(starts)}, "query_start_loc")
        for module, op, made, cuts in (
            (causal_conv, "causal_conv1d_fwd", _forward, ((0, 2, 4), (1, 2, 5), (0, 6, 5))),
            (gdn, "gdn_prefill", _prefilled, ((0, 3), (1, 2))),
        )
        for starts in cuts
    ),
    *(
        (state_cache, op, made, {"state_idx": np.int32([slot, 0])}, "state_idx")
        for op, made in (("gdn_state_gather", _gathered), ("gdn_state_scatter", _scattered))
        for slot in (-1, 3)
    ),
    (state_cache, "gdn_state_scatter", _scattered, {"state_idx": np.int32([0, 0])}, "state_idx"),
]


@pytest.mark.parametrize("module, op, made, lie, argument", LIES)
def test_what_lies_is_refused_before_anything_is_written(device, module, op, made, lie, argument):
    assert_refused(device, module, op, made() | lie, argument)


@pytest.mark.parametrize("module, op, made", SLOTTED)
def test_in_a_capture_a_slot_that_does_not_exist_is_null(device, module, op, made):
    """The call cannot wait for the device to look."""
    want = made()
    want["state_idx"][0] = -1
    lie = made()
    lie["state_idx"][0] = 99
    sent = {name: device.send(value) for name, value in lie.items()}
    if isinstance(device, Emulated):
        device.runtime.in_capture = True
        try:
            got = past_the_door(device, module, op, dict(sent))
        finally:
            device.runtime.in_capture = False
    else:
        lib = device.cupy
        stream = side_stream(lib)
        with stream:
            out = device.call(op, {name: device.send(value) for name, value in want.items()})
            stream.synchronize()
            stream.begin_capture()
            got = device.call(op, sent | {"out": out})
            stream.end_capture().launch(stream)
            stream.synchronize()
    assert_bytes(device.fetch(got), getattr(oracle, op).mirror(**want))
    for name in getattr(oracle, op).contract.mutates:
        assert_bytes(device.fetch(sent[name]), want[name], name)
