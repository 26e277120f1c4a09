"""From router logits to the experts of each token and their weights, and from the experts' outputs back to tokens."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Choice, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.numerics import strided_tree
from vtlab.ops.table import op

ROW = "KERNEL-MOE-ROUTING"
F32 = ("float32",)
ORDER = strided_tree(32)
"""A warp adds up the exponentials of a token."""


def first_of(scores, count: int):
    """The columns of the `count` largest scores of each row, descending, the lower column first where two are equal."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :count]


def _in_best_groups(choice, bias, groups: int, kept: int):
    """-inf outside of the `kept` groups with the largest scores: the sum of a group's two best with a bias, else its
    best."""
    parts = choice.reshape(len(choice), groups, -1)
    best = np.sort(parts, axis=-1)[..., ::-1]
    score = best[..., 0] if bias is None else best[..., 0] + best[..., 1]
    chosen = np.zeros(score.shape, bool)
    np.put_along_axis(chosen, first_of(score, kept), True, axis=-1)
    return np.where(chosen[..., None], parts, -np.inf).reshape(choice.shape)


def _experts_fit(arguments, axes):
    """top_k experts among those of topk_group of num_expert_group groups, which divide them; two or more of a group
    where a bias adds two up"""
    groups, kept, experts = arguments["num_expert_group"], arguments["topk_group"], axes["E"]
    if experts % groups or (arguments["bias"] is not None and groups > 1 and experts // groups < 2):
        raise refuse("num_expert_group", groups, f"a divisor of {experts} that leaves two experts")
    if kept > groups:
        raise refuse("topk_group", kept, f"at most {groups}")
    if axes["k"] > kept * (experts // groups):
        raise refuse("top_k", axes["k"], f"at most {kept * (experts // groups)}")


@op(
    row=ROW,
    rows="T",
    args={
        "logits": Tensor("T E"),
        "bias": Tensor("E", F32, optional=True),
        "top_k": Scalar(int, minimum=1, axis="k", example=2),
        "renormalize": Flag(),
        "scoring": Choice(("softmax", "sigmoid")),
        "num_expert_group": Scalar(int, minimum=1),
        "topk_group": Scalar(int, minimum=1),
        "routed_scaling_factor": Scalar(above=0.0),
    },
    returns={"weights": Tensor("T k", F32), "ids": Tensor("T k", ("int32",))},
    rounding=("weights = f32(score / sum of the chosen scores * routed_scaling_factor)",),
    order=str(ORDER) + " over the experts; the chosen ones one after another",
    parity=Parity("bytes", why="ids and the bits of their weights"),
    mirror=Bound(
        "2 * (E/32 + 5) + 2 * k + 12",
        scale=lambda arguments, results: (np.abs(results[0].astype(np.float64)), 0 * results[1]),
        why="exp within 1 ulp, its sum, a division, the sum of the chosen and another division, a product; as long as "
        "no two choices are closer than that",
    ),
    nan="never chosen before a number; its weight is NaN",
    ties="the lower expert; among groups the lower group",
    upstream="vllm/model_executor/layers/fused_moe/router/fused_topk_router.py; grouped_topk_router.py: grouped_topk",
    examples=(
        {"T": 5, "E": 8, "top_k": 3, "logits": "bfloat16"},
        {"T": 3, "E": 33, "top_k": 2, "renormalize": False},
        {"T": 4, "E": 12, "top_k": 3, "scoring": "sigmoid", "bias": "float32", "num_expert_group": 4, "topk_group": 2,
         "routed_scaling_factor": 2.5},
    ),
    requires=(_experts_fit,),
)  # fmt: skip
def moe_router_topk(
    nx, logits, bias=None, *, top_k, renormalize=True, scoring="softmax", num_expert_group=1, topk_group=1,
    routed_scaling_factor=1.0,
):  # fmt: skip
    """ids = the top_k largest score + bias, weights = their scores; score = softmax(logits) or sigmoid(logits).

    Shapes: logits [T, E]; bias float32 [E] or None; weights float32, ids int32 [T, top_k], the best first. A softmax's
    order is that of the logits. With several groups only experts of the topk_group best ones are chosen; a group is as
    good as its best expert, or with a bias as its two best together. The bias chooses and does not weigh.
    Rounding points: one. `renormalize` divides by the sum of the chosen scores (by 1 where that is not positive), then
    routed_scaling_factor multiplies.
    Errors: ContractError for top_k beyond the experts that can be chosen, groups that do not divide them.
    Source: vLLM's fused_topk and grouped_topk, which multiply by the sum's inverse and choose among float32
    probabilities: of logits whose probabilities are equal in float32 they take the lower expert.
    """
    value = nx.load(logits)
    if scoring == "sigmoid":
        score = choice = nx.sigmoid(value)
    else:
        power = nx.exp(nx.sub(value, nx.max(value)[..., None]))
        score, choice = nx.div(power, nx.sum(power, order=ORDER)[..., None]), value
    if bias is not None:
        choice = nx.add(score, nx.load(bias))
    if num_expert_group > 1:
        choice = _in_best_groups(choice if bias is not None else score, bias, num_expert_group, topk_group)
    ids = first_of(choice, top_k)
    weights = np.take_along_axis(score, ids, axis=-1)
    if renormalize:
        total = nx.sum(weights)[..., None]
        weights = nx.div(weights, nx.where(total > 0, total, 1))
    return nx.store(nx.mul(weights, routed_scaling_factor), np.float32), ids.astype(np.int32)


def _summed(arguments, results):
    return np.abs(arguments["x"].astype(np.float64)).sum(axis=1)


@op(
    row=ROW,
    rows="T",
    args={"x": Tensor("T k H")},
    returns={"out": Tensor("T H", like="x")},
    rounding=("out = round(sum_r x_r), the sum in float32",),
    order="r ascending",
    parity=Parity("bytes"),
    mirror=Bound("k", scale=_summed, why="the sum of k numbers"),
    nan="propagates",
    upstream="vllm/_custom_ops.py: moe_sum",
    examples=({"T": 5, "k": 3, "H": 17}, {"T": 2, "k": 8, "H": 5, "x": "bfloat16"}, {"T": 0, "k": 2, "H": 4}),
)
def moe_sum(nx, x):
    """out[t] = sum_r x[t, r]: what a token's experts gave, already weighted.

    Shapes: x [T, k, H], out [T, H] of one dtype.
    Rounding points: one, the store.
    Errors: ContractError for other ranks.
    Source: torch.ops._moe_C.moe_sum.
    """
    value = nx.load(x)
    total = nx.const(0)
    for r in range(x.shape[1]):
        total = nx.add(total, value[:, r])
    return nx.store(np.broadcast_to(total, value.shape[::2]), x.dtype)
