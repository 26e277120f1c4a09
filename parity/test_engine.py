"""The engine: tokens depend on a request alone, blocks are never lost, bad calls are refused."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab.goldens import tiny
from vtlab.models.block_manager import BlockManager
from vtlab.models.config_hf import read
from vtlab.models.decoder import Decoder
from vtlab.models.engine import Engine
from vtlab.models.request import Request
from vtlab.models.sampler import sample, step_seed
from vtlab.models.sampling_params import SamplingParams
from vtlab.models.scheduler import Scheduler
from vtlab.models.weights import Weights
from vtlab.ops.errors import ContractError

from .test_tokenizer import spm

VOCAB = 512
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)


@lru_cache
def decoder(name: str = "gemma3") -> Decoder:
    """The tiny model cut down to two layers: a sliding window of 16 and, for gemma3, a full one."""
    config = {**tiny.CHECKPOINTS[name], "num_hidden_layers": 2}
    if name == "gemma3":
        config["layer_types"] = ["sliding_attention", "full_attention"]
    keep = lambda key: "layers." not in key or int(key.split(".")[2]) < 2
    tensors = {key: value for key, value in tiny.tensors(name).items() if keep(key)}
    parsed = read(config, name)
    return Decoder(parsed, Weights.from_tensors(parsed, tensors), max_positions=256)


def engine(name: str = "gemma3", **options) -> Engine:
    return Engine(decoder(name), **{"num_blocks": 64, "block_size": 8, **options})


def accounted(some: Engine) -> bool:
    """Every block is free or owned once."""
    owned = [block for request in some.scheduler.running for block in some.blocks.table(request.id)]
    return some.blocks.num_free + len(owned) == some.blocks.num_blocks and len(set(owned)) == len(owned)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    seed=st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.integers(1, 7),
    logprobs=st.just(2),
    ignore_eos=st.just(True),
)
requests = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 40), params), min_size=1, max_size=5)


@settings(max_examples=20, deadline=None)
@given(
    requests,
    st.sampled_from(["gemma3", "qwen3", "llama"]),
    st.integers(1, 40),
    st.sampled_from([1, 3, 16]),
    st.integers(1, 4),
    st.integers(0, 12),
)
def test_no_schedule_changes_a_token(wanted, name, budget, block_size, max_num_seqs, spare):
    prompts = [prompt(seed, length) for seed, length, _ in wanted]
    settings_ = [item[2] for item in wanted]
    alone = [engine(name).generate([tokens], [chosen])[0] for tokens, chosen in zip(prompts, settings_)]
    longest = max(len(tokens) + chosen.max_tokens for tokens, chosen in zip(prompts, settings_))
    blocks = -(-(longest + 1) // block_size) + spare
    crowded = engine(
        name, num_blocks=blocks, block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs
    )
    assert crowded.generate(prompts, settings_) == alone
    assert accounted(crowded) and crowded.blocks.num_free == blocks


@settings(max_examples=15, deadline=None)
@given(requests, st.randoms(use_true_random=False))
def test_streams_that_come_and_go_do_not_touch_each_other(wanted, chance):
    alone = [engine().generate([prompt(seed, length)], [chosen])[0].tokens for seed, length, chosen in wanted]
    shared = engine(max_num_batched_tokens=16, num_blocks=20)
    streams = [shared.stream(prompt(seed, length), chosen) for seed, length, chosen in wanted]
    got, closed, live = [[] for _ in streams], set(), list(range(len(streams)))
    while live:
        index = chance.choice(live)
        if chance.random() < 0.1:
            streams[index].close()
            closed.add(index)
            live.remove(index)
            continue
        token = next(streams[index], None)
        if token is None:
            live.remove(index)
        else:
            got[index].append(token)
        assert accounted(shared)
    for index, tokens in enumerate(got):
        assert tuple(tokens) == alone[index][: len(tokens)]
        assert index in closed or tuple(tokens) == alone[index]
    assert shared.scheduler.idle and shared.blocks.num_free == 20


def test_preempted_requests_recompute_to_the_same_tokens():
    chosen = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, seed=1)
    prompts = [prompt(seed, 10) for seed in range(4)]
    tight = engine(num_blocks=8, block_size=8)
    assert tight.generate(prompts, chosen) == [engine().generate([tokens], chosen)[0] for tokens in prompts]
    assert tight.scheduler.num_preemptions > 0


def test_greedy_equals_top_k_one():
    chosen = SamplingParams(temperature=1.0, top_k=1, max_tokens=6, ignore_eos=True, seed=4)
    assert engine().generate([prompt(1, 9)], chosen)[0].tokens == engine().generate([prompt(1, 9)], GREEDY)[0].tokens


def test_seeds_decide_and_requests_without_one_repeat_with_the_engines():
    def run(engine_seed: int, seed: int | None = None) -> list[tuple[int, ...]]:
        hot = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True, seed=seed)
        return [out.tokens for out in engine(seed=engine_seed).generate([prompt(2, 5)] * 2, hot)]

    first, second = run(0)
    assert first != second and run(0) == [first, second] != run(1)
    assert len(set(run(0, 7))) == 1 and run(0, 7) == run(5, 7) != run(0, 8)


def request(chosen: SamplingParams, generated=(), tokens=(1,)) -> Request:
    return Request(0, list(tokens), chosen, 11, chosen.stop_token_ids, 10_000, generated=list(generated))


def test_draws_of_successive_steps_are_independent_and_fair():
    from scipy import stats  # half a second of imports

    logits = np.log(np.array([[1, 2, 3, 4, 6]], np.float32) / 16)
    some = request(SamplingParams(temperature=1.0, max_tokens=None))
    for _ in range(4000):
        some.generated.append(sample(some, logits)[0])
    counts = np.bincount(some.generated, minlength=5)
    assert stats.chisquare(counts, 4000 * np.exp(logits[0].astype(np.float64))).pvalue > 1e-3
    pairs = np.zeros((5, 5))
    np.add.at(pairs, (some.generated[:-1], some.generated[1:]), 1)
    assert stats.chi2_contingency(pairs).pvalue > 1e-3


def test_step_seeds_are_splitmix64():
    assert step_seed(0, 0) & (2**64 - 1) == 0xE220A8397B1DCDAF
    assert step_seed(0, 1) & (2**64 - 1) == 0x6E789E6AA1B965F4
    assert len({step_seed(seed, step) for seed in (-1, 0, 1) for step in range(1000)}) == 3000


LOGITS = np.array([[0.0, 3.0, 2.0, 1.0, -1.0]], np.float32)


@pytest.mark.parametrize(("want", "generated", "chosen"), [
    (1, (), {}), (2, (), {"bad_words": [[1]]}), (1, (0,), {"bad_words": [[2, 1]]}),
    (2, (0, 2), {"bad_words": [[2, 1]]}),
    (3, (), {"allowed_token_ids": [3, 4]}), (2, (), {"stop_token_ids": [1], "min_tokens": 1}),
    (1, (0,), {"stop_token_ids": [1], "min_tokens": 1}), (4, (), {"logit_bias": {4: 5.0}}),
    (2, (1,), {"presence_penalty": 1.5}), (1, (1,), {"frequency_penalty": 0.9}),
    (2, (1, 1), {"frequency_penalty": 0.9}),
    (2, (1,), {"repetition_penalty": 2.0}), (1, (2,), {"repetition_penalty": 2.0}),
])  # fmt: skip
def test_greedy_takes_the_arg_max_of_what_is_allowed(want, generated, chosen):
    assert sample(request(SamplingParams(**chosen), generated, tokens=(4,)), LOGITS)[0] == want


@pytest.mark.parametrize(("kept", "chosen"), [
    ({0, 1, 2, 3, 4}, {}), ({1, 2}, {"top_k": 2}), ({1, 2}, {"top_p": 0.8}), ({1, 2, 3}, {"min_p": 0.1}),
    ({1}, {"top_p": 0.8, "temperature": 0.5}), ({0, 2}, {"allowed_token_ids": [0, 2]}),
])  # fmt: skip
def test_draws_take_all_that_is_kept_and_nothing_else(kept, chosen):
    params = SamplingParams(**{"temperature": 1.0, **chosen})
    assert {sample(request(params, [0] * step), LOGITS)[0] for step in range(600)} == kept


def test_logprobs_are_those_of_the_raw_logits():
    token, report = sample(request(SamplingParams(logprobs=2, bad_words=[[1]])), LOGITS)
    raw = LOGITS[0].astype(np.float64) - np.log(np.exp(LOGITS[0].astype(np.float64)).sum())
    assert (token, report.rank, [i for i, _ in report.top]) == (2, 2, [1, 2])
    np.testing.assert_allclose([report.logprob, *(value for _, value in report.top)], raw[[2, 1, 2]], rtol=2.0**-22)


def test_a_stop_token_ends_the_tokens_but_not_the_text():
    free = engine().generate([prompt(3, 4)], GREEDY)[0].tokens
    stop = free[3]
    stopped = engine().generate([prompt(3, 4)], SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=[stop]))[0]
    assert (stopped.tokens, stopped.finish_reason) == (free[: free.index(stop) + 1], "stop")
    assert engine().generate([prompt(3, 4)], GREEDY)[0].finish_reason == "length"


def test_text_leaves_out_the_stop_token_and_streams_as_it_is_generated():
    speaking = Engine(decoder(), spm(), num_blocks=64, block_size=8)
    chosen = SamplingParams(max_tokens=8, allowed_token_ids=[264, 265, 266], temperature=1.0, seed=3)
    whole = speaking.generate(["ab"], chosen)[0]
    assert whole.text == speaking.tokenizer.decode(whole.tokens) == "".join(speaking.stream_text("ab", chosen)) != ""
    stopping = SamplingParams(**{**vars(chosen), "stop_token_ids": [whole.tokens[2]]})
    cut = speaking.generate(["ab"], stopping)[0]
    assert cut.finish_reason == "stop" and cut.text == speaking.tokenizer.decode(cut.tokens[:-1])
    assert "".join(speaking.stream_text("ab", stopping)) == cut.text


def test_ids_beyond_the_tokenizers_vocabulary_stand_for_no_text():
    speaking = Engine(decoder(), spm(), num_blocks=8, block_size=8)
    chosen = SamplingParams(max_tokens=8, allowed_token_ids=[264, 700], temperature=5.0, seed=1)
    out = speaking.generate(["ab"], chosen)[0]
    assert set(out.tokens) == {264, 700}
    assert out.text == "".join(speaking.stream_text("ab", chosen)) == spm().token(264) * out.tokens.count(264)


def test_generation_ends_where_the_cache_or_the_model_ends():
    small = engine(num_blocks=3, block_size=8)
    out = small.generate([prompt(0, 10)], SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert (len(out.tokens), out.finish_reason) == (14, "length")
    assert Engine(decoder(), num_blocks=64, block_size=8).max_model_len == 256


@pytest.mark.parametrize(("argument", "tokens", "chosen"), [
    ("prompt", [], {}), ("prompt", [1, 768], {}), ("prompt", [-1], {}), ("prompt", [1.0], {}), ("prompt", [True], {}),
    ("prompt", [1] * 24, {}), ("prompt", "text", {}), ("top_k", [1], {"top_k": 769}),
    ("logprobs", [1], {"logprobs": 769}),
    ("stop_token_ids", [1], {"stop_token_ids": [768]}), ("logit_bias", [1], {"logit_bias": {768: 1.0}}),
    ("bad_words", [1], {"bad_words": [[1, 768]]}), ("allowed_token_ids", [1], {"allowed_token_ids": [-1]}),
])  # fmt: skip
def test_bad_requests_are_refused_before_anything_runs(argument, tokens, chosen):
    small = engine(num_blocks=3, block_size=8)
    for call in (
        lambda: small.generate([[1], tokens], SamplingParams(**chosen)),
        lambda: small.stream(tokens, SamplingParams(**chosen)),
    ):
        with pytest.raises(ContractError) as error:
            call()
        assert error.value.argument == argument
    assert small.scheduler.idle and small.blocks.num_free == 3


def test_calls_that_mix_up_their_arguments_are_refused():
    for argument, call in {
        "prompts": lambda: engine().generate("text"),
        "prompt": lambda: engine().generate([1, 2, 3]),
        "params": lambda: engine().generate([[1], [2]], [GREEDY]),
    }.items():
        with pytest.raises(ContractError) as error:
            call()
        assert error.value.argument == argument
    with pytest.raises(ContractError, match="SamplingParams"):
        engine().generate([[1]], [{"temperature": 1.0}])
    with pytest.raises(ContractError, match="tokenizer"):
        next(engine().stream_text([1]))
    assert engine().generate([]) == []


@pytest.mark.parametrize("field", [
    {"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_k": 1.5}, {"top_p": 0.0}, {"top_p": 1.1},
    {"min_p": 1.1}, {"presence_penalty": 2.5}, {"frequency_penalty": -3}, {"repetition_penalty": 0.0},
    {"max_tokens": 0},
    {"min_tokens": 17}, {"seed": 1.0}, {"bad_words": [[]]}, {"logit_bias": {1: float("inf")}},
    {"allowed_token_ids": []},
    {"logprobs": True}, {"stop_token_ids": 3}, {"bad_words": "no"}, {"bad_words": [3]}, {"bad_words": ["no"]},
    {"logit_bias": [1]}, {"allowed_token_ids": 5},
])  # fmt: skip
def test_impossible_parameters_are_refused_by_name(field):
    with pytest.raises(ContractError) as error:
        SamplingParams(**field)
    assert error.value.argument.startswith(next(iter(field)))


def test_nan_logits_are_an_error_and_leave_nothing_behind():
    weights = decoder().weights
    broken = Decoder(
        decoder().config, type(weights)(**{**vars(weights), "norm": np.full(128, np.nan, np.float32)}), 256
    )
    some = Engine(broken, num_blocks=8, block_size=8)
    with pytest.raises(ContractError, match="NaN"):
        some.generate([[1, 2], [3]], GREEDY)
    assert some.scheduler.idle and some.blocks.num_free == 8


class Stop(BaseException):
    """Stands for KeyboardInterrupt, which pytest would take for itself."""


@pytest.mark.parametrize("where", ["progress", "forward"])
def test_an_interrupted_call_leaves_the_engine_as_it_was(monkeypatch, where):
    some, calls = engine(num_blocks=16), []
    before = some.stream(prompt(9, 12), GREEDY)
    head = [next(before), next(before)]

    def interrupt(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise Stop
        return forward(*arguments) if where == "forward" else None

    forward = some.decoder.forward
    if where == "forward":
        monkeypatch.setattr(some.decoder, "forward", interrupt)
    with pytest.raises(Stop):
        some.generate([prompt(1, 20), prompt(2, 3)], GREEDY, progress=interrupt if where == "progress" else None)
    monkeypatch.undo()
    assert accounted(some) and len(some.scheduler.running) == 1
    assert tuple(head + list(before)) == engine().generate([prompt(9, 12)], GREEDY)[0].tokens
    assert some.generate([prompt(1, 20)], GREEDY) == engine().generate([prompt(1, 20)], GREEDY)
    assert some.scheduler.idle and some.blocks.num_free == 16


def test_progress_counts_up_to_all():
    seen = []
    engine(max_num_seqs=1).generate(
        [prompt(1, 3), prompt(2, 3)], GREEDY, progress=lambda done, of: seen.append((done, of))
    )
    assert seen[-1] == (2, 2) and seen == sorted(seen) and (1, 2) in seen


@given(st.integers(1, 12), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=40))
def test_blocks_are_free_or_owned_once(num_blocks, block_size, calls):
    blocks = BlockManager(num_blocks, block_size)
    held: dict[int, tuple[int, ...]] = {}
    for owner, tokens in calls:
        if tokens == 0:
            blocks.release(owner)
            held.pop(owner, None)
        else:
            before, free = blocks.table(owner), blocks.num_free
            fits = blocks.grow(owner, tokens)
            needed = max(-(-tokens // block_size), len(before))
            assert fits == (needed - len(before) <= free)
            assert len(blocks.table(owner)) == (needed if fits else len(before))
            assert blocks.table(owner)[: len(before)] == before
            held[owner] = blocks.table(owner)
        owned = [block for table in held.values() for block in table]
        assert len(set(owned)) == len(owned) == num_blocks - blocks.num_free
        assert set(owned) <= set(range(num_blocks))


@pytest.mark.parametrize("make", [
    lambda: BlockManager(0, 16), lambda: BlockManager(4, 0), lambda: BlockManager(True, 1),
    lambda: Scheduler(BlockManager(1, 1), 0, 1), lambda: Scheduler(BlockManager(1, 1), 1, 0),
])  # fmt: skip
def test_impossible_sizes_are_refused(make):
    with pytest.raises(ContractError):
        make()
