"""Around the sampling kernels: whole vocabularies, misaligned rows, indices that lie, launches, graphs."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import draws, runtime, sampling, token_masks
from vtlab.device.vocab import check_width, cut
from vtlab.ops.errors import ContractError
from vtlab.ops.table import lookup

from .compare import assert_bytes
from .device_run import Emulated, assert_equal, tupled
from .emulation import compiler
from .scalar import draw
from .side_streams import side_stream

F32, I32 = np.float32, np.int32
TIERS = {"gather_logprobs": sampling, "gumbel_sample": draws}


def past_the_door(device, op, arguments):
    """The call as a GPU's arrays make it: the door sees host arrays and would refuse bad indices itself."""
    sent = {name: device.send(value) for name, value in arguments.items()}
    if not isinstance(device, Emulated):
        return device.call(op, sent)
    with runtime.using(device.runtime):
        return getattr(TIERS.get(op, token_masks), op)(**sent)


def check(device, op, **arguments):
    """The device's bytes are the mirror's."""
    want = tupled(lookup(op).mirror(**arguments))
    got = tupled(device.call(op, {name: device.send(value) for name, value in arguments.items()}))
    for one, other in zip(got, want, strict=True):
        assert_equal(op, device.fetch(one), other, op)


def test_a_whole_vocabulary(device):
    logits = draw((1, 151936), "float32", 1, scale=3.0)
    check(device, "apply_top_k_top_p", logits=logits, k=np.array([50], I32), p=F32([0.9]))
    check(device, "gather_logprobs", logprobs=logits, num_logprobs=20, ids=np.array([77]))


@pytest.mark.parametrize("shift", [1, 2])
def test_rows_that_start_anywhere(device, shift):
    whole = device.send(draw((1, 4 * 256 + shift), "float32", 2, scale=2.0))
    part, host = whole[0, shift:].reshape(4, 256), device.fetch(whole)[0, shift:].reshape(4, 256).copy()
    one, k = F32([0.9, 0.1, 0.7, 1.3]), np.array([3, 0, 1, 7], I32)
    for op, more in {
        "apply_temperature": {"temperature": one}, "apply_min_p": {"min_p": one}, "compute_probs": {},
        "apply_top_k_top_p": {"k": k, "p": one}, "greedy_argmax": {},
        "apply_token_mask": {"rows": k[:2], "cols": k[:2]},
    }.items():  # fmt: skip
        got = device.call(op, {"logits": part} | {name: device.send(value) for name, value in more.items()})
        assert_bytes(device.fetch(got), lookup(op).mirror(host, **more), op)


@pytest.mark.parametrize("bad", [-1, 9, 2**40])
def test_gather_names_the_first_bad_id(device, bad):
    call = {"logprobs": draw((3, 9), "float32", 3), "num_logprobs": 2, "ids": np.array([0, bad, 9])}
    with pytest.raises(ContractError, match=rf"ids.*{bad} at index 1, want 0 <= id < 9"):
        past_the_door(device, "gather_logprobs", call)
    outs = (np.zeros((3, 3), I32), np.zeros((3, 3), F32), np.ones(3, np.int64))
    sent = tuple(device.send(out) for out in outs)
    with runtime.using(device.runtime if isinstance(device, Emulated) else runtime.current()):
        sampling.gather_logprobs(device.send(call["logprobs"]), 2, device.send(call["ids"]), out=sent)
    _, values, ranks = (device.fetch(array) for array in sent)
    assert np.isnan(values[1:, 0]).all() and not np.isnan(values[:, 1:]).any() and ranks.tolist()[1:] == [0, 0]


def gumbel_call(requests):
    return {
        "logits": draw((3, 40), "float32", 4), "req_idx": np.array(requests, I32), "temperature": F32([0.7, 1.0]),
        "seed": np.array([3, 4]), "pos": np.array([5, 6, 7]),
    }  # fmt: skip


def test_gumbel_names_the_first_bad_request_and_takes_it_for_padding_in_out(device):
    call = gumbel_call([1, 2, 5])
    with pytest.raises(ContractError, match=r"req_idx.*2 at index 1, want index < 2"):
        past_the_door(device, "gumbel_sample", call)
    ids = device.send(np.zeros(3, np.int64))
    with runtime.using(device.runtime if isinstance(device, Emulated) else runtime.current()):
        draws.gumbel_sample(**{name: device.send(value) for name, value in call.items()}, out=ids)
    assert device.fetch(ids).tolist() == oracle.gumbel_sample.mirror(**gumbel_call([1, -1, -1])).tolist()


@pytest.mark.parametrize("op", ["apply_logit_bias", "apply_token_mask"])
@pytest.mark.parametrize("argument, bad, size", [("rows", 3, 3), ("rows", -1, 3), ("cols", 8, 8), ("cols", -2, 8)])
def test_pairs_outside_are_named_and_left_out_of_out(device, op, argument, bad, size):
    call = {"logits": draw((3, 8), "float32", 5), "rows": np.array([2, 0], I32), "cols": np.array([7, 1], I32)}
    call |= {"bias": F32([1, 2])} if op == "apply_logit_bias" else {}
    want = lookup(op).mirror(**{name: value if name == "logits" else value[1:] for name, value in call.items()})
    call[argument][0] = bad
    with pytest.raises(ContractError, match=rf"{argument}.*{bad} at index 0, want 0 <= index < {size}"):
        past_the_door(device, op, call)
    out = device.send(np.zeros((3, 8), F32))
    sent = {name: device.send(value) for name, value in call.items()}
    with runtime.using(device.runtime if isinstance(device, Emulated) else runtime.current()):
        getattr(token_masks, op)(**sent, out=out)
    assert_bytes(device.fetch(out), want)


def test_chunks_cover_every_column_once():
    for rows, width in ((1, 1), (1, 151936), (32, 151936), (8192, 151936), (3, 1024), (3, 1025), (700, 5000)):
        chunks, per = cut(rows, width)
        assert per % 1024 == 0 and (chunks - 1) * per < width <= chunks * per and (chunks == 1 or rows * chunks <= 1536)


def test_rows_whose_sums_could_overflow_are_refused():
    check_width("compute_probs", 2**21 - 1)
    with pytest.raises(ContractError, match=r"compute_probs\(logits\): got 2097152 columns, want at most 2097151"):
        check_width("compute_probs", 2**21)


def test_launches_do_not_depend_on_what_is_in_a_row():
    if compiler() is None:
        pytest.skip("emulation needs a C++ compiler")
    counts = set()
    for value in (0.0, -np.inf, np.nan):
        device = Emulated()
        logits = device.send(np.full((2, 2048), value, F32))
        device.call("apply_top_k_top_p", {"logits": logits, "k": np.array([3, 0], I32), "p": F32([0.5, 1.0])})
        counts.add(tuple(device.runtime.launched))
    assert [len(names) for names in counts] == [4]


def test_a_captured_step_samples_again_from_new_logits(device):
    if isinstance(device, Emulated):
        pytest.skip("graphs need a GPU: --device cuda")
    cupy = device.cupy
    rows = [draw((3, 5000), "float32", seed, scale=3.0) for seed in range(4)]
    k, p, seeds = np.array([50, 0, 3], I32), F32([0.9, 0.8, 1.0]), np.array([1, 2, 3])
    logits, kept, probs = (device.send(rows[0]) for _ in range(3))
    ids, sent = device.send(seeds), [device.send(value) for value in (k, p, seeds)]
    stream = side_stream(cupy)

    def step():
        device.call("apply_top_k_top_p", {"logits": logits, "k": sent[0], "p": sent[1], "out": kept})
        device.call("compute_probs", {"logits": kept, "out": probs})
        device.call("random_sample", {"probs": probs, "seeds": sent[2], "out": ids})

    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for host in rows[1:]:
            logits[...] = device.send(host)
            graph.launch(stream)
            stream.synchronize()
            shares = oracle.compute_probs.mirror(oracle.apply_top_k_top_p.mirror(host, k, p))
            assert_bytes(device.fetch(probs), shares)
            assert device.fetch(ids).tolist() == oracle.random_sample.mirror(shares, seeds).tolist()
