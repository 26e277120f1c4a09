"""Sums, scalings, casts and the embedding gather against scalar loops."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import ops, oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.table import lookup

from .compare import assert_bytes
from .goldens import op_cases
from .harness import case, checks, mutations
from .scalar import draw, floats, rounded, stored

F32 = np.float32
QUICK = settings(max_examples=20, deadline=None, derandomize=True)
KINDS = ("float32", "bfloat16", "float16")
RUNS = (oracle.add, oracle.add.mirror)


@checks("add", cases=[case(a=a, b=b, bias=bias) for a in KINDS for b in KINDS for bias in (False, True)])
def test_add_against_exact_fractions(case):
    a = draw((3, 4, 17), case.a, 1)
    b = draw((17,) if case.bias else (3, 4, 17), case.b, 2, scale=2.0**-9)
    other = np.broadcast_to(b, a.shape)
    want = [float(Fraction(u) + Fraction(v)) for u, v in zip(floats(a.reshape(-1)), floats(other.reshape(-1)))]
    assert_bytes(oracle.add(a, b), stored(want, a))
    assert_bytes(oracle.add.mirror(a, b), stored([rounded(v, "float32") for v in want], a))


@checks("add")
def test_add_rounds_once_where_float32_is_in_the_middle():
    """1 + 2^-8 is a midpoint of bfloat16: the float32 sum drops the 2^-40 that decides, the truth keeps it."""
    a, b = F32([1 + 2.0**-8]).astype(np.float32), F32([2.0**-40])
    one = draw((1,), "bfloat16", 0)
    one[0] = 1
    half = one.copy()
    half[0] = 2.0**-8
    assert_bytes(oracle.add(one, half), one)
    tiny = F32([2.0**-8 + 2.0**-31])
    assert float(oracle.add(one, tiny)[0]) == 1 + 2.0**-7
    assert float(oracle.add.mirror(one, tiny)[0]) == 1
    assert_bytes(oracle.add(a, b), a)


@checks("add")
def test_add_of_special_values():
    a, b = F32([np.inf, np.inf, np.nan, 0.0, -0.0, 3e38]), F32([1, -np.inf, 0, -0.0, -0.0, 3e38])
    for run in RUNS:
        out = run(a, b)
        assert np.isnan(out[[1, 2]]).all()
        assert_bytes(out[[0, 3, 4, 5]], F32([np.inf, 0.0, -0.0, np.inf]))
    assert oracle.add(np.zeros((0, 4), F32), np.zeros(4, F32)).shape == (0, 4)


@checks("add")
@QUICK
@given(st.integers(0, 10_000), st.sampled_from(KINDS))
def test_add_commutes_and_a_bias_is_a_repeated_row(seed, kind):
    a, b = draw((3, 5), kind, seed), draw((3, 5), kind, seed + 1)
    for run in RUNS:
        assert_bytes(run(a, b), run(b, a))
        assert_bytes(run(a, b[0]), run(a, np.ascontiguousarray(np.broadcast_to(b[0], a.shape))))


@checks(
    "mul_scalar", cases=[case(kind=kind, scale=s) for kind in KINDS for s in (math.sqrt(1152), 0.1, -3.0, 0.0, 2**-30)]
)
def test_mul_scalar_against_exact_fractions(case):
    x = draw((4, 19), case.kind, 3)
    factor = Fraction(rounded(case.scale, "float32"))
    want = [float(Fraction(v) * factor) if factor else v * 0.0 for v in floats(x.reshape(-1))]
    assert_bytes(oracle.mul_scalar(x, case.scale), stored(want, x))
    assert_bytes(oracle.mul_scalar.mirror(x, case.scale), stored([rounded(v, "float32") for v in want], x))


@checks("mul_scalar")
def test_mul_scalar_takes_the_scale_through_float32():
    x = F32([3, -np.inf, np.nan, 1])
    out = oracle.mul_scalar(x, 1 + 2.0**-30)
    assert out[0] == 3 and out[1] == -np.inf and np.isnan(out[2])
    assert oracle.mul_scalar(F32([2.0**-20]), 1e39)[0] == np.inf
    gemma = oracle.mul_scalar(draw((2, 8), "bfloat16", 4), float(rounded(math.sqrt(3072), "bfloat16")))
    assert_bytes(gemma, stored([55.5 * v for v in floats(draw((2, 8), "bfloat16", 4).reshape(-1))], gemma))


@checks("mul_col_vec_f32")
def test_mul_col_vec_f32_against_exact_fractions():
    wide, col = draw((5, 40), "float32", 5), draw((9,), "float32", 6)
    x = wide[:, 3:12]
    x[0, 0], x[1, 1], col[2] = np.inf, np.nan, 1e-42
    before = wide.copy()
    for run in (oracle.mul_col_vec_f32, oracle.mul_col_vec_f32.mirror):
        out = run(x, col)
        for m in range(5):
            for n in range(9):
                if math.isfinite(x[m, n]):
                    want = rounded(float(Fraction(float(x[m, n])) * Fraction(float(col[n]))), "float32")
                    assert float(out[m, n]) == want, (m, n)
        assert out[0, 0] == np.inf * np.sign(col[0]) and np.isnan(out[1, 1])
        assert out.flags.c_contiguous and not np.shares_memory(out, wide)
    assert_bytes(wide, before)
    assert run(np.zeros((0, 9), F32), col).shape == (0, 9)


@checks("cast_bf16")
def test_cast_bf16_rounds_to_nearest_even():
    x = draw((6, 50), "float32", 7, scale=100)
    ties = F32([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 2.0**-134, 3 * 2.0**-134, 3.4e38, -3.4e38, 1e-45])
    x[0, : len(ties)] = ties
    for run in (oracle.cast_bf16, oracle.cast_bf16.mirror):
        assert_bytes(run(x), stored(floats(x.reshape(-1)), x, "bfloat16"))
        special = run(F32([np.nan, -np.nan, np.inf, -np.inf, -0.0]))
        assert np.isnan(special[:2]).all()
        assert_bytes(special[2:].view(np.uint16), np.uint16([0x7F80, 0xFF80, 0x8000]))
        assert_bytes(run(x[:, 10:20]), np.ascontiguousarray(run(x)[:, 10:20]))


@checks("cast_bf16", "cast_f32")
def test_cast_f32_of_every_code_and_back():
    codes = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    x = codes.view(draw((1,), "bfloat16", 0).dtype)
    for run in (oracle.cast_f32, oracle.cast_f32.mirror):
        wide = run(x)
        number = ~np.isnan(wide)
        assert_bytes((wide.view(np.uint32) >> np.uint32(16))[number], codes.astype(np.uint32)[number])
        assert not (wide.view(np.uint32)[number] & np.uint32(0xFFFF)).any()
        assert_bytes(np.isnan(wide), (codes & 0x7FFF) > 0x7F80)
        back = oracle.cast_bf16(wide)
        assert_bytes(back.view(np.uint16)[number], codes[number])
    assert_bytes(run(x[:, 3:9]), np.ascontiguousarray(wide[:, 3:9]))


@checks(
    "embedding", cases=[case(table=t, out=o, ids=i) for t in KINDS for o in (None, *KINDS) for i in ("int32", "int64")]
)
def test_embedding_against_a_loop(case):
    table = draw((37, 6), case.table, 8, scale=50)
    table[3, 2], table[4, 1] = np.nan, np.inf
    ids = np.random.Generator(np.random.PCG64(9)).integers(0, 37, 32).astype(case.ids)
    ids[:3] = [0, 36, 36]
    for run in (oracle.embedding, oracle.embedding.mirror):
        out = run(table, ids, out_dtype=case.out)
        assert out.shape == (32, 6) and not np.shares_memory(out, table)
        for t, row in enumerate(ids):
            if case.out in (None, case.table):
                assert_bytes(out[t], table[int(row)])
            elif int(row) != 3:
                assert_bytes(out[t], stored(floats(table[int(row)]), table[0], case.out))


@checks("embedding")
def test_embedding_names_the_first_id_outside_of_the_table():
    table, out = draw((5, 3), "bfloat16", 10), np.zeros((4, 3), draw((1,), "bfloat16", 0).dtype)
    for ids, name, at in (([0, 5, -1, 9], 5, 1), ([4, 0, -1, 9], -1, 2), ([2**31 - 1, 0, 0, 0], 2**31 - 1, 0)):
        with pytest.raises(ContractError, match=f"id {name} at position {at}") as refusal:
            ops.embedding(table, np.array(ids, np.int32), out=out)
        assert (refusal.value.op, refusal.value.argument) == ("embedding", "ids")
    assert not out.astype(F32).any()
    with pytest.raises(ContractError, match="V = 0"):
        oracle.embedding(table[:0], np.array([0]))
    assert oracle.embedding(table[:0], np.array([], np.int64)).shape == (0, 3)


@checks("add", "mul_scalar", "cast_bf16", "cast_f32", "embedding")
def test_elementwise_ops_against_torch_as_vllm_calls_it():
    ours = {"add", "mul_scalar", "cast_bf16", "cast_f32", "embedding"}
    for golden in (g for g in op_cases("activation") if g.op in ours):
        assert_bytes(lookup(golden.op)(**golden.call()), golden.outputs["out"], str(golden))


@checks("add", "mul_scalar")
def test_out_must_not_share_memory_with_an_input():
    x = draw((2, 3), "float32", 11)
    before = x.copy()
    for call in (lambda: ops.add(x, x[0], out=x), lambda: ops.mul_scalar(x, 2.0, out=x[::-1])):
        with pytest.raises(ContractError) as refusal:
            call()
        assert refusal.value.argument == "out"
    assert_bytes(x, before)
    assert_bytes(ops.add(x, x), ops.mul_scalar(x, 2.0))


REFUSED = {
    "add": [
        ("b", (np.zeros((2, 3), F32), np.zeros((1, 3), F32)), {}),
        ("b", (np.zeros((2, 2, 3), F32), np.zeros((2, 3), F32)), {}),
        ("b", (np.zeros((2, 3), F32), np.zeros(2, F32)), {}),
        ("b", (np.zeros((2, 3), F32), 1.0), {}),
        ("a", (np.zeros((2, 3), np.int64), np.zeros(3, F32)), {}),
        ("a", (np.zeros((2, 6), F32)[:, ::2], np.zeros(3, F32)), {}),
    ],
    "mul_scalar": [("scale", (F32([1]), "2"), {}), ("scale", (F32([1]), True), {}), ("x", (np.zeros(2), 2.0), {})],
    "mul_col_vec_f32": [
        ("col", (np.zeros((2, 3), F32), np.zeros(2, F32)), {}),
        ("col", (np.zeros((2, 3), F32), np.zeros(3, np.float16)), {}),
        ("x", (np.zeros(3, F32), np.zeros(3, F32)), {}),
    ],
    "cast_bf16": [("x", (np.zeros(3, np.float16),), {})],
    "cast_f32": [("x", (np.zeros(3, F32),), {})],
    "embedding": [
        ("ids", (np.zeros((3, 2), F32), np.array([0.0])), {}),
        ("ids", (np.zeros((3, 2), F32), np.array([[0]])), {}),
        ("ids", (np.zeros((3, 2), F32), np.array([0], np.uint8)), {}),
        ("table", (np.zeros(3, F32), np.array([0])), {}),
        ("out_dtype", (np.zeros((3, 2), F32), np.array([0])), {"out_dtype": "int8"}),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_elementwise_ops_refuse(name):
    for argument, args, kwargs in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            getattr(oracle, name)(*args, **kwargs)
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


mutations("add", {
    "subtract": ("nx.add(", "nx.sub("),
    "b's dtype": ("a.dtype)", "b.dtype)"),
    "round b first": ("nx.load(b)", "nx.load(nx.store(nx.load(b), a.dtype))"),
    "forget b": ("nx.load(b)", "0.0"),
})  # fmt: skip
mutations("mul_scalar", {
    "keep the scale in float64": ("float(np.float32(scale))", "float(scale)"),
    "round the scale to x's dtype": ("float(np.float32(scale))", "float(np.array(scale).astype(x.dtype))"),
    "add": ("nx.mul(", "nx.add("),
})  # fmt: skip
mutations("mul_col_vec_f32", {
    "scale the rows": ("nx.load(col))", "nx.load(col)[:1])"),
    "round the scale to bfloat16": ("nx.load(col)", "nx.load(nx.store(nx.load(col), ml_dtypes.bfloat16))"),
    "divide": ("nx.mul(", "nx.div("),
})  # fmt: skip
mutations("cast_bf16", {
    "truncate": ("round_to(x, ml_dtypes.bfloat16)",
                 "(x.copy().view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(ml_dtypes.bfloat16)"),
    "saturate": ("ml_dtypes.bfloat16)", "ml_dtypes.bfloat16, saturate=True)"),
    "through float16": ("round_to(x,", "round_to(round_to(x, np.float16),"),
})  # fmt: skip
mutations("cast_f32", {
    "drop subnormals": ("widen(x, np.float32)",
                        "nx.store(nx.where(nx.abs(nx.load(x)) < 2.0**-126, 0.0, nx.load(x)), np.float32)"),
    "through float16": ("widen(x, np.float32)", "widen(round_to(x, np.float16), np.float32)"),
    "lose the sign": ("widen(x, np.float32)", "np.abs(widen(x, np.float32))"),
})  # fmt: skip
mutations("embedding", {
    "the row after": ("table[ids]", "table[(ids + 1) % len(table)]"),
    "sorted rows": ("table[ids]", "table[np.sort(ids)]"),
    "keep the table's dtype": ("if out_dtype in (None, table.dtype)", "if out_dtype is None or True"),
    "a view of the table": ("table[ids]", "table[: len(ids)]"),
    "round to bfloat16 first": ("nx.load(rows)", "nx.load(nx.store(nx.load(rows), ml_dtypes.bfloat16))"),
})  # fmt: skip
