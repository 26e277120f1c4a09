"""The merge of two partial attention results over disjoint keys, from their outputs and log-sum-exps."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops.contract import Bound, Choice, Parity, Scalar, Tensor, refuse
from vtlab.ops.dtypes import FLOATS
from vtlab.ops.numerics import widen
from vtlab.ops.table import op

_F32 = ("float32",)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def _scales(arguments, results):
    """Each output is a convex mix of two values; an lse is m plus a logarithm of at most log 2."""
    sizes = [np.abs(widen(arguments[name], np.float64)) for name in ("prefix_out", "suffix_out")]
    size = np.maximum(*sizes) / (arguments["output_scale"] or 1)
    lse = np.maximum(arguments["prefix_lse"], arguments["suffix_lse"])
    return size, np.where(np.isfinite(lse), np.abs(lse) + 1, 1)


def _enough_tokens(arguments, axes):
    """prefill_tokens_with_context at most T"""
    given = arguments["prefill_tokens_with_context"]
    if given is not None and given > axes["T"]:
        raise refuse("prefill_tokens_with_context", given, f"<= {axes['T']}")


def _lse(rng, axes):
    lse = 3 * rng.standard_normal((axes["H"], axes["T"]))
    lse[:, 0] = axes.get("edge", lse[:, 0])
    return lse


@op(
    row="KERNEL-ATTN-PAGED",
    args={
        "prefix_out": Tensor("T H D", layout="strided"),
        "prefix_lse": Tensor("H T", _F32, values=_lse),
        "suffix_out": Tensor("T H D", like="prefix_out", layout="strided"),
        "suffix_lse": Tensor("H T", _F32, values=_lse),
        "prefill_tokens_with_context": Scalar(int, minimum=0, optional=True),
        "empty": Choice(("prefix", "zeros")),
        "output_scale": Scalar(above=0, optional=True),
    },
    returns={"out": Tensor("T H D", (*FLOATS, "uint8"), holds="float8_e4m3fn"), "lse": Tensor("H T", _F32)},
    rounding=("out = round(prefix_out * wp + suffix_out * ws), then float8 where scaled: one rounding", "lse"),
    order="elementwise",
    parity=Parity("bytes"),
    mirror=Bound("12", scale=_scales, ulps=1, why="""exp(x) with x <= 0 off by u |x| errs by u |x| exp(x) < u; two
of them, their sum, two quotients, two products and a sum"""),
    nan="propagates, from a side of weight 0 too: its rows must be finite",
    lse_base="natural; +inf (FlashAttention-2's empty row) counts as -inf",
    layout="the outputs may have padded heads; results are contiguous",
    upstream="torch.ops._C.merge_attn_states; triton_merge_attn_states.py gives zeros for empty rows",
    examples=(
        {"T": 6, "H": 4, "D": 32, "prefix_out": "float32"},
        {"T": 5, "H": 2, "D": 8, "prefix_out": "bfloat16", "edge": -np.inf},
        {"T": 3, "H": 2, "D": 8, "prefix_out": "float16", "edge": np.inf, "empty": "zeros"},
        {"T": 6, "H": 2, "D": 16, "prefix_out": "bfloat16", "prefill_tokens_with_context": 4, "output_scale": 0.05},
    ),
    requires=(_enough_tokens,),
)  # fmt: skip
def merge_attn_states(
    nx, prefix_out, prefix_lse, suffix_out, suffix_lse, *, prefill_tokens_with_context=None, empty="prefix",
    output_scale=None,
):  # fmt: skip
    """out = (exp(pl - m) prefix_out + exp(sl - m) suffix_out) / (exp(pl - m) + exp(sl - m)), m = max(pl, sl).

    Shapes: prefix_out, suffix_out [T, H, D] in one dtype, prefix_lse, suffix_lse [H, T] float32. Returns (out, lse):
    out in that dtype, or uint8 codes of float8_e4m3fn of out / output_scale; lse = m + log(exp(pl - m) + exp(sl - m)).
    Tokens from `prefill_tokens_with_context` on have no prefix: suffix_out and suffix_lse pass as they are. Where both
    sides are empty (lse -inf, or +inf) the lse is -inf and out the prefix's row, or zeros with empty="zeros".
    Rounding points: one, the store of `out`: 1 / output_scale multiplies the unrounded mix. The weights are quotients,
    p / (p + s) and s / (p + s), each multiplied with its side.
    Errors: ContractError for mismatched shapes or dtypes, prefill_tokens_with_context beyond T, output_scale <= 0.
    Source: Ye et al. 2025 (arXiv 2501.01005), section 2.2; vllm/v1/attention/ops/triton_merge_attn_states.py.
    """
    tokens = prefix_out.shape[0]
    merged = np.arange(tokens) < (tokens if prefill_tokens_with_context is None else prefill_tokens_with_context)
    nothing = nx.const(-np.inf)
    sides = [nx.load(lse) for lse in (prefix_lse, suffix_lse)]
    prefix, suffix = (nx.where(lse == np.inf, nothing, lse) for lse in sides)
    top = nx.maximum(prefix, suffix)
    none = top == -np.inf
    finite = nx.where(none, nx.const(0), top)
    p, s = nx.exp(nx.sub(prefix, finite)), nx.exp(nx.sub(suffix, finite))
    total = nx.add(p, s)
    weights = (nx.div(w, nx.where(none, nx.const(1), total)).T[..., None] for w in (p, s))
    values = [nx.load(side) for side in (prefix_out, suffix_out)]
    mixed = nx.add(*(nx.mul(value, weight) for value, weight in zip(values, weights)))
    mixed = nx.where(none.T[..., None], values[0] if empty == "prefix" else nx.const(0), mixed)
    mixed = nx.where(merged[:, None, None], mixed, values[1])
    lse = nx.where(merged, nx.where(none, nothing, nx.add(nx.log(total), finite)), sides[1])
    if output_scale is not None:
        mixed = nx.mul(mixed, nx.div(nx.const(1), nx.const(output_scale)))
    stored = prefix_out.dtype if output_scale is None else _E4M3
    out = nx.store(mixed, stored)
    return out if output_scale is None else out.view(np.uint8), nx.store(lse, np.float32)
