"""Quantised checkpoints as the tools write them: values, products, tokens, and what is refused."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from functools import lru_cache
from types import MappingProxyType

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle
from vtlab.models.config import ModelConfig
from vtlab.models.config_hf import read
from vtlab.models.fields import Fields
from vtlab.models.linear import Linear
from vtlab.models.loading import load, load_decoder
from vtlab.models.quant import Part, QuantLinear, Site
from vtlab.models.quant.compressed import read as compressed
from vtlab.models.quant.fp4 import Nvfp4
from vtlab.models.quant.wna16 import Awq, Gptq, PackQuantized
from vtlab.models.safetensors import read_safetensors
from vtlab.models.sampling_params import SamplingParams
from vtlab.models.weights import Weights
from vtlab.ops import lowbit
from vtlab.ops.errors import ContractError, FormatError

from .compare import assert_bytes, assert_rel_l2
from .gate_tokens import quantized
from .goldens import FOLDER, list_goldens, token_golden
from .tokens import logprobs, teacher_forced, token_gate

CHECKPOINTS = FOLDER / "quantized"
NAMES = sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json"))
STREAMS = [file.name for file in list_goldens() if file.kind == "tokens" and file.name.startswith("quantized_")]
WEIGHTS_ALONE = ("awq", "ct_w4a16", "gptq_act_order", "gptq_asym", "mxfp4")
LAYER = "model.layers.0."


@lru_cache
def parsed(name: str) -> MappingProxyType:
    return MappingProxyType(json.loads((CHECKPOINTS / name / "config.json").read_text()))


@lru_cache
def tensors_of(name: str):
    return read_safetensors(CHECKPOINTS / name)


def loaded(name: str, change=None, settings=None, dtype="bfloat16", packed=True) -> Weights:
    """The weights of a checkpoint. change : tensors by name, None for one left out. settings : of its quantization."""
    config = copy.deepcopy(dict(parsed(name)))
    for path, value in (settings or {}).items():
        *within, last = path.split(".")
        place = config["quantization_config"]
        for key in within:
            place = place[key]
        place[last] = value
    tensors = dict(tensors_of(name)) | (change or {})
    found = {key: data for key, data in tensors.items() if data is not None}
    return Weights.from_tensors(read(config, "config.json"), found, dtype, packed)


def linears(weights: Weights) -> dict[str, Linear]:
    return {name: value for name, value in vars(weights.layers[0]).items() if isinstance(value, Linear)}


def test_the_committed_scripts_made_them():
    digest = lambda script: hashlib.sha256((FOLDER.parent / script).read_bytes()).hexdigest()
    records = [json.loads((CHECKPOINTS / name / "provenance.json").read_text()) for name in NAMES]
    records.append(read_safetensors(CHECKPOINTS / "logits.safetensors").metadata)
    assert len(records) == 13 and all(about["script_sha256"] == digest(about["script"]) for about in records)


@pytest.mark.parametrize("name", NAMES)
def test_float32_logits_are_those_of_the_tools_own_weights(name):
    """Both evaluate the same weights in float32; four products follow each other, with sums of at most 192 terms, one
    unit roundoff each."""
    golden = read_safetensors(CHECKPOINTS / "logits.safetensors")
    ids = golden[f"{name}.ids"].tolist()
    got = teacher_forced(load_decoder(CHECKPOINTS / name, "float32", 64), ids[:1], [*ids[1:], 0])
    assert_rel_l2(got, golden[f"{name}.logits"], 4 * 192 * 2.0**-24)


@pytest.mark.parametrize("stream", STREAMS)
def test_tokens_are_vllms_or_tied_with_them(stream):
    """16-bit products and quantised activations know ties: the gate is near-tie. Where activations are quantised, the
    steps must be vLLM's: our errors and theirs point the same way, where those of other steps would not."""
    golden = token_golden(stream)
    served, exact = quantized(golden)
    verdict = token_gate(golden, served, exact)
    assert verdict.kind in ("strict", "near-tie"), verdict
    assert verdict.our_error <= 2 * verdict.their_error, verdict
    if not any(word in stream for word in (*WEIGHTS_ALONE, "_weights")):
        ours, theirs = [], []
        for prompt, output in zip(golden["prompts"], golden["outputs"]):
            got, true = (logprobs(model, prompt["ids"], output["tokens"]) for model in (served, exact))
            for step, top in enumerate(output["logprobs"]):
                ids, values = [token for token, _ in top], np.array([value for _, value in top])
                ours.append(got[step, ids] - true[step, ids])
                theirs.append(values - true[step, ids])
        assert np.vdot(ours, theirs) > 0, "errors of one origin point the same way"


@pytest.mark.parametrize("name", WEIGHTS_ALONE)
def test_packed_weights_alone_give_the_bytes_of_expanded_ones(name):
    x = np.random.default_rng(0).standard_normal((5, 192)).astype(ml_dtypes.bfloat16)
    packed, wide = linears(loaded(name)), linears(loaded(name, packed=False))
    assert packed.keys() == wide.keys() == {"qkv", "o", "gate_up", "down"}
    for key, linear in packed.items():
        assert isinstance(linear, QuantLinear) and len(linear.weight) == 1, "its parts lie in one matrix"
        assert (linear.out_features, linear.in_features) == wide[key].weight.shape
        rows = x[:, : linear.in_features].copy()
        assert_bytes(linear.multiplied(rows, rows.dtype), wide[key].multiplied(rows, rows.dtype))


def test_biases_of_packed_weights_are_added_in_the_models_dtype():
    linear = linears(loaded("gptq_act_order"))["qkv"]
    x = np.random.default_rng(0).standard_normal((3, 128)).astype(ml_dtypes.bfloat16)
    want = oracle.add(linear.multiplied(x, x.dtype), linear.bias)
    assert linear.bias.dtype == x.dtype
    assert_bytes(linear.apply(x, lambda which, dtype: None), want)


def test_generating_keeps_a_format_whose_activations_are_quantised():
    for name, kept in (("ct_int8_dynamic", True), ("nvfp4", True), ("awq", False), ("mxfp4", False)):
        engine = load(CHECKPOINTS / name, num_blocks=8)
        assert isinstance(engine.runner.decoder.weights.layers[0].qkv, QuantLinear) is kept
        (output,) = engine.generate([[5, 9]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(output.tokens) == 3


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_words_in_activation_order(bits):
    """pack-quantized without zero points, of 4 bits or 8, a group named for every row."""
    rng, rows, columns, groups = np.random.default_rng(bits), 32, 64, 4
    q = rng.integers(0, 1 << bits, (columns, rows)).astype(np.int32)
    scale = rng.uniform(0.01, 0.1, (rows, groups)).astype(np.float32)
    g_idx = rng.permutation(columns).astype(np.int32) % groups
    site = Site("file", "layer", rows, columns)
    tensors = {"weight_packed": lowbit.pack(q, bits, 0).T, "weight_scale": scale, "weight_g_idx": g_idx,
               "weight_shape": np.array([rows, columns])}  # fmt: skip
    scheme = PackQuantized(bits, columns // groups, True, True)
    assert {name: (stored.shape, tensors[name].shape) for name, stored in scheme.stored(site).items()} == {
        name: (data.shape, data.shape) for name, data in tensors.items()
    }
    want = ((q - (1 << (bits - 1))) * scale.T[g_idx]).T.astype(np.float32)
    assert_bytes(scheme.matrix(Part(site, tensors, {}), np.dtype(np.float32)).expanded(), want)


def test_shards_of_fp8_share_the_largest_scale():
    key = f"{LAYER}self_attn.k_proj.weight_scale"
    given = f"{LAYER}self_attn.v_proj.input_scale"
    change = {key: np.float32(0.004), given: np.float32(0.5)}
    (matrix,) = linears(loaded("modelopt_fp8", change))["qkv"].weight
    tensors = dict(tensors_of("modelopt_fp8")) | change
    parts = [f"{LAYER}self_attn.{part}_proj." for part in "qkv"]
    codes = np.concatenate([tensors[f"{part}weight"].view(np.uint8) for part in parts])
    scales = np.array([tensors[f"{part}weight_scale"] for part in parts], np.float32)
    want, scale = oracle.requantize_with_max_scale(codes, scales, [128, 32, 32])
    assert_bytes(matrix.weight, want)
    assert matrix.scale == scale == np.float32(0.004) and matrix.input_scale == np.float32(0.5)


def test_shards_of_int8_share_a_range():
    change = {f"{LAYER}self_attn.k_proj.input_scale": np.float32([0.5]),
              f"{LAYER}self_attn.k_proj.input_zero_point": np.int8([-100])}  # fmt: skip
    (matrix,) = linears(loaded("ct_int8_static", change))["qkv"].weight
    tensors = dict(tensors_of("ct_int8_static")) | change
    low, high = [], []
    for part in "qkv":
        scale, zero = (float(tensors[f"{LAYER}self_attn.{part}_proj.input_{x}"][0]) for x in ("scale", "zero_point"))
        low.append(scale * (-128 - zero))
        high.append(scale * (127 - zero))
    step = (max(high) - min(low)) / 255
    assert np.isclose(matrix.input_scale[0], step, rtol=1e-6) and matrix.zero_point[0] == round(-128 - min(low) / step)
    assert_bytes(matrix.sums, matrix.weight.sum(1, dtype=np.int32)[None] * matrix.zero_point)


def test_shards_that_share_nothing_are_multiplied_apart():
    """vLLM takes the larger global scale, and the last shard's order: wrong numbers. Here each has its own."""
    x = np.random.default_rng(0).standard_normal((3, 128)).astype(ml_dtypes.bfloat16)
    key = f"{LAYER}self_attn.k_proj.weight_global_scale"
    whole = linears(loaded("nvfp4"))["qkv"].multiplied(x, x.dtype)
    apart = linears(loaded("nvfp4", {key: tensors_of("nvfp4")[key] / 2}))["qkv"]
    assert [part.rows for part in apart.weight] == [128, 32, 32]
    assert_bytes(apart.multiplied(x, x.dtype), np.concatenate(
        [whole[:, :128], (whole[:, 128:160].astype(np.float32) * 2).astype(x.dtype), whole[:, 160:]], 1
    ))  # fmt: skip
    key = f"{LAYER}self_attn.v_proj.g_idx"
    moved = tensors_of("gptq_act_order")[key][::-1].copy()
    assert len(linears(loaded("gptq_act_order", {key: moved}))["qkv"].weight) == 2


def test_older_names_and_files_of_settings(tmp_path):
    """ModelOpt's and GPTQ's files beside config.json; FP8's other spelling; a version two of GPTQ's zero points."""
    for name, file, given in (
        ("modelopt_nvfp4", "hf_quant_config.json", json.loads(
            (CHECKPOINTS / "modelopt_nvfp4" / "hf_quant_config.json").read_text())),
        ("gptq_asym", "quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": False, "sym": False}),
    ):  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(CHECKPOINTS / name / "model.safetensors", folder)
        plain = {key: value for key, value in parsed(name).items() if key != "quantization_config"}
        (folder / "config.json").write_text(json.dumps(plain))
        (folder / file).write_text(json.dumps(given))
        got, want = (load_decoder(path, "float32", 32).weights for path in (folder, CHECKPOINTS / name))
        assert_bytes(got.layers[0].qkv.weight, want.layers[0].qkv.weight)
        (folder / file).write_text("{")
        with pytest.raises(FormatError, match=file):
            ModelConfig.from_folder(folder)
    config = dict(parsed("modelopt_fp8"))
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    fp8 = Weights.from_tensors(read(config, "config.json"), tensors_of("modelopt_fp8"), "bfloat16", True)
    assert_bytes(fp8.layers[0].down.weight[0].weight, linears(loaded("modelopt_fp8"))["down"].weight[0].weight)
    zeros = {key: data + 0x11111111 for key, data in tensors_of("gptq_act_order").items() if key.endswith("qzeros")}
    for packed in (True, False):
        two = linears(loaded("gptq_act_order", zeros, {"checkpoint_format": "gptq_v2"}, packed=packed))["o"]
        one = linears(loaded("gptq_act_order", packed=packed))["o"]
        x = np.eye(3, 128, dtype=ml_dtypes.bfloat16)
        assert_bytes(two.multiplied(x, x.dtype), one.multiplied(x, x.dtype))


def test_a_count_of_zeros_in_a_dense_checkpoint_is_no_fault():
    """As llm-compressor wrote it until 2025."""
    noted = {"format": "dense", "global_sparsity": 0.14, "ignore": [], "registry_requires_subclass": False,
             "sparsity_structure": "unstructured", "targets": []}  # fmt: skip
    got, want = (linears(loaded("ct_int8_dynamic", {}, {"sparsity_config": one})) for one in (noted, {}))
    assert_bytes(got["down"].weight[0].weight, want["down"].weight[0].weight)


def test_groups_and_rules_choose_the_linears():
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    token = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["re:.*q_proj", "model.layers.0.mlp.down_proj"], "weights": weights, "input_activations": token}
    given = Fields({"format": "float-quantized", "config_groups": {"a": group}, "ignore": ["re:.*layers.1.*"]}, "f")
    scheme = compressed(given).scheme
    assert scheme("model.layers.0.self_attn.q_proj") and scheme("model.layers.0.mlp.down_proj")
    assert scheme("model.layers.1.self_attn.q_proj") is scheme("model.layers.0.self_attn.k_proj") is None
    config = dict(parsed("gptq_asym"))
    rules = {"-:.*mlp.*": {}, "+:.*o_proj": {"bits": 8}}
    config["quantization_config"] = config["quantization_config"] | {"dynamic": rules}
    chosen = read(config, "config.json").quantization.scheme
    assert chosen("model.layers.0.mlp.up_proj") is None and chosen("lm_head") is chosen("model.embed_tokens") is None
    assert (chosen("model.layers.0.self_attn.o_proj").bits, chosen("model.layers.0.self_attn.q_proj").bits) == (8, 4)


def edited(name: str, suffix: str, change):
    """A tensor of the layer, changed: {name: change(tensor)}."""
    key = LAYER + suffix
    return name, {key: change(tensors_of(name)[key].copy())}


def at(place, value):
    def change(data):
        data[place] = value
        return data

    return change


Q, DOWN = "self_attn.q_proj", "mlp.down_proj"
BROKEN = [
    ("gptq_act_order", {}, {"group_size": float("inf")}, "quantization_config.group_size", "inf"),
    ("gptq_act_order", {}, {"group_size": float("nan")}, "quantization_config.group_size", "nan"),
    ("gptq_act_order", {}, {"group_size": "32"}, "quantization_config.group_size", "'32'"),
    ("gptq_asym", {}, {"dynamic": {"+:.*q_proj": "8"}}, "quantization_config.dynamic['+:.*q_proj']", "'8'"),
    ("gptq_asym", {}, {"dynamic": {"-:(": {}}}, "quantization_config.dynamic", "-:("),
    ("gptq_asym", {}, {"modules_in_block_to_quantize": 3}, "modules_in_block_to_quantize", "3"),
    ("gptq_asym", {}, {"modules_in_block_to_quantize": [[3]]}, "modules_in_block_to_quantize", "[[3]]"),
    ("ct_int8_dynamic", {}, {"sparsity_config": {"format": "sparse-24-bitmask", "targets": ["Linear"]}},
     "quantization_config.sparsity_config.format", "sparse-24-bitmask"),
    ("ct_int8_dynamic", {}, {"transform_config": {"config_groups": {}}}, "quantization_config.transform_config", "{"),
    ("ct_w4a16", {}, {"config_groups.group_0.targets": None}, f"{DOWN}.weight", "one of 7 that are missing; beside it "
     "weight_packed, weight_scale, weight_shape, weight_zero_point"),
    ("fp8_block", {}, {"weight_block_size": None}, f"{DOWN}.weight_scale", "beside it weight_scale_inv"),
    ("modelopt_fp8", {}, {"quant_algo": "NVFP4"}, f"{DOWN}.weight_scale_2", "no such tensor"),
    (*edited("gptq_act_order", f"{Q}.g_idx", at(5, 4)), {}, f"{Q}.g_idx", "group 4 for row 5"),
    (*edited("gptq_act_order", f"{Q}.g_idx", at(0, -1)), {}, f"{Q}.g_idx", "group -1"),
    (*edited("gptq_act_order", f"{Q}.scales", at((1, 2), 0)), {}, f"{Q}.scales", "a scale of 0"),
    (*edited("gptq_act_order", f"{Q}.scales", at((1, 2), np.nan)), {}, f"{Q}.scales", "a scale of nan"),
    (*edited("gptq_act_order", f"{Q}.qweight", lambda data: data[:8]), {}, f"{Q}.qweight", "shape (8, 128)"),
    (*edited("gptq_act_order", f"{Q}.qzeros", at((0, 0), 0)), {}, f"{Q}.qzeros", "zero points [0, 7]"),
    ("gptq_act_order", {}, {"desc_act": False}, f"{Q}.g_idx", "activation order"),
    ("gptq_act_order", {}, {"bits": 8}, f"{Q}.qweight", "shape (16, 128)"),
    ("gptq_act_order", {}, {"bits": 5}, "quantization_config.bits", "5"),
    ("gptq_act_order", {}, {"group_size": 48}, f"{Q}.qweight", "K = 128"),
    ("gptq_act_order", {}, {"group_size": 64}, f"{Q}.qzeros", "shape (4, 16)"),
    ("gptq_act_order", {}, {"checkpoint_format": "marlin"}, "quantization_config.checkpoint_format", "marlin"),
    ("gptq_act_order", {f"{LAYER}{Q}.g_idx": None}, {}, f"{Q}.g_idx", "no such tensor"),
    ("gptq_asym", {f"{LAYER}{Q}.bias": np.ones(128, np.float16)}, {}, f"{Q}.bias", "other than 0"),
    ("gptq_asym", {f"{LAYER}{Q}.weight": np.ones((128, 128), np.float16)}, {}, f"{Q}.weight", "no use for"),
    ("awq", {}, {"version": "gemv"}, "quantization_config.version", "gemv"),
    ("awq", {}, {"modules_to_not_convert": ["k_proj"]}, "self_attn.k_proj", "not quantised"),
    (*edited("awq", f"{Q}.qweight", lambda data: data.astype(np.int64)), {}, f"{Q}.qweight", "dtype int64"),
    (*edited("ct_w4a16", f"{Q}.weight_shape", at(1, 256)), {}, f"{Q}.weight_shape", "[128, 256]"),
    (*edited("ct_w4a16", f"{Q}.weight_scale", lambda data: data.T.copy()), {}, f"{Q}.weight_scale", "shape (4, 128)"),
    ("ct_w4a16", {}, {"config_groups.group_0.weights.symmetric": True}, f"{DOWN}.weight_zero_point", "no use for"),
    ("ct_w4a16", {}, {"config_groups.group_0.weights.actorder": "group"}, f"{DOWN}.weight_g_idx", "no such tensor"),
    ("ct_w4a16", {}, {"ignore": []}, "lm_head.weight_packed", "no such tensor"),
    ("ct_w4a16", {}, {"format": "marlin-24", "config_groups.group_0.format": None}, "quantization_config.format", "24"),
    ("ct_int8_dynamic", {}, {"kv_cache_scheme": {"num_bits": 8}}, "quantization_config.kv_cache_scheme", "num_bits"),
    ("ct_int8_dynamic", {f"{LAYER}self_attn.k_scale": np.ones(1, np.float32)}, {}, "self_attn.k_scale", "keys and"),
    (*edited("ct_fp8_dynamic", f"{Q}.weight", at((3, 4), np.nan)), {}, f"{Q}.weight", "a NaN"),
    (*edited("ct_fp8_dynamic", f"{Q}.weight_scale", at((3, 0), -1)), {}, f"{Q}.weight_scale", "a scale of -1"),
    (*edited("fp8_block", f"{Q}.weight_scale_inv", lambda data: data[:, :0]), {}, f"{Q}.weight_scale_inv", "(1, 0)"),
    ("fp8_block", {}, {"weight_block_size": [64, 128]}, f"{Q}.weight_scale_inv", "shape (1, 1)"),
    ("fp8_block", {}, {"weight_block_size": [128]}, "quantization_config.weight_block_size", "[128]"),
    ("fp8_block", {}, {"activation_scheme": "static"}, "quantization_config.activation_scheme", "static"),
    ("modelopt_fp8", {}, {"quant_algo": "INT4"}, "quantization_config.quant_algo", "INT4"),
    (*edited("nvfp4", f"{Q}.weight_scale", at((0, 0), -1)), {}, f"{Q}.weight_scale", "below zero"),
    (*edited("nvfp4", f"{Q}.weight_scale", at((0, 0), np.nan)), {}, f"{Q}.weight_scale", "a NaN"),
    (*edited("nvfp4", f"{Q}.weight_global_scale", at(0, np.inf)), {}, f"{Q}.weight_global_scale", "a scale of inf"),
    (*edited("nvfp4", f"{Q}.weight_scale", lambda data: data[:, :7]), {}, f"{Q}.weight_scale", "(128, 7)"),
    (*edited("mxfp4", f"{DOWN}.weight_scale", at((0, 0), 255)), {}, f"{DOWN}.weight_scale", "byte 255"),
    ("mxfp4", {}, {"config_groups.group_0.weights.group_size": 16}, "weights.group_size", "16"),
    ("mxfp4", {}, {"quant_method": "mystery"}, "quantization_config.quant_method", "mystery"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "settings", "field", "got"), BROKEN)
def test_what_contradicts_itself_is_refused_by_name(name, change, settings, field, got):
    with pytest.raises(FormatError) as error:
        loaded(name, change, settings)
    assert field in error.value.field and got in error.value.got, error.value
    assert error.value.file == "config.json" and error.value.want


def test_refusals_name_the_file_of_the_tensor(tmp_path):
    shutil.copytree(CHECKPOINTS / "awq", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["group_size"] = 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=r"model\.safetensors.*qzeros.*shape \(2, 16\), want shape \(4, 16\)"):
        load_decoder(tmp_path)


def test_odd_shapes_are_refused_before_tensors_are_looked_at():
    for scheme, rows, columns in (
        (Gptq(4, 32, True, False, False), 129, 128), (Gptq(3, -1, True, False, False), 128, 48),
        (PackQuantized(4, 32, True, False), 130, 128), (Awq(64), 132, 128), (Nvfp4(False, True), 128, 24),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=r"file: layer\.\w+: got .*, want a multiple of"):
            scheme.stored(Site("file", "layer", rows, columns))


def test_packed_weights_are_asked_for_where_there_are_some():
    with pytest.raises(ContractError, match="weights"):
        load_decoder(CHECKPOINTS / "awq", weights="blocks")
    with pytest.raises(ContractError, match="dtype"):
        load_decoder(CHECKPOINTS / "awq", "float32", weights="packed")
    with pytest.raises(ContractError, match="lookup"):
        linears(loaded("awq"))["o"].lookup(np.zeros(1, np.int32))
    assert lowbit.unpack(linears(loaded("awq"))["o"].weight[0].qweight, 4, 1).max() == 15
