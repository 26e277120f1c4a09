"""Tokens to their experts' rows and back, and activations as e4m3, against loops over tokens, choices and elements."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.table import lookup

from .compare import assert_bytes, assert_within
from .goldens import op_cases
from .harness import case, checks, mutations
from .quant_codes import code_of, divided, f32, largest, times
from .scalar import draw, floats, rounded

F32, U8, I32 = np.float32, np.uint8, np.int32
SCATTER, PACKED, GATHER = "ep_scatter", "ep_scatter_ue8m0", "ep_gather"
COLUMNS, MASKED = "silu_mul_per_token_group_quant_fp8_colmajor", "silu_mul_masked_quant"
KINDS = ("float32", "bfloat16", "float16")


def both(op):
    return getattr(oracle, op), getattr(oracle, op).mirror


def tokens(count, width, groups, seed):
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.integers(0, 256, (count, width)).astype(U8), rng.standard_normal((count, groups)).astype(F32)


def looped_scatter(rows, x, x_scale, ids, known, experts, alignment):
    """Token after token into the next row of its expert; what is not written is 0xEE and 7."""
    counts = [0] * experts
    place = [[-1 if e < 0 else (e if known is None else int(known[e])) for e in row] for row in ids.tolist()]
    for row in place:
        for e in row:
            if e >= 0:
                counts[e] += 1
    following, start = [], 0
    for count in counts:
        following.append(start)
        start += (count + alignment - 1) // alignment * alignment
    a, a_scale = np.full((rows, x.shape[1]), 0xEE, U8), np.full((rows, x_scale.shape[1]), 7, F32)
    m_indices, inverse = np.full(rows, -1, I32), np.full(ids.shape, -1, I32)
    for t, row in enumerate(place):
        for r, e in enumerate(row):
            if e >= 0:
                at, following[e] = following[e], following[e] + 1
                a[at], a_scale[at], m_indices[at], inverse[t, r] = x[t], x_scale[t], e, at
    return a, a_scale, m_indices, inverse


def scattered(run, rows, x, x_scale, ids, known, experts, alignment):
    a, a_scale = np.full((rows, x.shape[1]), 0xEE, U8), np.full((rows, x_scale.shape[1]), 7, F32)
    return a, a_scale, *run(a, a_scale, x, x_scale, ids, known, num_experts=experts, alignment=alignment)


IDS = {
    "some": (I32([[0, 2], [2, -1], [1, 0], [2, 2], [-1, -1]]), None, 3),
    "one expert": (np.zeros((9, 1), np.int64), None, 2),
    "none": (np.full((2, 3), -1, I32), None, 4),
    "mapped": (np.int64([[0, 3, 5], [1, -1, 2], [4, 4, 0]]), I32([1, -1, 0, 2, -1, 1]), 3),
    "no token": (np.zeros((0, 2), I32), None, 2),
}


@checks(SCATTER, cases=[case(ids=name, alignment=a) for name in IDS for a in (1, 4, 128)])
def test_scatter_against_a_loop_over_tokens(case):
    ids, known, experts = IDS[case.ids]
    x, x_scale = tokens(len(ids), 8, 2, 1)
    rows = ids.size + min(ids.size, experts) * (case.alignment - 1)
    for run in both(SCATTER):
        got = scattered(run, rows, x, x_scale, ids, known, experts, case.alignment)
        for one, want in zip(got, looped_scatter(rows, x, x_scale, ids, known, experts, case.alignment), strict=True):
            assert_bytes(one, want)


@checks(SCATTER)
def test_scales_in_columns():
    """Strided scales on both sides give the rows' bytes."""
    ids, known, experts = IDS["some"]
    x, x_scale = tokens(len(ids), 8, 2, 2)
    turned, a = np.full((2, 32), 7, F32).T, np.zeros((32, 8), U8)
    oracle.ep_scatter(a, turned, x, np.asfortranarray(x_scale), ids, num_experts=experts, alignment=8)
    assert_bytes(np.ascontiguousarray(turned), looped_scatter(32, x, x_scale, ids, known, experts, 8)[1])


def looped_words(exponents):
    """Four exponents to a word, the first in its lowest byte; 0 where there is none."""
    words = np.zeros((len(exponents), (exponents.shape[1] + 3) // 4), np.uint32)
    for t, row in enumerate(exponents.tolist()):
        for g, exponent in enumerate(row):
            words[t, g // 4] += exponent * 256 ** (g % 4)
    return words.view(I32)


@checks(PACKED, cases=[case(ids=name, alignment=a, G=g) for name in IDS for a, g in ((1, 4), (4, 1), (128, 7), (8, 0))])
def test_packed_scatter_against_a_loop_over_tokens(case):
    """All that ep_scatter does, with words for scales; those that nobody has stay 7."""
    ids, known, experts = IDS[case.ids]
    x, _ = tokens(len(ids), 8, 2, 1)
    exponents = np.random.Generator(np.random.PCG64(18)).integers(0, 256, (len(ids), case.G)).astype(U8)
    rows, words = ids.size + min(ids.size, experts) * (case.alignment - 1), looped_words(exponents)
    want = looped_scatter(rows, x, words.view(F32), ids, known, experts, case.alignment)
    want[1].view(I32)[want[2] < 0] = 7
    for run in both(PACKED):
        a, a_scale = np.full((rows, 8), 0xEE, U8), np.full((*words.shape[1:], rows), 7, I32).T
        more = run(a, a_scale, x, exponents, ids, known, num_experts=experts, alignment=case.alignment)
        assert_bytes(np.ascontiguousarray(a_scale), want[1].view(I32))
        for one, expected in zip((a, *more), (want[0], *want[2:]), strict=True):
            assert_bytes(one, expected)


@checks(SCATTER, GATHER)
def test_there_and_back():
    """Every choice finds its token, and weights of one expert that sum to one give it back."""
    ids = np.random.Generator(np.random.PCG64(3)).integers(-1, 6, (40, 4)).astype(I32)
    x, x_scale = tokens(40, 16, 1, 4)
    a, _, m_indices, inverse = scattered(oracle.ep_scatter, 256, x, x_scale, ids, None, 6, 16)
    for t, r in np.argwhere(ids >= 0):
        assert m_indices[inverse[t, r]] == ids[t, r] and (a[inverse[t, r]] == x[t]).all()
    assert (m_indices >= 0).sum() == (ids >= 0).sum() == len(set(inverse[ids >= 0]))
    weights = (ids >= 0) / np.maximum((ids >= 0).sum(1, keepdims=True), 1).astype(F32)
    back = oracle.ep_gather(a.astype(F32), weights.astype(F32), inverse)
    assert_within(back, np.where((ids >= 0).any(1)[:, None], x, 0), np.full(x.shape, 2.0**-14))


@checks(GATHER, cases=[case(kind=kind, k=k) for kind in KINDS for k in (1, 3, 9)])
def test_gather_against_scalar_sums(case):
    a, weights = draw((7, 5), case.kind, 5), draw((4, case.k), "float32", 6)
    rows = np.random.Generator(np.random.PCG64(7)).integers(-1, 7, (4, case.k)).astype(I32)
    rows[3] = -1
    exact, steps = np.zeros((4, 5), a.dtype), np.zeros((4, 5), a.dtype)
    for t in range(4):
        for h in range(5):
            parts = [(float(weights[t, r]), float(a[row, h])) for r, row in enumerate(rows[t]) if row >= 0]
            exact[t, h] = rounded(math.fsum(w * v for w, v in parts), case.kind)
            total = F32(0)
            for w, v in parts:
                total = F32(total + F32(F32(w) * F32(v)))
            steps[t, h] = total
    assert_bytes(oracle.ep_gather(a, weights, rows), exact)
    assert_bytes(oracle.ep_gather.mirror(a, weights, rows), steps)


def group_of(values, ue8m0):
    """The scale and the codes of a group of float32 values."""
    scale = times(max(largest(values), f32(1e-10)), f32(1 / 448))
    if ue8m0 and math.isfinite(scale):
        scale = 2.0 ** math.ceil(f32(math.log2(scale)))
    return scale, [code_of(divided(v, scale)) for v in values]


def quantised(rows, ue8m0):
    """(codes, scales) of lists of values, in groups of 128."""
    codes, scales = [], []
    for values in rows:
        groups = [group_of(values[at : at + 128], ue8m0) for at in range(0, len(values), 128)]
        scales.append([scale for scale, _ in groups])
        codes.append([code for _, found in groups for code in found])
    return np.array(codes, U8), np.array(scales, F32)


def sigmoid(z):
    return 1 / (1 + math.exp(-z)) if z > -700 else 0.0


def gated(row, kind, limit, alpha, beta):
    """y of one row of [gate, up], rounded to `kind` after every step."""
    values, half = floats(row), len(row) // 2
    made = []
    for gate, up in zip(values[:half], values[half:]):
        if limit is not None:
            gate, up = rounded(min(gate, f32(limit)), kind), rounded(max(min(up, f32(limit)), -f32(limit)), kind)
        act = rounded(gate * sigmoid(f32(alpha) * gate), kind)
        made.append(rounded(act * rounded(up + f32(beta), kind), kind))
    return made


ACTS = {"plain": (None, 1.0, 0.0), "clamped": (0.75, 1.0, 0.0), "swigluoai": (1.5, 1.702, 1.0)}


@checks(COLUMNS, cases=[case(kind=k, act=act, ue8m0=u) for k in KINDS for act in ACTS for u in (0, 1)])
def test_columns_against_scalar_loop(case):
    limit, alpha, beta = ACTS[case.act]
    x = draw((3, 512), case.kind, 8, 2)
    x[1, :256], x[2, 128:256] = 0, draw((128,), case.kind, 9, 1e-3)
    want = quantised([gated(row, case.kind, limit, alpha, beta) for row in x], case.ue8m0)
    got = oracle.silu_mul_per_token_group_quant_fp8_colmajor(
        x, clamp_limit=limit, alpha=alpha, beta=beta, ue8m0=bool(case.ue8m0)
    )
    assert got[1].strides == (4, 12)
    for one, expected in zip(got, want, strict=True):
        assert_bytes(np.ascontiguousarray(one), expected)


@checks(COLUMNS)
def test_without_a_clamp_it_is_silu_and_mul_of_vllm():
    """The same values as the activation's own op under "vllm", whose mirror it shares."""
    for kind in KINDS:
        x = draw((2, 256), kind, 10, 3)
        codes, scale = oracle.silu_mul_per_token_group_quant_fp8_colmajor.mirror(x)
        want = quantised([floats(row) for row in oracle.silu_and_mul.mirror(x, rounding="vllm")], False)
        assert_bytes(codes, want[0])
        assert_bytes(np.ascontiguousarray(scale), want[1])


@checks(COLUMNS, MASKED)
def test_what_is_no_number_is_passed_over():
    x = draw((1, 1, 256), "float32", 11)
    x[0, 0, 3], x[0, 0, 140] = math.nan, math.inf
    codes, scale = oracle.silu_mul_per_token_group_quant_fp8_colmajor(x[0])
    assert codes[0, 3] == 0x7F and math.isinf(scale[0, 0]) and codes[0, 12] == 0x7F and codes[0, 5] & 0x7F == 0
    masked, scales = np.zeros((1, 1, 128), U8), np.zeros((1, 1, 1), F32)
    oracle.silu_mul_masked_quant(x, I32([1]), masked, scales)
    assert_bytes(masked[0], codes)


def masked(run, x, counts, ue8m0=False):
    experts, rows, half = x.shape[0], x.shape[1], x.shape[2] // 2
    codes, scale = np.full((experts, rows, half), 0xEE, U8), np.full((experts, rows, half // 128), 7, F32)
    assert run(x, I32(counts), codes, scale, ue8m0=ue8m0) is None
    return codes, scale


@checks(MASKED, cases=[case(kind=kind, ue8m0=u) for kind in KINDS for u in (0, 1)])
def test_masked_rows_against_scalar_loop(case):
    x, counts = draw((3, 4, 512), case.kind, 12, 2), (2, 0, 4)
    x[0, 1, :256] = 0
    codes, scale = np.full((3, 4, 256), 0xEE, U8), np.full((3, 4, 2), 7, F32)
    for e, count in enumerate(counts):
        for t in range(count):
            values = floats(x[e, t])
            y = [f32(g * sigmoid(g) * u) for g, u in zip(values[:256], values[256:])]
            (codes[e, t],), (scale[e, t],) = quantised([y], case.ue8m0)
    for one, want in zip(
        masked(oracle.silu_mul_masked_quant, x, counts, bool(case.ue8m0)), (codes, scale), strict=True
    ):
        assert_bytes(one, want)


@checks(MASKED)
def test_the_mirror_of_masked_rows_is_that_of_their_product():
    x = draw((2, 3, 256), "bfloat16", 13)
    codes, scale = masked(oracle.silu_mul_masked_quant.mirror, x, (3, 1))
    wide = x.astype(F32)
    y = oracle.moe_silu_mul.mirror(wide[..., :128].copy(), wide[..., 128:].copy())
    for e, t in ((0, 0), (0, 2), (1, 0)):
        want = quantised([floats(y[e, t])], False)
        assert_bytes(codes[e, t], want[0][0])
        assert_bytes(scale[e, t], want[1][0])
    assert (codes[1, 1:] == 0xEE).all() and (scale[1, 1:] == 7).all()


@checks(SCATTER, PACKED, GATHER, COLUMNS, MASKED)
def test_against_vllm():
    """To the byte, but for scales in float32, which show the exponential's last bits: eight roundings."""
    for golden in (*op_cases("deep_gemm"), *op_cases("deep_gemm_packed")):
        found, call = lookup(golden.op), golden.call()
        results = found.mirror(**call)
        results = () if results is None else results if isinstance(results, tuple) else (results,)
        got = dict(zip(found.contract.returns, results)) | {name: call[name] for name in found.contract.mutates}
        for name, want in golden.outputs.items():
            ours = np.ascontiguousarray(got[name])
            if name == "scale" and not golden.arguments.get("ue8m0") and "float16" not in golden.name:
                assert_within(ours, want, 8 * 2.0**-24 * np.abs(want))
            else:
                assert_bytes(ours, want, f"{golden}, {name}")


X, XS = tokens(2, 8, 1, 14)
A, AS, TWO = np.zeros((8, 8), U8), np.zeros((8, 1), F32), I32([[0, 1], [1, 1]])
Y, ROWS = draw((2, 256), "bfloat16", 15), draw((4, 8), "float32", 16)
W, E = np.zeros((8, 1), I32), np.full((2, 3), 127, U8)
C, S = np.zeros((1, 2, 128), U8), np.zeros((1, 2, 1), F32)
REFUSED = {
    SCATTER: [
        ("topk_ids", lambda f: f(A, AS, X, XS, TWO + 2, num_experts=3)),
        ("topk_ids", lambda f: f(A, AS, X, XS, TWO - 2, num_experts=3)),
        ("expert_map", lambda f: f(A, AS, X, XS, TWO, I32([0, 3]), num_experts=3)),
        ("topk_ids", lambda f: f(A, AS, X, XS, TWO, I32([0]), num_experts=3)),
        ("a", lambda f: f(A, AS, X, XS, TWO, num_experts=3, alignment=5)),
        ("num_experts", lambda f: f(A, AS, X, XS, TWO, num_experts=0)),
        ("alignment", lambda f: f(A, AS, X, XS, TWO, num_experts=2, alignment=0)),
        ("a", lambda f: f(A, AS, A[:2], XS, TWO, num_experts=2, alignment=4)),
        ("a_scale", lambda f: f(A, np.broadcast_to(AS[:1], (8, 1)), X, XS, TWO, num_experts=2, alignment=4)),
    ],
    PACKED: [
        ("a_scale", lambda f: f(A, np.zeros((8, 2), I32), X, E, TWO, num_experts=2, alignment=4)),
        ("a_scale", lambda f: f(A, W[:, :0].copy(), X, E, TWO, num_experts=2, alignment=4)),
        ("a_scale", lambda f: f(A, AS, X, E, TWO, num_experts=2, alignment=4)),
        ("x_scale", lambda f: f(A, W, X, XS, TWO, num_experts=2, alignment=4)),
        ("topk_ids", lambda f: f(A, W, X, E, TWO + 2, num_experts=3)),
        ("a", lambda f: f(A, W, X, E, TWO, num_experts=3, alignment=5)),
        ("a_scale", lambda f: f(A, np.broadcast_to(W[:1], (8, 1)), X, E, TWO, num_experts=2, alignment=4)),
    ],
    GATHER: [
        ("inv_perm", lambda f: f(ROWS, np.ones((2, 2), F32), I32([[0, 4], [1, 1]]))),
        ("inv_perm", lambda f: f(ROWS, np.ones((2, 2), F32), I32([[0, -2], [1, 1]]))),
        ("inv_perm", lambda f: f(ROWS, np.ones((2, 2), F32), I32([[0], [1]]))),
    ],
    COLUMNS: [
        ("x", lambda f: f(Y[:, :128].copy())), ("clamp_limit", lambda f: f(Y, clamp_limit=0.0)),
        ("ue8m0", lambda f: f(Y, ue8m0="log2")), ("x", lambda f: f(Y[:, :255].copy())),
    ],
    MASKED: [
        ("counts", lambda f: f(Y[None], I32([3]), C, S)), ("counts", lambda f: f(Y[None], I32([-1]), C, S)),
        ("codes", lambda f: f(Y[None], I32([1]), C[:, :1].copy(), S)),
        ("x", lambda f: f(Y[None, :, :128].copy(), I32([1]), C[:, :, :64].copy(), S)),
        ("scale", lambda f: f(Y[None], I32([1]), C, np.broadcast_to(S[:, :1], (1, 2, 1)))),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    for argument, call in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name))
        assert (refusal.value.op, refusal.value.argument) == (name, argument)
    assert not A.any() and not C.any()


_PLACES = {
    "segments without gaps": ("np.cumsum(-(-counts // alignment) * alignment)", "np.cumsum(counts)", "segments"),
    "rows backwards": ("starts[expert] + np.arange(mine.size)", "starts[expert] + np.arange(mine.size)[::-1]",
                       "scattered"),
    "the map forgotten": ("if expert_map is None else np.where(ids < 0, -1, expert_map[np.maximum(ids, 0)])", "",
                          "local_experts"),
    "padding of the segment's expert": ("m_indices[inverse[mine]] = expert",
                                        "m_indices[starts[expert] : starts[expert + 1]] = expert", "scattered"),
    "choice for token": ("chosen // max(topk_ids.shape[1], 1)", "chosen % max(len(x), 1)", "scattered"),
}  # fmt: skip
mutations(SCATTER, _PLACES)
mutations(PACKED, {
    **_PLACES,
    "exponents from the high byte": ('"<i4"', '">i4"', "exponent_words"),
    "ones past the last": ("np.zeros((tokens,", "np.ones((tokens,", "exponent_words"),
    "zeros in front": ("exponents[:, :groups]", "exponents[:, exponents.shape[1] - groups :]", "exponent_words"),
})  # fmt: skip
mutations(GATHER, {
    "no weights": ("nx.mul(nx.load(a[inv_perm[has, r]]), weights[has, r, None])", "nx.load(a[inv_perm[has, r]])"),
    "the last row for none": ("np.flatnonzero(inv_perm[:, r] >= 0)", "np.arange(len(inv_perm))"),
    "one fma": ("nx.add(total[has], nx.mul(nx.load(a[inv_perm[has, r]]), weights[has, r, None]))",
                "nx.fma(nx.load(a[inv_perm[has, r]]), weights[has, r, None], total[has])"),
    "descending": ("range(inv_perm.shape[1])", "reversed(range(inv_perm.shape[1]))"),
})  # fmt: skip
_SCALES = {
    "no least maximum": ("nx.maximum(largest(nx, grouped), _LEAST)", "largest(nx, grouped)", "_group_codes"),
    "divide by 448": ("nx.mul(nx.maximum(largest(nx, grouped), _LEAST), _RECIPROCAL)",
                      "nx.div(nx.maximum(largest(nx, grouped), _LEAST), 448.0)", "_group_codes"),
    "exact powers": ('ceil_power_of_two(nx, scale, "log2")', 'nx.mul(ceil_power_of_two(nx, scale, "log2"), 2.0)',
                     "_group_codes"),
}  # fmt: skip
mutations(COLUMNS, {
    **_SCALES,
    "the act not rounded": ("point(act)", "act"),
    "the product not rounded": ("y = point(nx.mul(point(act), point(nx.add(up, more))))",
                                "y = nx.mul(point(act), point(nx.add(up, more)))"),
    "the gate clamped on both sides": ("nx.minimum(gate, limit)", "nx.minimum(nx.maximum(gate, -limit), limit)"),
    "beta twice": ("nx.add(up, more)", "nx.add(nx.add(up, more), more)"),
    "scales in rows": ("lay_out(scale, True)", "lay_out(scale, False)"),
})  # fmt: skip
mutations(MASKED, {
    **_SCALES,
    "one row more": ("np.arange(x.shape[1]) < counts[:, None]", "np.arange(x.shape[1]) <= counts[:, None]"),
    "rounded on the way": ("nx.load(x[real])", "nx.load(x[real].astype(np.float16))"),
    "up without a gate": ("nx.mul(nx.silu(rows[:, :half]), rows[:, half:])", "rows[:, half:]"),
})  # fmt: skip
