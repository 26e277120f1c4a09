"""Fused chains: bad declarations and bad calls are refused by name, and what is no row program says why."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab import ops
from vtlab.ops import fusion, nvfp4
from vtlab.ops.errors import ContractError
from vtlab.ops.fusion import COMPOSITE, INTERPRETER, NotRowwise, Param, Recipe, declare, step, trace
from vtlab.ops.numerics import MIRROR
from vtlab.ops.providers import ProviderError
from vtlab.ops.table import lookup

from .chain_cases import operands_of

BF16, F32 = "bfloat16", "float32"
OPERANDS = {"x": "... H", "weight": "H"}
RELU = step("relu", "out", x="y")
CACHES = dict.fromkeys(("key", "value", "key_cache", "value_cache"), "T H D")


def norm(to="y", **more):
    return step("rms_norm", to, **{"x": "x", "weight": "weight", **more})


def call(recipe, operands, *realisations):
    with ops.using(*realisations):
        return fusion.fused_chain(recipe, **operands)


@pytest.mark.parametrize(
    "fault, steps, more",
    [
        ("steps: got 0, want 1 to 8", (), {}),
        ("steps: got 9, want 1 to 8", (norm(), *[RELU] * 8), {}),
        ("operands: got 9, want 1 to 8", (norm(), RELU), {"operands": {f"x{i}": "H" for i in range(9)}}),
        ("step 1, rms_nrom: got an op that is not in the table, want rms_norm", (step("rms_nrom", "out"),), {}),
        ("step 1, rms_norm: got no weight, want a slot", (norm(weight=None), RELU), {}),
        ("step 1, rms_norm: got argument epsilon, want one of x", (norm(epsilon=1.0), RELU), {}),
        ("step 1, rms_norm: got x from 'z', want an operand or an earlier result: weight, x", (norm(x="z"), RELU), {}),
        ("step 2, relu: got x from 'out', want", (norm(), step("relu", "out", x="out")), {}),
        ("step 1, rms_norm: got 3 results, a b c, want those of the op: out, residual", (norm("a b c"),), {}),
        ("step 1, rms_norm: got rounding = 'ieee', want one of vt, vllm", (norm(rounding="ieee"), RELU), {}),
        ("step 1, rms_norm: got gemma = 1, want True or False", (norm(gemma=1), RELU), {}),
        ("step 1, rms_norm: got eps = '1', want a number or a Param", (norm(eps="1"), RELU), {}),
        ("step 1, rms_norm: got param eps, want one of none", (norm(eps=Param("eps")), RELU), {}),
        ("step 1, rms_norm: got y, which nothing reads", (norm(), step("relu", "out", x="x")), {}),
        ("operands: got bias, which no step reads", (norm(), RELU), {"operands": {**OPERANDS, "bias": "H"}}),
        ("returns: got x, want a result of a step: out, y", (norm(), RELU), {"returns": "out x"}),
        ("returns: got out out, want one or more slots, each once", (norm(), RELU), {"returns": "out out"}),
        ("params: got eps, which no step uses", (norm(), RELU), {"params": {"eps": 1e-6}}),
        ("dtypes: got bfloat16, want 2 dtypes", (norm(), RELU), {"dtypes": ("bfloat16",)}),
        ("fast, rms_norm: got y, want out", (norm(), RELU), {"fast": norm()}),
        ("step 1, reshape_and_cache: got an op that changes key_cache in place, want a function",
         (step("reshape_and_cache", "out", slot_mapping="slots", **{name: name for name in CACHES}),),
         {"operands": {**CACHES, "slots": "T"}}),
    ],
)  # fmt: skip
def test_a_bad_recipe_is_refused_when_it_is_declared(fault, steps, more):
    more = {"operands": OPERANDS, "returns": "out", **more}
    with pytest.raises(ContractError) as caught:
        Recipe("bad", steps=steps, **more)
    assert caught.value.op == "bad"
    said = f"{caught.value.argument}: got {caught.value.got}, want {caught.value.want}"
    assert said.startswith(fault), said


def test_a_step_that_names_too_few_results_is_refused_when_it_runs():
    """Whether rms_norm has one result or two hangs on the call."""
    operands = {**OPERANDS, "residual": "... H"}
    recipe = Recipe(
        "one_of_two", operands, (step("rms_norm", "out", x="x", weight="weight", residual="residual"),), "out"
    )
    x = np.ones((2, 8), np.float32)
    with pytest.raises(ContractError, match=r"one_of_two\(step 1, rms_norm\): got 2 results, want out"):
        fusion.fused_chain(recipe, x=x, weight=x[0].copy(), residual=x)


X, W = np.ones((2, 8), np.float32), np.ones(8, np.float32)
GOOD = {"x": X, "weight": W, "residual": np.ones((2, 8), np.float32)}


@pytest.mark.parametrize(
    "change, fault",
    [
        ({"residual": None}, r"norm\(residual\): got nothing, want an array: every operand of a chain is bound"),
        ({"residual": 1.0}, r"norm\(residual\): got float, want an array"),
        ({"bias": W}, r"norm\(bias\): got an unknown operand, want one of x, weight, residual, eps"),
        ({"weight": np.ones(7, np.float32)}, r"fused_add_rms_norm\(weight\): got shape \(7,\), want \(H,\) with H = 8"),
        ({"residual": W}, r"fused_add_rms_norm\(residual\): got shape \(8,\)"),
        ({"x": X.astype(np.float64)}, r"rms_norm\(x\): got dtype float64"),
        ({"x": np.ones((2, 16), np.float32)[:, ::2]}, r"rms_norm\(x\): got strides"),
        ({"eps": None}, r"norm\(eps\): got None, want a number"),
        ({"eps": -1.0}, r"rms_norm\(eps\): got -1.0, want >= 0"),
        ({"out": X}, r"norm\(out\): got memory shared with x"),
        ({"out": np.zeros((2, 8), np.float32)}, r"norm\(out\): got 1 arrays, want 2"),
        ({"out": (np.zeros((2, 8)), np.zeros((2, 8)))}, r"norm\(out\): got float64"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", [COMPOSITE, INTERPRETER])
def test_a_bad_call_is_refused(change, fault, way):
    with pytest.raises(ContractError, match=fault):
        call("fused_add_rms_norm", {**GOOD, **change}, way, "oracle")


def test_names_of_recipes():
    with pytest.raises(ContractError, match=r"fused_chain\(recipe\): got 'fused_rms', want one of attn_qk_norm_rope, "):
        fusion.fused_chain("fused_rms", x=X)
    with pytest.raises(ContractError, match="a second recipe of this name"):
        declare(Recipe("bias_relu", {"x": "... H"}, (step("relu", "out", x="x"),), "out"))
    with pytest.raises(ContractError, match="want an identifier"):
        Recipe("bias relu", {"x": "... H"}, (step("relu", "out", x="x"),), "out")


# Row programs: what is none says why.


def _traced(name: str, *steps, operands=None, params=None, dtypes=(F32,)):
    recipe = Recipe(name, operands or {"x": "... H"}, steps, "out", params or {})
    return trace(recipe, dtypes)


def _e2m1(nx, x):
    return nx.store(nx.load(x), ml_dtypes.float4_e2m1fn, nan=6.0).view(np.uint8)


def _with_body(body):
    """A chain of one op, while it has another body."""
    with lookup("relu").replaced(body):
        return _traced("other_body", step("relu", "out", x="x"))


@pytest.mark.parametrize(
    "body, why",
    [
        (lambda nx, x: nx.store(nx.mul(nx.load(x), 1 / int(x.shape[-1])), x.dtype), "a size or a number of the call"),
        (lambda nx, x: nx.store(nx.mul(nx.load(x), x.shape[0]), x.dtype), "the number of rows in a computation"),
        (lambda nx, x: nx.store(nx.sum(nx.load(x), keepdims=True), x.dtype), "a sum that is not in the order"),
        (lambda nx, x: nx.store(nx.max(nx.load(x), axis=0, keepdims=True), x.dtype), "a maximum that is not along"),
        (lambda nx, x: nx.store(nx.load(x)[..., ::2], x.dtype), "a part .* of a computed array"),
        (lambda nx, x: x[:, :4], "a part .* of an array"),
        (lambda nx, x: np.flip(x), "np.flip of an array"),
        (lambda nx, x: np.exp(x), "np.exp of an array"),
        (lambda nx, x: np.asarray(x), "NumPy looks at the values"),
        (lambda nx, x: x, "out is no row"),
        (lambda nx, x: nx.store(nx.load(x), x.dtype, saturate=True), "a store of Value under"),
        (lambda nx, x: nx.store(nx.load(x), ml_dtypes.float8_e4m3fn), "without a code for NaN"),
        (lambda nx, x: nx.store(nx.matmul(nx.load(x), x), x.dtype), "has no attribute 'matmul'"),
        (lambda nx, x: nx.store(nx.load(x).reshape(3, -1), x.dtype), "reshaped"),
        (lambda nx, x: _e2m1(nx, x), "out of float4_e2m1fn, one to a byte"),
        (lambda nx, x: nvfp4.positive_zeros(_e2m1(nx, x)), "out of float4_e2m1fn, one to a byte"),
        (lambda nx, x: nvfp4.pack(_e2m1(nx, x)), "zeros with a sign among them, two to a byte"),
        (lambda nx, x: nvfp4.positive_zeros(nx.store(nx.load(x), x.dtype)), "zeros of float32"),
        (lambda nx, x: nvfp4.tile(nx.store(nx.load(x), ml_dtypes.float8_e4m3fn).view(np.uint8)), "tiles of float8"),
    ],
)  # fmt: skip
def test_what_is_no_row_program_says_why(body, why):
    with pytest.raises(NotRowwise, match=f"other_body: .*{why}"):
        _with_body(body)


def test_a_number_of_the_call_that_the_oracle_folds_is_noticed():
    scaled = step("mul_scalar", "out", x="x", scale=Param("scale"))
    with pytest.raises(NotRowwise, match="a number of the call became a constant"):
        _traced("scaled", scaled, params={"scale": None})
    assert "0x1.8000000000000p+1" in str(_traced("tripled", step("mul_scalar", "out", x="x", scale=3.0)))


@pytest.mark.parametrize("name", ["attn_qk_norm_rope", "attn_qk_norm_rope_gate"])
def test_chains_over_other_operands_are_none(name):
    recipe = fusion.lookup(name)
    with pytest.raises(NotRowwise, match="neither rows of one width, columns nor numbers"):
        trace(recipe, (BF16,) * len(recipe.operands))


def test_a_row_that_holds_no_whole_groups_is_left_to_the_composite():
    recipe = fusion.lookup("silu_and_mul_quant_per_group")
    operands = operands_of(recipe, (BF16,), {"H": 136}, (2,))
    with pytest.raises(ProviderError, match="interpreter, which declined"):
        call(recipe, operands, INTERPRETER)
    assert fusion.fused_chain(recipe, **operands)[1].shape == (2, 2)


def test_vllms_own_form_of_the_fp4_quantiser_is_none():
    """It leaves a sign on what it rounds to zero, for which generated kernels have no code."""
    quant = step("scaled_fp4_quant", "out scale", x="x", input_global_scale="g", rounding="vllm_native")
    with pytest.raises(NotRowwise, match="zeros with a sign among them"):
        _traced("fp4_native", quant, operands={"x": "... H", "g": "1"}, dtypes=(F32, F32))


@pytest.mark.parametrize("name", ["silu_mul_fp4_quant", "silu_mul_fp4_quant_swizzled"])
@pytest.mark.parametrize("way", [COMPOSITE, INTERPRETER])
def test_a_row_of_no_whole_blocks_is_refused(name, way):
    recipe = fusion.lookup(name)
    with pytest.raises(ContractError, match=r"scaled_fp4_quant\(x\): got K = 40, want a multiple of 16"):
        call(recipe, operands_of(recipe, recipe.dtypes[0].split(), {"H": 40}, (2,)), way, "oracle")


def test_minus_zero_is_a_constant_of_its_own():
    body = lambda nx, x: nx.store(nx.where(nx.load(x) > 0.0, -0.0, 0.0), x.dtype)
    with lookup("relu").replaced(body):
        program = _traced("zeros", step("relu", "out", x="x"))
    (out,) = program.evaluate(MIRROR, {"x": np.array([[1.0, -1.0]], np.float32)}, {})
    assert np.signbit(out).tolist() == [[True, False]]
