"""Quantised linears on a GPU: their kernels, launched and replayed, and whole models in captured steps.

With ``--device cuda`` on the GPU, else on the emulated one; linears run their own kernels there, models the oracle's.
"""

from __future__ import annotations

import copy

import ml_dtypes
import numpy as np
import pytest

from vtlab.models.buffers import Kept
from vtlab.models.config_hf import read
from vtlab.models.engine import Engine
from vtlab.models.families import FAMILIES
from vtlab.models.loading import load_decoder
from vtlab.models.quant import QuantLinear
from vtlab.models.quant.linears import default_weights
from vtlab.models.sampling_params import SamplingParams
from vtlab.ops import arrays, providers
from vtlab.ops.errors import ContractError

from .compare import assert_bytes, assert_nmse
from .emulated_arrays import emulated_arrays
from .emulation import compiler
from .test_models_device import device  # noqa: F401  (a fixture)
from .test_models_quantized import CHECKPOINTS, LAYER, linears, loaded, parsed, tensors_of

BF16 = ml_dtypes.bfloat16
_GROUP = "config_groups.group_0.input_activations"
_MX = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": True}
_NO_SCALES = dict.fromkeys(name for name in tensors_of("nvfp4") if name.endswith("input_global_scale"))
FP4 = {
    "nvfp4": ("nvfp4",), "nvfp4 weights": ("nvfp4", {_GROUP: None}, _NO_SCALES), "modelopt_nvfp4": ("modelopt_nvfp4",),
    "mxfp4": ("mxfp4", {_GROUP: _MX}), "mxfp4 weights": ("mxfp4",),
}  # fmt: skip
STEPS = ("nvfp4", "mxfp4", "ct_int8_dynamic", "ct_int8_static", "ct_fp8_dynamic", "modelopt_fp8", "fp8_block")


@pytest.fixture
def machine(request):
    """Arrays of the GPU, or of the emulated one and its kernels."""
    if request.config.getoption("--device") == "cuda":
        yield arrays.on("cuda")
        return
    with emulated_arrays() as (emulated, _):
        yield emulated


def rows(count: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, width)).astype(BF16)


def packed(name: str, settings=None, change=None) -> dict[str, QuantLinear]:
    found = linears(loaded(name, change, settings))
    assert all(isinstance(linear, QuantLinear) for linear in found.values())
    return found


@pytest.mark.skipif(compiler() is None, reason="emulation needs a C++ compiler")
@pytest.mark.parametrize("form", FP4)
def test_fp4_linears(machine, form):
    """Every linear of a layer: the product as on the host, the same bytes replayed for other rows."""
    for key, linear in packed(*FP4[form]).items():
        x, other = rows(5, linear.in_features), rows(5, linear.in_features, 1)
        there, given, kept = linear.mapped(machine.send), machine.send(x), Kept(machine, 8)

        def buffer(which, dtype, shape=None, kept=kept, width=linear.out_features):
            return kept(which, shape or (5, width), dtype)

        def step(there=there, given=given, buffer=buffer):
            return there.apply(given, buffer)

        with machine.queue():
            out, graphs = step(), machine.graphs()
            assert_nmse(np.array(machine.fetch(out)), linear.multiplied(x, x.dtype), 2.0**-15)
            for _ in range(2):
                graphs.run(key, step, [given])
            given[...] = machine.send(other)
            graphs.run(key, step, [given])
            replayed = np.array(machine.fetch(out))
            assert_bytes(replayed, machine.fetch(there.multiplied(machine.send(other), x.dtype)))
            assert_nmse(replayed, linear.multiplied(other, x.dtype), 2.0**-15)


@pytest.mark.skipif(compiler() is None, reason="emulation needs a C++ compiler")
def test_parts_that_share_nothing_are_multiplied_apart_there_too(machine):
    key = f"{LAYER}self_attn.k_proj.weight_global_scale"
    linear, x = packed("nvfp4", None, {key: tensors_of("nvfp4")[key] / 2})["qkv"], rows(3, 128)
    there, kept = linear.mapped(machine.send), Kept(machine, 8)
    with machine.queue():
        got = there.apply(machine.send(x), lambda which, dtype, shape=None: kept(which, shape or (3, 192), dtype))
        assert_nmse(machine.fetch(got), linear.multiplied(x, x.dtype), 2.0**-15)


@pytest.mark.parametrize("name", STEPS)
def test_steps_with_quantised_activations_are_captured(device, name):  # noqa: F811
    """Codes and scales of a step lie where the replay finds them: graphs change no token."""
    model = load_decoder(CHECKPOINTS / name, "bfloat16", 64, "packed")
    prompts, chosen = [[5, 9], [3], list(range(7))], SamplingParams(max_tokens=4, logprobs=2, ignore_eos=True)
    launched = Engine(model, num_blocks=32, block_size=8, device=device, graphs=False)
    replayed = Engine(model, num_blocks=32, block_size=8, device=device)
    assert replayed.generate(prompts, [chosen] * 3) == launched.generate(prompts, [chosen] * 3)
    assert replayed.runner.graphs.replays > 0


@pytest.mark.parametrize("name", sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json")))
def test_every_op_of_a_packed_linear_has_a_kernel(monkeypatch, name):
    """What the products of a checkpoint's linears call, one op after the other."""
    from vtlab.ops import dispatch

    called, host = set(), dispatch.providers.call
    monkeypatch.setattr(dispatch.providers, "call", lambda op, *more: called.add(op) or host(op, *more))
    for linear in linears(loaded(name)).values():
        linear.multiplied(rows(2, linear.in_features), np.dtype(BF16))
    assert called and all(providers.op_registered(op, "cuda") for op in called), called


@pytest.mark.parametrize("name", ["mxfp4", "awq", "nvfp4"])
def test_a_gpu_keeps_what_it_multiplies(name):
    """FP4 under rows of 16 bits is multiplied in bfloat16 alone; a host expands weights alone."""
    settings = copy.deepcopy(dict(parsed(name)))
    if name == "nvfp4":
        settings["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    config = read(settings, "config.json")
    slots = list(FAMILIES[config.family].slots(config))
    halves = [default_weights(config, slots, dtype, "cuda") for dtype in ("bfloat16", "float16")]
    assert halves == ["packed", "packed" if name == "awq" else "dequantized"]
    assert default_weights(config, slots, "bfloat16", "cpu") == "dequantized"


@pytest.mark.parametrize("form", ["nvfp4 weights", "mxfp4 weights", "mxfp4"])
def test_float16_is_refused_where_its_range_is_too_small(form):
    name, settings, change = (*FP4[form], None, None)[:3]
    with pytest.raises(ContractError, match="got float16, want bfloat16 for products of"):
        loaded(name, change, settings, dtype="float16")
