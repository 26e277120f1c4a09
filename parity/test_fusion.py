"""Fused chains on the host: the catalog on every realisation and on another backend, the walker, which one serves."""

from __future__ import annotations

import inspect

import ml_dtypes
import numpy as np
import pytest

from vtlab import ops
from vtlab.ops import fusion, providers
from vtlab.ops.errors import ContractError
from vtlab.ops.fusion import COMPOSITE, INTERPRETER, Recipe, compose, declare, slot_of, step, trace
from vtlab.ops.fusion import walk as walking
from vtlab.ops.numerics import MIRROR, TRUTH, round_to
from vtlab.ops.providers import Device, OpProvider, ProviderError, Registry
from vtlab.ops.table import lookup

from .chain_cases import example_of, operands_of
from .compare import ParityError, assert_bytes

CATALOG = fusion.catalog()
ROWWISE = [recipe for recipe in CATALOG if recipe.dtypes]
BF16, F32 = "bfloat16", "float32"


def in_order(recipe, nx):
    """The recipe's steps through the mirrors or truths of its ops."""
    return lambda op, arguments: lookup(op).evaluate(nx, **arguments)


def same(recipe, got, want, what: str) -> None:
    for slot, one, other in zip(recipe.returns, got, want, strict=True):
        assert_bytes(one, other, f"{recipe.name} {what}, {slot}")


def tupled(results) -> tuple:
    return results if isinstance(results, tuple) else (results,)


# Every recipe, and what a new one needs: nothing but its declaration.


def test_the_catalog_is_counted():
    """Row page: nine recipes."""
    assert len(CATALOG) == 28


@pytest.mark.parametrize("recipe", CATALOG, ids=str)
def test_every_realisation_gives_the_bytes_of_the_composite(recipe):
    operands = example_of(recipe)
    want = tupled(call(recipe, operands, COMPOSITE, "oracle"))
    served = {COMPOSITE}
    for name in names_of(recipe) - {COMPOSITE}:
        try:
            got = call(recipe, operands, name, "oracle")
        except ProviderError as error:
            assert "declined the call" in str(error) and recipe not in ROWWISE
        else:
            same(recipe, tupled(got), want, f"by {name}")
            served.add(name)
    assert served == {COMPOSITE} | ({INTERPRETER} if recipe in ROWWISE else set()) | (
        {recipe.fast.op} if recipe.fast else set()
    )


def call(recipe, operands, *realisations, **more):
    with ops.using(*realisations):
        return fusion.fused_chain(recipe, **operands, **more)


def names_of(recipe, device="cpu") -> set[str]:
    count = providers.op_provider_count(slot_of(recipe), device)
    return {providers.op_provider_name_at(slot_of(recipe), device, i) for i in range(count)}


class Backend:
    """A second device that has standalone ops and has never heard of recipes."""

    def __init__(self, *lacking: str):
        self.registry, self.called = Registry(environ={}), []
        for recipe in CATALOG:
            for one in recipe.steps:
                if one.op not in lacking and not self.registry.op_provider_count(one.op, Device.METAL):
                    run = lambda op=one.op, **arguments: lookup(op).evaluate(MIRROR, **arguments)
                    self.registry.register_op_provider(one.op, Device.METAL, OpProvider("metal", run))

    def __call__(self, op: str, arguments: dict):
        result = self.registry.call(op, Device.METAL, arguments)
        self.called.append(op)
        return result


@pytest.mark.parametrize("recipe", CATALOG, ids=str)
def test_a_backend_of_standalone_ops_has_every_recipe(recipe):
    backend, operands = Backend(), example_of(recipe)
    got = compose(recipe, recipe.steps, backend, operands, dict(recipe.params))
    same(recipe, got, compose(recipe, recipe.steps, in_order(recipe, MIRROR), operands, dict(recipe.params)), "")
    assert backend.called == [one.op for one in recipe.steps]


@pytest.mark.parametrize("recipe", [r for r in CATALOG if r.steps[-1].op == "quant_fp8_static"], ids=str)
def test_a_backend_without_the_last_op_says_so_after_the_others(recipe):
    backend = Backend("quant_fp8_static")
    with pytest.raises(ProviderError, match="no kernel for op quant_fp8_static on device metal"):
        compose(recipe, recipe.steps, backend, example_of(recipe), dict(recipe.params))
    assert backend.called == [one.op for one in recipe.steps[:-1]]


@pytest.mark.parametrize("recipe", ROWWISE, ids=str)
@pytest.mark.parametrize("nx", [MIRROR, TRUTH], ids=str)
def test_row_programs_are_the_composite(recipe, nx):
    """The program traced from the oracle's bodies, in either arithmetic, for all of the recipe's dtypes."""
    for dtypes in map(str.split, recipe.dtypes):
        program = trace(recipe, tuple(dtypes))
        for rows, width in ((3, 128), (2, 2304), (1, 40)):
            if program.group and width % program.group:
                continue
            operands = operands_of(recipe, dtypes, {"H": width}, (rows,), special=width == 128)
            want = compose(recipe, recipe.steps, in_order(recipe, nx), operands, dict(recipe.params))
            same(recipe, program.evaluate(nx, operands, recipe.params), want, f"{dtypes} {rows}x{width}")


# Against sequences that share nothing with the walker.


def _quantised(y, scale):
    return ops.quant_fp8_static(y, scale)


EXPLICIT = {
    "fused_add_rms_norm": lambda x, weight, residual: ops.rms_norm(x, weight, residual=residual, gemma=True),
    "fused_add_rms_norm_std": lambda x, weight, residual: ops.rms_norm(x, weight, residual=residual),
    "silu_mul_quant_fp8": lambda gate, up, scale: (_quantised(ops.moe_silu_mul(gate, up), scale),),
    "sigmoid_gate_quant_fp8": lambda attn, gate, scale: (_quantised(ops.sigmoid_gate_bf16(attn, gate), scale),),
    "silu_mul_fp4_quant": lambda gate, up, input_global_scale: ops.scaled_fp4_quant(
        ops.moe_silu_mul(gate, up), input_global_scale, is_sf_swizzled_layout=False
    ),
    "sigmoid_gate_fp4_quant_swizzled": lambda attn, gate, input_global_scale: ops.scaled_fp4_quant(
        ops.sigmoid_gate_bf16(attn, gate), input_global_scale
    ),
    "bias_relu": lambda x, bias: (np.where(ops.add(x, bias) > 0, ops.add(x, bias), x.dtype.type(0)),),
    "rms_norm_gated_quant_fp8": lambda x, gate, weight, scale: (
        _quantised(ops.rms_norm_gated(x, gate, weight, out_dtype=BF16), scale),
    ),
    "attn_qk_norm_rope": lambda q, q_norm, k, k_norm, positions, cos_sin_cache: ops.rope_from_cache(
        ops.rms_norm(q, q_norm), ops.rms_norm(k, k_norm), positions, cos_sin_cache
    ),
    "attn_qk_norm_rope_gate": ops.attn_qk_norm_rope_gate,
}


def rms_norm_quant_fp8(x, weight, residual, scale):
    y, residual = ops.rms_norm(x, weight, residual=residual, gemma=True)
    return _quantised(y, scale), residual


def sandwich_norm(x, post_weight, residual, pre_weight):
    y = ops.rms_norm(x, post_weight, gemma=True)
    residual = (residual.astype(np.float64) + y.astype(np.float64)).astype(np.float32)  # exact: both are bfloat16
    residual = round_to(residual, ml_dtypes.bfloat16)
    return ops.rms_norm(residual, pre_weight, gemma=True), residual


def sandwich_norm_vllm(x, post_weight, residual, pre_weight):
    y = ops.rms_norm(x, post_weight, rounding="vllm")
    return ops.rms_norm(y, pre_weight, residual=residual, rounding="vllm")


EXPLICIT |= {
    "rms_norm_quant_fp8": rms_norm_quant_fp8, "sandwich_norm": sandwich_norm, "sandwich_norm_vllm": sandwich_norm_vllm,
    "fused_add_rms_norm_vllm": lambda x, weight, residual: ops.rms_norm(
        x, weight, residual=residual, rounding="vllm"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, dtypes", [("fused_add_rms_norm_vllm", (BF16, F32, BF16)), ("sandwich_norm_vllm", (BF16, F32, BF16, F32))]
)
def test_chains_in_vllms_rounding_normalise_the_unrounded_sum_under_wide_weights(name, dtypes):
    """Gemma in bfloat16, with float32(1 + w): neither vt's rounding nor that of weights as narrow as the rows."""
    recipe = fusion.lookup(name)
    operands = operands_of(recipe, dtypes, {"H": 256}, (40,))
    got = call(recipe, operands, COMPOSITE, "oracle")
    same(recipe, got, EXPLICIT[name](**operands), "in vLLM's rounding")
    narrow = {key: value.astype(ml_dtypes.bfloat16) for key, value in operands.items()}
    with pytest.raises(ParityError):
        same(recipe, call(recipe, narrow, COMPOSITE, "oracle"), got, "with narrow weights")


def check_sequence(recipe: Recipe, name: str) -> None:
    operands = example_of(fusion.lookup(name))
    got = compose(recipe, recipe.steps, in_order(recipe, TRUTH), operands, dict(recipe.params))
    same(recipe, got, tupled(EXPLICIT[name](**operands)), "against calls in order")


@pytest.mark.parametrize("name", EXPLICIT)
def test_a_recipe_is_its_ops_in_order(name):
    check_sequence(fusion.lookup(name), name)


def _changed(name: str, number: int, **arguments) -> Recipe:
    """The recipe with other arguments in one step."""
    recipe = fusion.lookup(name)
    steps = list(recipe.steps)
    steps[number] = fusion.Step(steps[number].op, steps[number].to, {**steps[number].arguments, **arguments})
    return Recipe(name, recipe.operands, tuple(steps), " ".join(recipe.returns), recipe.params)


@pytest.mark.mutation
@pytest.mark.parametrize(
    "name, number, arguments",
    [("fused_add_rms_norm", 0, {"gemma": False}), ("fused_add_rms_norm_std", 0, {"gemma": True}),
     ("silu_mul_fp4_quant", 1, {"is_sf_swizzled_layout": True}),
     ("sigmoid_gate_fp4_quant_swizzled", 1, {"is_sf_swizzled_layout": False}),
     ("rms_norm_gated_quant_fp8", 0, {"sigmoid_gate": True}), ("sandwich_norm", 1, {"weight": "post_weight"}),
     ("sandwich_norm", 1, {"x": "x"}), ("attn_qk_norm_rope", 1, {"weight": "q_norm"}),
     ("attn_qk_norm_rope", 2, {"is_neox": False}), ("rms_norm_quant_fp8", 1, {"x": "residual"})],
)  # fmt: skip
def test_another_recipe_is_noticed(name, number, arguments):
    try:
        recipe = _changed(name, number, **arguments)
    except ContractError:  # the wrong is refused when it is declared: an operand that nothing reads any more
        return
    with pytest.raises(ParityError):
        check_sequence(recipe, name)


WALKER = {
    "operands in place of results": ("slots[places[name]] if", "operands.get(places[name], slots[places[name]]) if"),
    "results in another order": ("zip(one.to, results)", "zip(one.to, results[::-1])"),
    "the first step alone": ("in enumerate(steps, 1)", "in enumerate(steps[:1], 1)"),
}


@pytest.mark.mutation
@pytest.mark.parametrize("wrong", WALKER)
def test_another_walker_is_noticed(wrong, monkeypatch):
    old, new = WALKER[wrong]
    text = inspect.getsource(walking.walk)
    assert text.count(old) == 1
    scope: dict[str, object] = {}
    exec("from __future__ import annotations\n" + text.replace(old, new), vars(walking), scope)
    monkeypatch.setattr(walking, "walk", scope["walk"])
    with pytest.raises((ParityError, ContractError, KeyError)):
        for name in EXPLICIT:
            check_sequence(fusion.lookup(name), name)


@pytest.mark.parametrize("T, H", [(1, 64), (3, 128), (4, 256), (8, 2048)])
@pytest.mark.parametrize(
    "x, weight, residual", [(BF16, BF16, BF16), (F32, F32, F32), (BF16, BF16, F32), (F32, BF16, F32)]
)
def test_add_and_norm_in_all_dtypes(T, H, x, weight, residual):
    recipe = fusion.lookup("fused_add_rms_norm")
    operands = operands_of(recipe, (x, weight, residual), {"H": H}, (T,))
    with ops.using("oracle"):
        want = ops.rms_norm(operands["x"], operands["weight"], residual=operands["residual"], gemma=True)
    for way in (COMPOSITE, INTERPRETER):
        same(recipe, call(recipe, operands, way, "oracle"), want, way)
    assert not np.array_equal(want[1], operands["residual"])
    with pytest.raises(ParityError):
        same(recipe, fusion.fused_chain("fused_add_rms_norm_std", **operands), want, "without Gemma's one")


# Which realisation serves.


def last_served(recipe) -> str | None:
    return providers.op_provider_stats(slot_of(recipe), "cpu").last_selected


def test_the_best_realisation_serves_and_can_be_taken_out():
    """A bespoke op first, the composite where it is switched off, from one call to the next."""
    recipe, calls = fusion.lookup("rms_norm_quant_fp8"), []
    operands = example_of(recipe)
    spy = lambda **arguments: (
        calls.append(1) or rms_norm_quant_fp8(**{name: arguments[name] for name in recipe.operands})
    )
    assert providers.register_op_provider(slot_of(recipe), "cpu", OpProvider("spy", spy, 30))
    try:
        fusion.fused_chain(recipe, **operands)
        assert (len(calls), last_served(recipe)) == (1, "spy")
        providers.disable_op_provider("spy")
        fusion.fused_chain(recipe, **operands)
        assert (len(calls), last_served(recipe)) == (1, "rms_norm_quant_fp8")
        providers.disable_op_provider("rms_norm_quant_fp8")
        fusion.fused_chain(recipe, **operands)
        assert (len(calls), last_served(recipe)) == (1, COMPOSITE)
        providers.enable_op_provider("spy")
        fusion.fused_chain(recipe, **operands)
        assert (len(calls), last_served(recipe)) == (2, "spy")
    finally:
        providers.enable_op_provider("rms_norm_quant_fp8")
        providers.disable_op_provider("spy")


def test_a_fast_op_that_is_not_in_the_table_serves_nowhere():
    relu = step("relu", "out", x="x")
    recipe = Recipe("relu_alone", {"x": "... H"}, (relu,), "out", fast=step("relu_in_one_go", "out", x="x"))
    x = np.array([[-1.0, 2.0]], np.float32)
    assert_bytes(fusion.fused_chain(recipe, x=x), np.array([[0.0, 2.0]], np.float32))
    assert last_served(recipe) == COMPOSITE


def test_a_tier_realises_recipes_declared_before_and_after():
    seen = []
    fusion.realise("xpu", lambda recipe: seen.append(recipe.name))
    try:
        assert set(fusion.recipes()) == set(seen)
        declare(Recipe("relu_later", {"x": "... H"}, (step("relu", "out", x="x"),), "out"))
        assert seen[-1] == "relu_later"
    finally:
        fusion.binding._tiers.pop("xpu")


def test_out_is_filled_and_returned():
    recipe = fusion.lookup("rms_norm_quant_fp8")
    operands = example_of(recipe)
    want = fusion.fused_chain(recipe, **operands)
    for way in (COMPOSITE, INTERPRETER, recipe.fast.op):
        out = tuple(np.zeros_like(one) for one in want)
        assert call(recipe, operands, way, "oracle", out=out) is out
        same(recipe, out, want, f"into out by {way}")


@pytest.mark.parametrize("name", ["fused_add_rms_norm", "bias_relu", "silu_mul_quant_fp8"])
def test_no_rows(name):
    recipe = fusion.lookup(name)
    for result in tupled(fusion.fused_chain(recipe, **operands_of(recipe, recipe.dtypes[0].split(), {"H": 64}, (0,)))):
        assert result.shape == (0, 64)
