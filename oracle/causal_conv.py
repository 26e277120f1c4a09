"""The short causal convolution with a state: whole sequences, one token a row, and LFM2's gated form.

States are [slots, C, K - 1], oldest tap first; weights [C, K], the last column for the token itself. A negative slot is
null: its rows are zero and no state changes.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Choice, Flag, Parity, Tensor, refuse
from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import op

from .sequences import SLOTS, STARTS, distinct, flags, flips, rows_and_slots, slots_fit, starts_fit, written

ROW = "KERNEL-SSM-MAMBA"
_UPSTREAM = "vllm/model_executor/layers/mamba/ops/causal_conv1d.py: "
_VARIANTS = Choice(("vt", "vllm", "vllm_native"))
_NAN = "propagates to the K tokens that see it"
_FRESH = Tensor("N", ("int8", "int32"), values=flags("N"))
_STATE = Tensor("slots C Km1", ("float32", "bfloat16", "float16"))
ROUNDING = {
    "vt": ("out = round(silu(bias + sum_j w_j x_j)), in float32 until then", "state = round(x) to the state's dtype"),
    "vllm": (
        "each product w_j x_j rounded to x's dtype, where w has it too",
        "out = round(silu(float32 sum))",
    ),
    "vllm_native": ("the sum rounded to x's dtype", "out = round(silu(that))"),
}


def _taps_fit(arguments, axes):
    """a filter of at least two taps, a state of one less"""
    if axes["K"] < 2 or axes["Km1"] != axes["K"] - 1:
        raise refuse("conv_state", f"{axes['Km1']} taps beside a filter of {axes['K']}", "K - 1 taps, K >= 2")


def _state_has_dtype_of_x(arguments, axes):
    """vLLM's variants want a state of x's dtype"""
    x, state = arguments["x"].dtype, arguments["conv_state"].dtype
    if arguments["rounding"] != "vt" and state != x:
        raise refuse("conv_state", f"dtype {state}", f"dtype {x}, that of x")


def filtered(nx, taps, weight, bias, dtype, silu, rounding):
    """round(silu(bias + sum_j w_j taps_j)), j ascending, taps a list of [..., C] in the compute type."""
    narrow = rounding == "vllm" and weight.dtype == dtype
    w = nx.load(weight)
    total = nx.load(bias) if bias is not None else nx.const(0)
    for j, tap in enumerate(taps):
        factor = w[:, j]
        total = nx.add(total, nx.load(nx.store(nx.mul(factor, tap), dtype))) if narrow else nx.fma(factor, tap, total)
    if rounding == "vllm_native":
        total = nx.load(nx.store(total, dtype))
    return nx.store(nx.silu(total) if silu else total, dtype)


def _magnitudes(arguments, x):
    """bias + sum_j w_j x_j of the magnitudes, x given, and the state that it leaves."""
    weight, bias, state = (arguments[name] for name in ("weight", "bias", "conv_state"))
    weight, bias, state = (part if part is None else np.abs(part.astype(np.float64)) for part in (weight, bias, state))
    where = [arguments[name] for name in ("query_start_loc", "has_initial_state") if name in arguments]
    run = _sequences if where else _rows
    return run(unrounded, x, weight, bias, state, *where, arguments.get("state_idx"), False, "vt"), state


def _scale(arguments, results):
    """|bias| + sum_j |w_j| |x_j|, which SiLU raises by 1.1 at most; a flip of a product or sum is an ulp of it."""
    out, state = _magnitudes(arguments, np.abs(arguments["x"].astype(np.float64)))
    return out * (1 + 2 * (arguments["rounding"] != "vt") * flips(arguments["x"].dtype)), 0 * state


def _gated_scale(arguments, results):
    """|C| times the convolution's magnitudes of |B x|; a flip of B x or of the sum is an ulp of it."""
    b, c, x = np.split(np.abs(arguments["bcx"].astype(np.float64)), 3, axis=1)
    out, state = _magnitudes(arguments, b * x)
    flip = flips(arguments["bcx"].dtype)
    return c * out * (1 + 2 * flip), flip * state


class _Unrounded(type(TRUTH)):
    """float64 that stays float64: for magnitudes."""

    def store(self, x, dtype, **policy):
        return self._own(x)


unrounded = _Unrounded()
_MIRROR = Bound("2 * K + 6", scale=_scale, why="K products and sums, SiLU within 1 ulp; the state is moved")
_SHARED = {
    "weight": Tensor("C K"),
    "bias": Tensor("C", optional=True),
}


def _sequences(nx, x, weight, bias, conv_state, query_start_loc, has_initial_state, state_idx, silu, rounding):
    lengths, taps = np.diff(query_start_loc), weight.shape[1]
    live, slots = rows_and_slots(state_idx, len(lengths))
    old = np.zeros((len(lengths), *conv_state.shape[1:]), nx.dtype)
    begun = has_initial_state[live] != 0
    old[live[begun]] = nx.load(conv_state[slots[begun]])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(x)) - query_start_loc[owner]
    value = nx.load(x)
    windows = []
    for j in range(taps):
        back = taps - 1 - j
        before = np.minimum(place - back, -1) + taps - 1
        windows.append(np.where((place >= back)[:, None], value[np.maximum(np.arange(len(x)) - back, 0)],
                                old[owner, :, before]))  # fmt: skip
    out = filtered(nx, windows, weight, bias, x.dtype, silu, rounding)
    out[~np.isin(owner, live)] = 0
    for n, slot in zip(live, slots):
        if lengths[n]:
            ends = np.concatenate([old[n], value[query_start_loc[n] : query_start_loc[n + 1]].T], axis=1)
            conv_state[slot] = nx.store(ends[:, -(taps - 1) :], conv_state.dtype)
    return out


@op(
    row=ROW,
    args={
        "x": Tensor("T C", layout="rows"),
        "weight": _SHARED["weight"],
        "conv_state": _STATE,
        "query_start_loc": STARTS,
        "has_initial_state": _FRESH,
        "bias": _SHARED["bias"],
        "state_idx": Tensor("N", ("int32",), optional=True, values=distinct("N")),
        "silu": Flag(),
        "rounding": _VARIANTS,
    },
    returns={"out": Tensor("T C", like="x")},
    rounding=ROUNDING,
    order="one chain of fma over the taps, from the bias",
    parity=Parity("bytes"),
    mirror=_MIRROR,
    nan=_NAN,
    layout="x may have strided rows (a slice of a wider projection)",
    mutates=("conv_state",),
    upstream=_UPSTREAM + "causal_conv1d_fn; ops/cpu/causal_conv1d.py: causal_conv1d_torch",
    examples=(
        {"T": 9, "C": 5, "K": 4, "Km1": 3, "N": 4, "slots": 6, "bias": "float32", "state_idx": "int32"},
        {"T": 5, "C": 3, "K": 2, "Km1": 1, "N": 2, "slots": 2, "x": "bfloat16", "conv_state": "bfloat16",
         "silu": False},
        {"T": 7, "C": 4, "K": 3, "Km1": 2, "N": 1, "slots": 1, "x": "bfloat16", "weight": "bfloat16",
         "conv_state": "bfloat16", "rounding": "vllm"},
        {"T": 6, "C": 4, "K": 5, "Km1": 4, "N": 1, "slots": 2, "x": "float16", "conv_state": "float16",
         "rounding": "vllm_native"},
    ),
    requires=(_taps_fit, starts_fit, slots_fit("N"), written("conv_state"), _state_has_dtype_of_x),
)  # fmt: skip
def causal_conv1d_fwd(
    nx,
    x,
    weight,
    conv_state,
    query_start_loc,
    has_initial_state,
    bias=None,
    state_idx=None,
    *,
    silu=True,
    rounding="vt",
):
    """out_t = silu(bias + sum_j w_j x_(t - K + 1 + j)), before a sequence its state, or 0 in a fresh one.

    Shapes: x [T, C], weight [C, K], bias [C] or None; conv_state [slots, C, K - 1], updated in place to the last K - 1
    inputs (zeros before a fresh sequence's first); query_start_loc int32 [N + 1]; has_initial_state int8 or int32 [N];
    state_idx int32 [N], negative: the sequence is skipped; without it sequence n has slot n. out [T, C] in x's dtype.
    Rounding points: "vt" rounds once; "vllm" (Triton) also each product of 16-bit operands; "vllm_native" (the CPU
    build's torch) the sum before SiLU. An empty sequence leaves its state alone, fresh or not.
    Errors: ContractError for starts that fall or do not span 0 ... T, a slot out of range or twice, K < 2.
    Source: vLLM's causal_conv1d.py, whose forward kernel takes filters of 2 to 4 taps, its update up to 6.
    """
    args = (x, weight, bias, conv_state, query_start_loc, has_initial_state, state_idx)
    return _sequences(nx, *args, silu, rounding)


def _rows(nx, x, weight, bias, conv_state, state_idx, silu, rounding):
    rows, slots = rows_and_slots(state_idx, len(x))
    value = nx.load(x[rows])
    window = np.concatenate([nx.load(conv_state[slots]), value[..., None]], axis=2)
    out = np.zeros(x.shape, x.dtype)
    out[rows] = filtered(nx, list(np.moveaxis(window, 2, 0)), weight, bias, x.dtype, silu, rounding)
    conv_state[slots] = nx.store(window[..., 1:], conv_state.dtype)
    return out


@op(
    row=ROW,
    args={
        "x": Tensor("B C", layout="rows"),
        "weight": _SHARED["weight"],
        "conv_state": _STATE,
        "bias": _SHARED["bias"],
        "state_idx": SLOTS,
        "silu": Flag(),
        "rounding": _VARIANTS,
    },
    returns={"out": Tensor("B C", like="x")},
    rounding=ROUNDING,
    order="one chain of fma over the taps, from the bias",
    parity=Parity("bytes"),
    mirror=_MIRROR,
    nan=_NAN,
    layout="x may have strided rows",
    mutates=("conv_state",),
    upstream=_UPSTREAM + "causal_conv1d_update; ops/cpu/causal_conv1d.py: causal_conv1d_update_torch",
    examples=(
        {"B": 3, "C": 5, "K": 4, "Km1": 3, "slots": 6, "bias": "float32", "state_idx": "int32"},
        {"B": 2, "C": 3, "K": 2, "Km1": 1, "slots": 2, "x": "bfloat16", "conv_state": "float32", "silu": False},
        {"B": 2, "C": 4, "K": 3, "Km1": 2, "slots": 2, "x": "bfloat16", "weight": "bfloat16", "conv_state": "bfloat16",
         "rounding": "vllm"},
    ),
    requires=(_taps_fit, slots_fit(), written("conv_state"), _state_has_dtype_of_x),
)  # fmt: skip
def causal_conv1d_update(nx, x, weight, conv_state, bias=None, state_idx=None, *, silu=True, rounding="vt"):
    """out = silu(bias + sum_j w_j window_j), window = [state, x] of each row's slot; the state becomes its last K - 1.

    Shapes: x [B, C], weight [C, K], bias [C] or None; conv_state [slots, C, K - 1], updated in place; state_idx int32
    [B], negative: a null row; without it row b has slot b. out [B, C] in x's dtype.
    Rounding points: as causal_conv1d_fwd.
    Errors: ContractError for a slot out of range or twice, K < 2, another number of taps in the state.
    Source: vLLM's causal_conv1d.py, which writes over x and so leaves a null row's x there; here it is zero.
    """
    return _rows(nx, x, weight, bias, conv_state, state_idx, silu, rounding)


@op(
    row=ROW,
    args={
        "bcx": Tensor("T 3*C", layout="rows"),
        "weight": _SHARED["weight"],
        "conv_state": Tensor("N C Km1", ("float32", "bfloat16", "float16")),
        "query_start_loc": STARTS,
        "has_initial_state": _FRESH,
        "bias": _SHARED["bias"],
    },
    returns={"out": Tensor("T C", like="bcx")},
    rounding=("bx = round(B x)", "y = round(bias + sum_j w_j bx_j), as causal_conv1d_fwd's vt", "out = round(C y)"),
    order="one chain of fma over the taps, from the bias",
    parity=Parity("bytes"),
    mirror=Bound(
        "2 * K + 8",
        scale=_gated_scale,
        why="as causal_conv1d_fwd, and two products; both roundings before the last may flip",
    ),
    nan=_NAN,
    layout="bcx = [B | C | x], as the projection leaves it",
    mutates=("conv_state",),
    upstream="vllm/model_executor/layers/mamba/short_conv.py: ShortConv.forward",
    examples=(
        {"T": 9, "C": 5, "K": 3, "Km1": 2, "N": 4},
        {"T": 5, "C": 4, "K": 4, "Km1": 3, "N": 1, "bcx": "bfloat16", "conv_state": "bfloat16", "bias": "bfloat16"},
    ),
    requires=(_taps_fit, starts_fit, written("conv_state")),
)
def short_conv(nx, bcx, weight, conv_state, query_start_loc, has_initial_state, bias=None):
    """out = C conv(B x): LFM2's convolution between two gates, without an activation.

    Shapes: bcx [T, 3 C] as [B | C | x]; weight [C, K], bias [C] or None; conv_state [N, C, K - 1] of the products B x,
    updated in place; query_start_loc int32 [N + 1]; has_initial_state int8 or int32 [N]; out [T, C].
    Rounding points: B x, the convolution, the result, each to bcx's dtype.
    Errors: ContractError for starts that fall or do not span 0 ... T, K < 2, another number of taps in the state.
    Source: vLLM's short_conv.py.
    """
    width, dtype = weight.shape[0], bcx.dtype
    b, c, x = (nx.load(bcx[:, i * width : (i + 1) * width]) for i in range(3))
    bx = nx.store(nx.mul(b, x), dtype)
    call = (conv_state, query_start_loc, has_initial_state, bias, None)
    y = causal_conv1d_fwd.body(nx, bx, weight, *call, silu=False)
    return nx.store(nx.mul(c, nx.load(y)), dtype)
