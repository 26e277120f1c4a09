"""Recurrent and hybrid families: vLLM's tokens, states that requests do not share, and prompts cut anywhere."""

from __future__ import annotations

import copy

import ml_dtypes
import numpy as np
import pytest

from vtlab.goldens import tiny
from vtlab.models import recurrent
from vtlab.models.block_manager import BlockManager
from vtlab.models.config_hf import read
from vtlab.models.decoder import Decoder
from vtlab.models.engine import Engine
from vtlab.models.sampling_params import SamplingParams
from vtlab.models.weights import Weights
from vtlab.ops.errors import ContractError, FormatError

from . import kimi_forward
from .generating_tiny import RECURRENT, tiny_model
from .goldens import list_goldens, token_golden
from .test_models_device import device  # noqa: F401  a fixture
from .tokens import teacher_forced, token_gate

STREAMS = {entry.name for entry in list_goldens() if entry.kind == "tokens"}
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2)


def some_of(golden: dict, steps: int = 10) -> dict:
    """A part that takes a moment: the prompts of 1 and of 33 ids, `steps` tokens after each."""
    chosen = [index for index, prompt in enumerate(golden["prompts"]) if len(prompt["ids"]) in (1, 33)]
    cut = lambda output: {key: values[:steps] for key, values in output.items()}
    outputs = [cut(golden["outputs"][index]) for index in chosen]
    return {**golden, "prompts": [golden["prompts"][index] for index in chosen], "outputs": outputs}


@pytest.mark.parametrize("name", [name for name in RECURRENT if f"{name}_float32" in STREAMS])
def test_float32_tokens_are_vllms(name):
    verdict = token_gate(some_of(token_golden(f"{name}_float32")), tiny_model(name))
    assert verdict.kind == "strict" and verdict.max_error < verdict.least_gap / 2, verdict


@pytest.mark.parametrize("name", [name for name in RECURRENT if f"{name}_bfloat16" in STREAMS])
def test_bfloat16_tokens_are_vllms_or_tied_with_them(name):
    golden = some_of(token_golden(f"{name}_bfloat16"), 32)  # errors are maxima: of few steps, chance
    verdict = token_gate(golden, tiny_model(name, "bfloat16"), tiny_model(name, "float32", stored="bfloat16"))
    assert verdict.kind in ("strict", "near-tie"), verdict
    assert verdict.our_error <= 2 * verdict.their_error, verdict


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 512, length).tolist() for length in lengths]


def engine(name: str, dtype: str = "float32", **options) -> Engine:
    return Engine(tiny_model(name, dtype), **{"num_blocks": 32, "block_size": 8, "max_num_seqs": 4, **options})


def alone(name: str, texts: list[list[int]], chosen=GREEDY, dtype: str = "float32") -> list:
    """Each request by itself, in an engine that had none before."""
    return [engine(name, dtype).generate([text], chosen)[0] for text in texts]


def accounted(some: Engine) -> bool:
    """Nothing is owned any more."""
    return some.blocks.num_free == some.blocks.num_blocks and some.blocks.num_free_slots == some.blocks.num_slots


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RECURRENT)
def test_chunks_slots_and_neighbours_change_no_byte(name, dtype):
    """More requests than slots, in chunks of five tokens, beside decoding ones: the log-probabilities stay the same."""
    texts = prompts(1, 13, 6)
    shared = engine(name, dtype, max_num_batched_tokens=5, max_num_seqs=2)
    assert shared.generate(texts, GREEDY) == alone(name, texts, dtype=dtype)
    assert accounted(shared)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_slot_shows_nothing_of_the_request_before(name, monkeypatch):
    texts = prompts(9, 1, 11)
    want = alone(name, texts)
    used = engine(name, max_num_seqs=1)
    assert [used.generate([text], GREEDY)[0] for text in texts] == want
    # Each forward says whether a request has begun; without that the next one starts from the last one's states.
    forward = used.decoder.forward

    def reset_forgotten(batch, caches, *more):
        batch.begun[...] = 1
        return forward(batch, caches, *more)

    monkeypatch.setattr(used.decoder, "forward", reset_forgotten)
    assert used.generate([texts[0]], GREEDY)[0] != want[0]


@pytest.mark.parametrize("name", ["qwen3_5", "mamba"])
def test_what_is_interrupted_or_preempted_computes_its_states_anew(name, monkeypatch):
    texts, chosen = prompts(10, 9, 8), SamplingParams(max_tokens=9, ignore_eos=True, logprobs=1)
    want = alone(name, texts, chosen)
    tight = engine(name, num_blocks=4)
    assert tight.generate(texts, chosen) == want and accounted(tight)
    assert tight.scheduler.num_preemptions > 0 or not tight.decoder.config.attends
    some = engine(name)
    stream = some.stream(texts[0], chosen)
    head = [next(stream), next(stream)]
    forward = some.decoder.forward

    def fails_after_its_work(*arguments):
        forward(*arguments)
        raise KeyError

    monkeypatch.setattr(some.decoder, "forward", fails_after_its_work)
    with pytest.raises(KeyError):
        some.generate([texts[1]], chosen)
    monkeypatch.undo()
    assert tuple(head + list(stream)) == want[0].tokens and accounted(some)


@pytest.mark.parametrize("name", RECURRENT)
def test_graphs_change_no_token(device, name):  # noqa: F811
    """Three requests and a row of padding in a captured step, whose states are changed where they are."""
    texts, chosen = prompts(3, 12, 1), SamplingParams(max_tokens=3, ignore_eos=True)
    replayed = engine(name, device=device, max_num_seqs=5)
    launched = engine(name, device=device, graphs=False)
    assert replayed.generate(texts, chosen) == launched.generate(texts, chosen)
    assert replayed.runner.graphs.replays > 0


def test_a_model_without_attention_takes_any_length():
    boundless = engine("mamba", num_blocks=1)
    text = prompts(40)[0]
    assert boundless.generate([text], GREEDY)[0] == alone("mamba", [text])[0]
    assert boundless.runner.caches[0].state.shape[0] == 4 and not boundless.blocks.table(1)


def test_slots_go_round():
    blocks = BlockManager(4, 8, num_slots=2)
    assert blocks.slot("a") == -1 and blocks.grow("a", 3) and blocks.grow("b", 9)
    assert {blocks.slot("a"), blocks.slot("b")} == {0, 1} and not blocks.grow("c", 1)
    assert blocks.num_free == 1 and not blocks.table("c")
    blocks.release("a")
    assert not blocks.grow("c", 17) and blocks.slot("c") == -1 and blocks.num_free_slots == 1
    assert blocks.grow("c", 1) and blocks.slot("c") == 0 and blocks.num_free_slots == 0
    with pytest.raises(ContractError, match="num_slots"):
        BlockManager(4, 8, num_slots=-1)


def inner(name: str, **changes) -> dict:
    """A checkpoint's configuration with other fields in the text's part; `...` takes one out."""
    config = copy.deepcopy(tiny.CHECKPOINTS[name])
    text = config.get("text_config", config)
    for field, value in changes.items():
        text[field] = value
        if value is ...:
            del text[field]
    return config


@pytest.mark.parametrize(("name", "field", "value"), [
    ("qwen3_5", "layer_types", ["linear_attention"] * 3), ("qwen3_5", "layer_types", ["sliding_attention"] * 4),
    ("qwen3_5", "linear_num_value_heads", 3), ("qwen3_5", "attn_output_gate", False), ("qwen3_5", "layer_scale", True),
    ("qwen3_5", "output_gate_type", "sigmoid"), ("qwen3_5", "mamba_ssm_dtype", "bfloat16"),
    ("qwen3_5", "model_type", "qwen3_next"), ("qwen3_5", "linear_key_head_dim", 0), ("qwen3_5", "head_dim", 33),
    ("mamba", "use_bias", True), ("mamba", "use_conv_bias", False), ("mamba", "state_size", 0),
    ("mamba", "hidden_act", "gelu"), ("mamba", "time_step_rank", 1.5), ("mamba", "num_hidden_layers", "3"),
    ("mamba2", "n_groups", 3), ("mamba2", "num_heads", 5), ("mamba2", "rms_norm", False),
    ("mamba2", "norm_before_gate", "no"), ("qwen3_5_moe", "num_experts_per_tok", 9),
    ("qwen3_5_moe", "moe_intermediate_size", 0), ("qwen3_next", "mlp_only_layers", [1]),
    ("qwen3_next", "decoder_sparse_step", 2), ("kimi_linear", "mla_use_nope", False),
    ("kimi_linear", "q_lora_rank", 8), ("kimi_linear", "v_head_dim", 200), ("kimi_linear", "num_experts_per_token", 5),
    ("kimi_linear", "moe_layer_freq", 2), ("kimi_linear", "moe_router_activation_func", "tanh"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(name, field, value):
    with pytest.raises(FormatError) as error:
        read(inner(name, **{field: value}), "some/config.json")
    assert error.value.field.rpartition(".")[2] == field and error.value.file == "some/config.json"


def test_absent_fields_are_the_familys():
    assert read(inner("mamba", time_step_rank="auto"), "x").more == {"rank": 4} == read(inner("mamba"), "x").more
    assert read(inner("mamba", intermediate_size=...), "x").layers == read(inner("mamba"), "x").layers
    listed = read(inner("qwen3_5", layer_types=..., full_attention_interval=2), "x").layer_types
    assert listed == ("linear_attention", "full_attention") * 2
    assert read(inner("mamba"), "x").max_position_embeddings == 2**31 - 1


WRONGS = {
    "decays and strengths exchanged": (
        "qwen3_5", "gated_delta", "conv, ba[:, heads:], ba[:, :heads]", "conv, ba[:, :heads], ba[:, heads:]"
    ),
    "queries not scaled": ("qwen3_5", "gated_delta", "vectors[1] ** -0.5", "1.0"),
    "states that stay where they were": ("mamba", "carried", "ops.gdn_state_scatter(cache", "(lambda *_: 0)(cache"),
    "a convolution that forgets": ("mamba2", "convolved", "x, weight, cache, bias, batch.state",
                                   "x, weight, cache * 0, bias, batch.state"),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("wrong", WRONGS)
def test_a_wrong_in_a_block_is_noticed(wrong, monkeypatch):
    """By a run in chunks beside one in one piece, or by the stream of a float32 forward of its own."""
    import inspect

    name, block, old, new = WRONGS[wrong]
    text = [prompts(12)[0]]
    want = alone(name, text)
    source = inspect.getsource(getattr(recurrent, block))
    assert source.count(old) == 1
    found = dict(vars(recurrent))
    exec(source.replace(old, new), found)
    families = [recurrent, __import__("vtlab.models.families.mamba", fromlist=["x"])]
    families.append(__import__("vtlab.models.families.mamba2", fromlist=["x"]))
    for module in families:
        if hasattr(module, block):
            monkeypatch.setattr(module, block, found[block])
    assert alone(name, text) != want


def test_kimi_linear_equals_a_forward_in_float64():
    """No library runs it here. As in test_models_forward: some twenty stored results a layer, each rounded once."""
    model, text = tiny_model("kimi_linear"), prompts(21)[0]
    want = kimi_forward.logits(tiny.CHECKPOINTS["kimi_linear"], tiny.tensors("kimi_linear"), text)
    got = teacher_forced(model, text[:1], [*text[1:], 0])
    assert np.linalg.norm(got - want) <= 24 * len(model.config.layers) * 2.0**-24 * np.linalg.norm(want)


OTHER_EXPERTS = {
    "not scaled": {"routed_scaling_factor": 1.0}, "shares not normalised": {"moe_renormalize": False},
    "groups not limited": {"num_expert_group": 1}, "one expert": {"num_experts_per_token": 1},
}  # fmt: skip


@pytest.mark.parametrize("wrong", OTHER_EXPERTS)
def test_kimi_linears_stream_notices_other_experts(wrong):
    """In float32, another rule of routing is further from vLLM's log-probabilities than its 16 bits explain."""
    golden = some_of(token_golden("kimi_linear_bfloat16"))
    config = read({**tiny.CHECKPOINTS["kimi_linear"], **OTHER_EXPERTS[wrong]}, wrong)
    tensors = {name: bits.view(ml_dtypes.bfloat16) for name, bits in tiny.tensors("kimi_linear", "bfloat16").items()}
    other = Decoder(config, Weights.from_tensors(config, tensors, "float32"), max_positions=256)
    exact = tiny_model("kimi_linear", "float32", stored="bfloat16")
    assert token_gate(golden, other, other).max_error > 2 * token_gate(golden, exact, exact).max_error


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_experts_have_the_checkpoints_rows(name):
    """Each expert's matrix is that of its name in the file, gate before up."""
    layer, tensors = tiny_model(name).weights.layers[1], tiny.tensors(name)
    at, (gate, down) = (
        ("mlp", ("gate_proj", "down_proj")) if name == "qwen3_next" else ("block_sparse_moe", ("w1", "w2"))
    )
    for expert in (0, 5):
        file = f"model.layers.1.{at}.experts.{expert}."
        up = layer.experts_up.weight.reshape(8, 2, 32, 64)[expert]
        assert up[0].tobytes() == tensors[f"{file}{gate}.weight"].tobytes() != up[1].tobytes()
        got = layer.experts_down.weight.reshape(8, 64, 32)[expert]
        assert got.tobytes() == tensors[f"{file}{down}.weight"].tobytes()
