"""Generated kernels of fused chains: bytes, refusals, declines, sources; on the GPU, or emulated."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab.device import source
from vtlab.device.fusion import GENERATED, emit
from vtlab.device.fusion import text_of as generated_text
from vtlab.ops import fusion, providers
from vtlab.ops.errors import ContractError
from vtlab.ops.fusion import COMPOSITE, NotRowwise, Param, Recipe, compose, declare, step, trace
from vtlab.ops.numerics import round_to

from .chain_cases import call, chain_cases, check_chain, counted, generated_chains, mirror_of, operands_of
from .compare import assert_bytes
from .device_run import Cuda, Emulated, tupled
from .emulation import compiler, kernels

CASES = list(chain_cases())
BF16 = ("bfloat16",)


def sent(device, recipe, dtypes, rows=3, width=128, **axes):
    host = operands_of(recipe, dtypes, {"H": width, **axes}, (rows,))
    return host, {name: device.send(value) for name, value in host.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_generated_kernels_give_the_bytes_of_the_composite(case, device, record_case):
    check_chain(device, case)
    record_case(str(case), 0.0)


@pytest.mark.skipif(compiler() is None, reason="emulation needs a C++ compiler")
def test_every_generated_kernel_runs():
    device = Emulated()
    for case in CASES:
        if not case.special:
            with counted(case):
                call(device, case.recipe, {name: device.send(value) for name, value in case.arguments().items()})
    assert set(device.runtime.launched) == {name for family in generated_chains() for name in kernels(family)}


@pytest.mark.parametrize("name", sorted(fusion.recipes()))
def test_the_composite_of_kernels_gives_the_generated_bytes(name, device):
    """Three ways of a chain on one device: its kernel, the standalone ops' kernels, one bespoke op if there is one."""
    recipe = fusion.lookup(name)
    if name not in generated_chains():
        pytest.skip("no row program")
    host, arguments = sent(device, recipe, recipe.dtypes[0].split(), width=256)
    want = mirror_of(recipe, host)
    ways = {GENERATED: lambda: tupled(call(device, recipe, dict(arguments)))}
    for way, steps in ((COMPOSITE, recipe.steps), ("one op", (recipe.fast,))):
        if all(one is not None and providers.op_registered(one.op, "cuda") for one in steps):
            ways[way] = lambda steps=steps: compose(recipe, steps, device.call, arguments, dict(recipe.params))
    for way, run in ways.items():
        for got, expected in zip(run(), want, strict=True):
            assert_bytes(device.fetch(got), expected, f"{name} by {way}")


@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("gap", [0, 1, 8])
def test_strided_and_misaligned_rows(device, shift, gap):
    recipe = fusion.lookup("rms_norm_quant_fp8")
    host, arguments = sent(device, recipe, recipe.dtypes[0].split(), rows=5, width=64 + shift + gap)
    for name in ("x", "residual"):
        host[name] = host[name][:, shift : shift + 64].copy()
        arguments[name] = arguments[name][:, shift : shift + 64]
    host["weight"], arguments["weight"] = host["weight"][shift : shift + 64], arguments["weight"][shift : shift + 64]
    for got, expected in zip(call(device, recipe, arguments), mirror_of(recipe, host), strict=True):
        assert_bytes(device.fetch(got), expected)


@pytest.mark.parametrize(
    "name, dtypes, width",
    [("fused_add_rms_norm", ("float16",) * 3, 64), ("fused_add_rms_norm_quant_per_group", BF16 * 3, 136),
     ("fused_add_rms_norm_quant_per_group", BF16 * 3, 8320), ("rms_norm_quant_per_token", BF16 * 2, 0)],
)  # fmt: skip
def test_what_no_kernel_suits_is_left_to_the_composite(name, dtypes, width, device):
    recipe = fusion.lookup(name)
    _, arguments = sent(device, recipe, dtypes, width=width)
    with pytest.raises(providers.ProviderError, match="generated, which declined the call"):
        call(device, recipe, arguments)


@pytest.mark.parametrize(
    "change, fault",
    [
        ({"weight": np.zeros(64, np.float32)}, r"norm\(weight\): got shape \(64,\), want \(H,\) with H = 128"),
        ({"x": np.zeros((3, 256), np.float32)[:, ::2]}, r"rms_norm\(x\): got strides \(1024, 8\)"),
        ({"eps": -1.0}, r"rms_norm\(eps\): got -1.0, want >= 0"),
        ({"out": (np.zeros((3, 128), np.float32),)}, r"fused_add_rms_norm\(out\): got 1 arrays, want 2"),
        ({"out": (np.zeros((3, 128)), np.zeros((3, 128)))}, r"fused_add_rms_norm\(out\): got float64"),
    ],
)  # fmt: skip
def test_bad_calls_are_refused_before_the_launch(change, fault, device):
    if isinstance(device, Cuda):
        pytest.skip("host arrays")
    recipe = fusion.lookup("fused_add_rms_norm")
    _, arguments = sent(device, recipe, ("float32",) * 3)
    launched = list(device.runtime.launched)
    with pytest.raises(ContractError, match=fault):
        call(device, recipe, arguments | change)
    assert device.runtime.launched == launched


def test_a_bad_number_is_refused_after_a_good_one(device):
    recipe = fusion.lookup("fused_add_rms_norm")
    _, arguments = sent(device, recipe, BF16 * 3)
    call(device, recipe, arguments | {"eps": 1e-5})
    with pytest.raises(ContractError, match=r"rms_norm\(eps\): got -1e-05, want >= 0"):
        call(device, recipe, arguments | {"eps": -1e-5})


def test_a_result_may_not_share_memory_with_an_operand(device):
    recipe = fusion.lookup("bias_relu")
    _, arguments = sent(device, recipe, BF16 * 2)
    with pytest.raises(ContractError, match="memory shared with another"):
        call(device, recipe, arguments | {"out": arguments["x"]})


def _norm_then(name: str, *steps) -> Recipe:
    first = step("rms_norm", "y", x="x", weight="weight", eps=Param("eps"))
    operands = {"x": "... H", "weight": "H"}
    return Recipe(name, operands, (first, *steps), "out", {"eps": 1e-6}, dtypes=("bfloat16 float32",))


def test_a_declaration_is_all_that_a_new_kernel_takes(device):
    """A chain that nobody has written: normalised, squashed, its negative part cut, of any leading shape."""
    capped = step("soft_cap", "z", x="y", cap=0.5), step("relu", "out", x="z")
    recipe = declare(_norm_then("norm_then_cap_then_relu", *capped))
    assert recipe.name not in source.families()  # only the catalog is built ahead of time
    x, weight = round_to(np.linspace(-3, 3, 2 * 3 * 72).reshape(2, 3, 72), "bfloat16"), np.ones(72, np.float32)
    (want,) = mirror_of(recipe, {"x": x, "weight": weight})
    got = call(device, recipe, {"x": device.send(x), "weight": device.send(weight)})
    assert_bytes(device.fetch(got), want)


def test_sources_follow_from_recipes():
    """The same text every time; another option of a step, another text."""
    recipe = fusion.lookup("fused_add_rms_norm")
    text = generated_text(recipe)
    assert text == generated_text(recipe) == source.text_of(recipe.name)
    assert "n14[t][j] + 1.0f" in text and "+ 1.0f" not in generated_text(fusion.lookup("fused_add_rms_norm_std"))
    assert set(generated_chains()) <= set(source.families())
    assert {"chain.cuh", f"{recipe.name}.cu", "vt_math.cuh"} <= set(source.texts_of(recipe.name))


def test_a_kernel_file_keeps_its_name():
    with pytest.raises(ContractError, match=r"'norm', want a name other than that of cuda/norm\.cu"):
        source.generate("norm", lambda: "", ahead=False)


def test_what_no_kernel_can_hold_is_said():
    recipe = _norm_then("groups_of_4", step("per_token_group_quant_fp8", "out scale", x="y", group_size=4))
    with pytest.raises(NotRowwise, match="groups_of_4: groups of 4, which are no neighbouring lanes"):
        emit.source(recipe, {("bfloat16", "float32"): trace(recipe, ("bfloat16", "float32"))})


@pytest.mark.parametrize(
    "value, text",
    [(1.0, "1.0f"), (0.044715, "0.044715f"), (1e-10, "1e-10f"), (-0.0, "-0.0f"), (1 / 448, "0.002232143f"),
     (float("inf"), "vt_float((int)0x7f800000u)"), (2.0**127, "1.7014118e+38f")],
)  # fmt: skip
def test_constants_are_printed_exactly(value, text):
    assert emit.literal(value) == text
    if np.isfinite(value):
        assert np.float32(text.removesuffix("f")) == np.float32(value)
