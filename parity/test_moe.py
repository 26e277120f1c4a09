"""Experts: which a token goes to and with what weight, their products, and the sum of what they gave."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .harness import case, checks, mutations
from .scalar import draw, floats, stored

F32 = np.float32
KINDS = ("float32", "bfloat16", "float16")


def routed(logits, bias, k, renormalize, scoring, groups, kept, factor):
    """One token's experts and weights, by sorting and not by masking."""
    if scoring == "softmax":
        powers = [math.exp(value - max(logits)) for value in logits]
        scores = [power / math.fsum(powers) for power in powers]
    else:
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    choice = [score + (bias[e] if bias else 0) for e, score in enumerate(scores)]
    size = len(logits) // groups
    worth = [math.fsum(sorted(choice[g * size : (g + 1) * size])[-2 if bias else -1 :]) for g in range(groups)]
    best = sorted(range(groups), key=lambda g: (-worth[g], g))[:kept]
    ids = sorted((e for e in range(len(logits)) if e // size in best), key=lambda e: (-choice[e], e))[:k]
    weights = [scores[e] for e in ids]
    total = math.fsum(weights) if renormalize else 1
    return ids, [weight / total * factor for weight in weights]


ROUTES = [
    case(kind=kind, E=8, k=3, renormalize=renormalize, scoring="softmax", groups=1, kept=1, bias=False, factor=1.0)
    for kind in KINDS
    for renormalize in (True, False)
] + [
    case(kind="float32", E=16, k=4, renormalize=True, scoring="sigmoid", groups=4, kept=2, bias=True, factor=2.5),
    case(kind="bfloat16", E=12, k=2, renormalize=False, scoring="sigmoid", groups=1, kept=1, bias=True, factor=1.5),
    case(kind="float32", E=12, k=3, renormalize=True, scoring="softmax", groups=3, kept=2, bias=False, factor=1.0),
    case(kind="float32", E=256, k=8, renormalize=True, scoring="softmax", groups=1, kept=1, bias=False, factor=1.0),
]


@checks("moe_router_topk", cases=ROUTES)
def test_routes_against_sorting(case):
    logits, bias = draw((9, case.E), case.kind, 1, scale=2), draw((case.E,), "float32", 2) / 4 if case.bias else None
    options = {
        "top_k": case.k, "renormalize": case.renormalize, "scoring": case.scoring, "num_expert_group": case.groups,
        "topk_group": case.kept, "routed_scaling_factor": case.factor,
    }  # fmt: skip
    for run in (oracle.moe_router_topk, oracle.moe_router_topk.mirror):
        weights, ids = run(logits, bias, **options)
        for token, row in enumerate(logits):
            want = routed(floats(row), floats(bias) if case.bias else None, case.k, case.renormalize, case.scoring,
                          case.groups, case.kept, case.factor)  # fmt: skip
            # A bound on the mirror is in the contract; here is what sigmoid, softmax and three divisions can be off.
            assert ids[token].tolist() == want[0]
            np.testing.assert_allclose(weights[token], want[1], rtol=(case.E / 32 + 20) * 2.0**-23)


@checks("moe_router_topk")
def test_equal_experts_are_taken_from_the_first():
    for scoring in ("softmax", "sigmoid"):
        weights, ids = oracle.moe_router_topk(np.zeros((2, 6), F32), top_k=3, scoring=scoring)
        assert ids.tolist() == [[0, 1, 2]] * 2
        np.testing.assert_array_equal(weights, F32(1 / 3))
    grouped = {"num_expert_group": 3, "topk_group": 2, "scoring": "sigmoid", "top_k": 3}
    assert oracle.moe_router_topk(np.zeros((1, 6), F32), np.zeros(6, F32), **grouped)[1].tolist() == [[0, 1, 2]]


@checks("moe_router_topk")
def test_a_group_counts_as_a_whole():
    """Two good experts beat the best one where a bias adds them up; without a bias the best one wins."""
    scores = np.float32([[3.0, -9, 2, 2]])
    options = {"top_k": 1, "num_expert_group": 2, "topk_group": 1, "scoring": "sigmoid"}
    assert oracle.moe_router_topk(scores, np.zeros(4, F32), **options)[1].tolist() == [[2]]
    assert oracle.moe_router_topk(scores, **options)[1].tolist() == [[0]]


@checks("moe_router_topk")
def test_the_bias_chooses_and_does_not_weigh():
    weights, ids = oracle.moe_router_topk(
        np.float32([[0, 0, 0]]), np.float32([0, 0, 9]), top_k=1, scoring="sigmoid", renormalize=False
    )
    assert (ids.tolist(), weights.tolist()) == ([[2]], [[0.5]])


@checks("moe_router_topk")
def test_not_a_number_is_chosen_last():
    weights, ids = oracle.moe_router_topk(np.float32([[np.nan, 1, 0]]), top_k=3, scoring="sigmoid", renormalize=False)
    assert ids.tolist() == [[1, 2, 0]] and np.isnan(weights[0, 2]) and not np.isnan(weights[0, :2]).any()
    weights, ids = oracle.moe_router_topk(np.float32([[-np.inf, 5, -np.inf]]), top_k=2)
    assert ids.tolist() == [[1, 0]] and weights.tolist() == [[1, 0]]


@pytest.mark.parametrize(("argument", "options"), [
    ("top_k", {"top_k": 7}), ("num_expert_group", {"top_k": 1, "num_expert_group": 4}),
    ("topk_group", {"top_k": 1, "num_expert_group": 2, "topk_group": 3}), ("top_k", {"top_k": 0}),
    ("top_k", {"top_k": 4, "num_expert_group": 2}), ("scoring", {"top_k": 1, "scoring": "tanh"}),
])  # fmt: skip
def test_experts_that_cannot_be_chosen_are_refused(argument, options):
    with pytest.raises(ContractError) as error:
        oracle.moe_router_topk(np.zeros((1, 6), F32), **options)
    assert error.value.argument == argument


@checks("moe_sum", cases=[case(kind=kind, k=k) for kind in KINDS for k in (1, 3)])
def test_sums_round_once(case):
    x = draw((5, case.k, 7), case.kind, 3)
    want = [math.fsum(floats(x[t, :, h])) for t in range(5) for h in range(7)]
    assert_bytes(oracle.moe_sum(x), stored(want, x[:, 0], case.kind))


@checks("moe_sum")
def test_the_sum_is_made_in_order():
    x = np.float32([1e8, 1.0, -1e8]).reshape(1, 3, 1)
    assert oracle.moe_sum.mirror(x).tolist() == [[0.0]] and oracle.moe_sum(x).tolist() == [[1.0]]
    assert oracle.moe_sum.mirror(np.ascontiguousarray(x[:, [0, 2, 1]])).tolist() == [[1.0]]


GEMMS = [case(kind=kind, each=each, weighted=w, out=out) for kind, each, w, out in (
    ("float32", False, False, None), ("float32", True, True, None), ("bfloat16", False, True, None),
    ("float16", True, False, None), ("bfloat16", False, False, "float32"), ("bfloat16", True, True, "float16"),
)]  # fmt: skip


@checks("moe_grouped_gemm", cases=GEMMS)
def test_each_row_meets_its_expert(case):
    tokens, k, experts, N, K = 4, 2, 3, 5, 9
    x = draw((tokens * (k if case.each else 1), K), case.kind, 1)
    weight, weights = draw((experts, N, K), case.kind, 2), np.abs(draw((tokens, k), "float32", 3))
    ids = np.int32([[2, 0], [0, 0], [-1, 2], [2, -1]])
    given = (x, weight, ids, weights if case.weighted else None)
    out = oracle.moe_grouped_gemm(*given, out_dtype=case.out)
    want = []
    for t in range(tokens):
        for r, expert in enumerate(ids[t]):
            row = floats(x[t * k + r if case.each else t])
            scale = float(weights[t, r]) if case.weighted else 1.0
            for n in range(N):
                exact = math.fsum(a * b for a, b in zip(row, floats(weight[expert, n]))) if expert >= 0 else 0.0
                want.append(exact * scale)
    kind = case.out or case.kind
    assert_bytes(out, stored(want, out, kind))
    alone = oracle.moe_grouped_gemm.mirror(x[:1], weight, ids[:1, :1], out_dtype=case.out)
    assert alone.tobytes() == oracle.moe_grouped_gemm.mirror(*given[:3], out_dtype=case.out)[:1].tobytes()


@pytest.mark.parametrize(("argument", "rows", "ids"), [("ids", 2, 3), ("ids", 2, -2), ("x", 3, 0)])
def test_experts_that_are_not_there_are_refused(argument, rows, ids):
    with pytest.raises(ContractError) as error:
        oracle.moe_grouped_gemm(np.ones((rows, 4), F32), np.ones((3, 2, 4), F32), np.full((2, 2), ids, np.int32))
    assert error.value.argument == argument


mutations("moe_router_topk", {
    "weigh with the bias": ("np.take_along_axis(score, ids", "np.take_along_axis(choice, ids"),
    "forget the bias": ("choice = nx.add(score, nx.load(bias))", "pass"),
    "never renormalize": ("if renormalize:", "if False:"),
    "forget the groups": ("if num_expert_group > 1:", "if False:"),
    "forget the factor": ("nx.mul(weights, routed_scaling_factor)", "weights"),
    "softmax of the chosen": ("nx.sum(power, order=ORDER)[..., None]", "1.0"),
    "a group's best with a bias": ("best[..., 0] + best[..., 1]", "best[..., 0]", "_in_best_groups"),
    "the last of equals": ('np.argsort(-scores, axis=-1, kind="stable")[..., :count]',
                           "np.argsort(scores, axis=-1, kind='stable')[..., ::-1][..., :count]", "first_of"),
})  # fmt: skip
mutations("moe_sum", {
    "the mean": ("np.broadcast_to(total,", "np.broadcast_to(total / x.shape[1],"),
    "round at each step": ("total = nx.add(total, value[:, r])",
                           "total = nx.load(nx.store(nx.add(total, value[:, r]), x.dtype))"),
    "backwards": ("in range(x.shape[1])", "in reversed(range(x.shape[1]))"),
    "forget the last": ("in range(x.shape[1])", "in range(max(x.shape[1] - 1, 1))"),
})  # fmt: skip
mutations("moe_grouped_gemm", {
    "the next expert": ("weight[expert]", "weight[(expert + 1) % len(weight)]"),
    "round before the weight": ("total = nx.mul(total,", "total = nx.mul(nx.load(nx.store(total, out.dtype)),"),
    "forget the weight": ("if weights is not None:", "if False:"),
    "choices share a row": ("1 if len(x) == ids.size else ids.shape[1]", "ids.shape[1]", "source_rows"),
    "keep x's dtype": ("out_dtype or x.dtype", "x.dtype"),
    "an expert for those without": ("np.unique(flat[flat >= 0])", "np.unique(flat)"),
})  # fmt: skip
