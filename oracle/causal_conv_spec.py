"""The short convolution on drafted tokens, whose state keeps what may still be taken back."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Choice, Flag, Parity, Tensor, refuse
from vtlab.ops.table import op

from .causal_conv import ROUNDING, ROW, filtered, unrounded
from .sequences import SLOTS, flips, rows_and_slots, slots_fit, written


def _draw_accepted(rng, axes):
    return rng.integers(1, axes["M"] + 1, axes["B"])


def _state_is_long_enough(arguments, axes):
    """a state of K - 1 taps and one more for each drafted token but the first; K >= 2, M >= 1"""
    if axes["K"] < 2 or axes["M"] < 1 or axes["L"] != axes["K"] + axes["M"] - 2:
        raise refuse("conv_state", f"{axes['L']} taps", f"K + M - 2 for K = {axes['K']}, M = {axes['M']}")


def _accepted_fits(arguments, axes):
    """from 1 to M tokens of the step before were accepted"""
    count = arguments["num_accepted_tokens"]
    if isinstance(count, np.ndarray) and count.size and (int(count.min()) < 1 or int(count.max()) > axes["M"]):
        raise refuse("num_accepted_tokens", count.tolist(), f"1 to {axes['M']}")


def _state_has_dtype_of_x(arguments, axes):
    """vLLM's variants want a state of x's dtype"""
    x, state = arguments["x"].dtype, arguments["conv_state"].dtype
    if arguments["rounding"] != "vt" and state != x:
        raise refuse("conv_state", f"dtype {state}", f"dtype {x}, that of x")


def _update(nx, x, weight, conv_state, num_accepted_tokens, bias, state_idx, silu, rounding):
    rows, slots = rows_and_slots(state_idx, len(x))
    count, taps = x.shape[1], weight.shape[1]
    value = np.swapaxes(nx.load(x[rows]), 1, 2)
    begin = (num_accepted_tokens[rows] - 1)[:, None, None] + np.arange(taps - 1)
    history = np.take_along_axis(nx.load(conv_state[slots]), begin, axis=2)
    window = np.concatenate([history, value], axis=2)
    out = np.zeros(x.shape, x.dtype)
    views = [np.swapaxes(window[:, :, j : j + count], 1, 2) for j in range(taps)]
    out[rows] = filtered(nx, views, weight, bias, x.dtype, silu, rounding)
    conv_state[slots] = nx.store(window[:, :, 1:], conv_state.dtype)
    return out


def _scale(arguments, results):
    """As causal_conv1d_update's."""
    size = {
        name: None if arguments[name] is None else np.abs(arguments[name].astype(np.float64))
        for name in ("x", "weight", "conv_state", "bias")
    }
    where = {name: arguments[name] for name in ("num_accepted_tokens", "state_idx")}
    out = _update(unrounded, **size, **where, silu=False, rounding="vt")
    more = 1 + 2 * (arguments["rounding"] != "vt") * flips(arguments["x"].dtype)
    return out * more, np.zeros(arguments["conv_state"].shape)


@op(
    row=ROW,
    args={
        "x": Tensor("B M C"),
        "weight": Tensor("C K"),
        "conv_state": Tensor("slots C L", ("float32", "bfloat16", "float16")),
        "num_accepted_tokens": Tensor("B", ("int32",), values=_draw_accepted),
        "bias": Tensor("C", optional=True),
        "state_idx": SLOTS,
        "silu": Flag(),
        "rounding": Choice(("vt", "vllm", "vllm_native")),
    },
    returns={"out": Tensor("B M C", like="x")},
    rounding=ROUNDING,
    order="one chain of fma over the taps, from the bias",
    parity=Parity("bytes"),
    mirror=Bound("2 * K + 6", scale=_scale, why="K products and sums, SiLU within 1 ulp; the state is moved"),
    nan="propagates to the K tokens that see it",
    layout="after a step the state is its history without the oldest tap, then all M drafted inputs",
    mutates=("conv_state",),
    upstream="vllm/model_executor/layers/mamba/ops/causal_conv1d.py: causal_conv1d_update(num_accepted_tokens=)",
    examples=(
        {"B": 3, "M": 3, "C": 5, "K": 4, "L": 5, "slots": 6, "bias": "float32", "state_idx": "int32"},
        {"B": 2, "M": 1, "C": 3, "K": 2, "L": 1, "slots": 2, "x": "bfloat16", "conv_state": "bfloat16"},
        {"B": 2, "M": 2, "C": 4, "K": 3, "L": 3, "slots": 2, "x": "bfloat16", "weight": "bfloat16",
         "conv_state": "bfloat16", "rounding": "vllm", "silu": False},
    ),
    requires=(_state_is_long_enough, _accepted_fits, slots_fit(), written("conv_state"), _state_has_dtype_of_x),
)  # fmt: skip
def causal_conv1d_update_spec(
    nx, x, weight, conv_state, num_accepted_tokens, bias=None, state_idx=None, *, silu=True, rounding="vt"
):
    """M drafted tokens a row: history = state[n - 1 ... n + K - 3], n of the last drafts accepted; then as usual.

    out_m = silu(bias + sum_j w_j line_(m + j)), line = [history, x]; the state becomes line without its first entry,
    from which the next step takes its history by what is accepted then.
    Shapes: x [B, M, C], weight [C, K], bias [C] or None; conv_state [slots, C, K + M - 2], updated in place;
    num_accepted_tokens int32 [B], 1 to M; state_idx int32 [B], negative: a null row; without it row b has slot b. out
    [B, M, C] in x's dtype.
    Rounding points: as causal_conv1d_fwd.
    Errors: ContractError for a state of another length, a count outside of 1 ... M, a slot out of range or twice.
    Source: vLLM's causal_conv1d.py.
    """
    return _update(nx, x, weight, conv_state, num_accepted_tokens, bias, state_idx, silu, rounding)
