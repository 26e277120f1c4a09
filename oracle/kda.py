"""Kimi delta attention as a loop over tokens: the delta rule with a decay for each channel of the keys; its gates.

States are [slots, H, Dv, Dk], Dk fastest, one head of keys for each head of values. A negative slot is null.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Choice, Flag, Parity, Scalar, Tensor
from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import op

from . import delta_rule
from .delta_rule import ORDER, one_token_scale, token_by_token_scale
from .gdn import draw_strength
from .matmul import ORDER as MATMUL_ORDER
from .sequences import SLOTS, STARTS, flips, slots_fit, starts_fit, written

ROW = "KERNEL-KDA-DELTA"
F32 = ("float32",)
UPSTREAM = "vllm/third_party/flash_linear_attention/ops/kda.py: "
NAN = "propagates within its sequence and head; a null row is zero whatever it holds"
SCALE = Scalar(above=0.0, example=0.25)
GATE = {
    "A_log": Tensor("H", F32),
    "dt_bias": Tensor("H*D", F32, optional=True),
}
SOFTPLUS = {"beta": Scalar(above=0.0), "threshold": Scalar()}


def softplus_gate(nx, g1, A_log, dt_bias, beta, threshold):
    """-exp(A_log) softplus(g1 + dt_bias), and y = g1 + dt_bias; unrounded."""
    y = nx.load(g1)
    if dt_bias is not None:
        y = nx.add(y, nx.load(dt_bias).reshape(y.shape[1:]))
    scaled = nx.mul(y, beta)
    linear = scaled > nx.const(threshold)
    soft = nx.where(linear, y, nx.div(nx.softplus(scaled), beta))
    return nx.mul(nx.neg(nx.exp(nx.load(A_log)))[:, None], soft), y


def _low_rank_scale(arguments, results):
    """|f_b| (|f_a| |x|), and an ulp of the bottleneck where it is rounded."""
    x, f_a, f_b = (np.abs(arguments[name].astype(np.float64)) for name in ("x", "f_a", "f_b"))
    return (1 + (arguments["rounding"] == "vllm") * flips(arguments["x"].dtype)) * (x @ f_a.T @ f_b.T)


@op(
    row=ROW,
    rows="T",
    args={
        "x": Tensor("T Hid", layout="rows"),
        "f_a": Tensor("R Hid", like="x"),
        "f_b": Tensor("E R", like="x"),
        "rounding": Choice(("vt", "vllm")),
    },
    returns={"g1": Tensor("T E")},
    rounding={
        "vt": ("g1 = f32(f_b (f_a x)), the bottleneck unrounded",),
        "vllm": ("bottleneck = round(f_a x) to x's dtype", "g1 = round(f_b bottleneck) to x's dtype"),
    },
    order=str(MATMUL_ORDER),
    parity=Parity("bytes"),
    mirror=Bound("(Hid + R) / 32 + 80", scale=_low_rank_scale, why="two products as matmul_bt's"),
    nan="propagates within its row",
    upstream="vllm/model_executor/layers/mamba/gdn/kimi_gdn_linear_attn.py: f_b_proj(f_a_proj(hidden_states))",
    examples=(
        {"T": 3, "Hid": 40, "R": 8, "E": 24},
        {"T": 2, "Hid": 64, "R": 16, "E": 32, "x": "bfloat16", "rounding": "vllm"},
    ),
)
def kda_low_rank_decay(nx, x, f_a, f_b, *, rounding="vt"):
    """g1 = f_b (f_a x): the decay's projection through a bottleneck of the head's width.

    Shapes: x [T, Hid], f_a [R, Hid], f_b [H * D, R] of one dtype; g1 [T, H * D], float32 under "vt", else x's dtype.
    Rounding points: "vt" rounds once; "vllm" is two linear layers, each rounded to x's dtype.
    Errors: ContractError for unequal inner axes or mixed dtypes.
    Source: vLLM's kimi_gdn_linear_attn.py; the output gate's g_a, g_b have the same form.
    """
    narrow = nx.add(nx.matmul(x, f_a, order=MATMUL_ORDER, fused=True), 0.0)  # as in matmul_bt, chains of -0 make +0
    if rounding == "vllm":
        narrow = nx.load(nx.store(narrow, x.dtype))
    g1 = nx.add(nx.matmul(narrow, f_b, order=MATMUL_ORDER, fused=True), 0.0)
    return nx.store(g1, np.float32 if rounding == "vt" else x.dtype)


def gate_scale(arguments, results):
    """g moves with the rounding of y = g1 + dt_bias by at most |y| sigmoid, under (1 + |y|) softplus."""
    names = ("g1", "A_log", "dt_bias", "beta", "threshold")
    g, y = softplus_gate(TRUTH, *(arguments[name] for name in names))
    return np.abs(g) * (1 + np.abs(y) * max(1.0, arguments["beta"]))


@op(
    row=ROW,
    rows="T",
    args={"g1": Tensor("T H D"), **GATE, **SOFTPLUS},
    returns={"g": Tensor("T H D", F32)},
    rounding=("g = f32(-exp(A_log) softplus(g1 + dt_bias))",),
    parity=Parity("bytes"),
    mirror=Bound("10", scale=gate_scale, why="the sum, softplus and exp within 1 ulp, the products with beta"),
    nan="propagates; g1 of -inf gives -0, of +inf -inf",
    ties="beta (g1 + dt_bias) of exactly `threshold` takes the logarithm, above it the line",
    layout="dt_bias is [H * D], the checkpoint's A_log [1, 1, H, 1]",
    upstream=UPSTREAM + "fused_kda_gate",
    examples=(
        {"T": 3, "H": 2, "D": 8, "g1": "bfloat16", "dt_bias": "float32"},
        {"T": 2, "H": 3, "D": 5, "beta": 2.0, "threshold": 1.0},
    ),
)
def kda_decay_gate(nx, g1, A_log, dt_bias=None, *, beta=1.0, threshold=20.0):
    """g = -exp(A_log_h) softplus(g1 + dt_bias), softplus(y) = log(1 + exp(beta y)) / beta, y above threshold.

    Shapes: g1 [T, H, D]; A_log float32 [H]; dt_bias float32 [H * D] or None; g float32 [T, H, D], a logarithm.
    Rounding points: one, the store.
    Errors: ContractError for mismatched shapes, beta <= 0.
    Source: Kimi Linear (arXiv 2510.26692); vLLM's kda.py, whose log(1 + exp(y)) is 0 below y = -17: up to
    exp(A_log) 2^-24 / beta away from this.
    """
    return nx.store(softplus_gate(nx, g1, A_log, dt_bias, beta, threshold)[0], np.float32)


def _vectors(rows: str) -> dict[str, Tensor]:
    return {
        "q": Tensor(f"{rows} H D"),
        "k": Tensor(f"{rows} H D", like="q"),
        "v": Tensor(f"{rows} H Dv", like="q"),
        "g": Tensor(
            f"{rows} H D", F32, values=lambda rng, axes: -rng.exponential(0.5, (axes[rows], axes["H"], axes["D"]))
        ),
        "beta": Tensor(f"{rows} H", F32, values=draw_strength(rows, "H")),
    }


def _unit(nx, x, wanted):
    if not wanted:
        return x
    return nx.div(x, nx.sqrt(nx.add(nx.dot(x, x, order=ORDER, fused=True)[..., None], 1e-6)))


def _parts(nx, q, k, v, g, beta, scale, qk_l2norm):
    q, k = (_unit(nx, nx.load(part), qk_l2norm) for part in (q, k))
    return nx.mul(q, scale), k, nx.load(v), nx.exp(nx.load(g))[..., None, :], nx.load(beta)[..., None]


def _scale_of(spread, where: str):
    def scale(arguments, results):
        names = ("q", "k", "v", "g", "beta", "scale", "qk_l2norm")
        return spread(_parts(TRUTH, *(arguments[name] for name in names)), arguments["state"], arguments[where])

    return scale


_WHY = "three dots of D/8 + 3 roundings, exp within 1 ulp and single roundings a token, relative to a step's magnitudes"
_POINTS = ("out = round(o), o of the unrounded new state", "state = f32(S)")


@op(
    row=ROW,
    args={
        **_vectors("B"),
        "state": Tensor("slots H Dv D", F32),
        "state_idx": SLOTS,
        "scale": SCALE,
        "qk_l2norm": Flag(),
    },
    returns={"out": Tensor("B H Dv", like="q")},
    rounding=_POINTS,
    order=str(ORDER),
    parity=Parity("bytes"),
    mirror=Bound("D/2 + 32", scale=_scale_of(one_token_scale, "state_idx"), why=_WHY),
    nan=NAN,
    mutates=("state",),
    upstream=UPSTREAM + "fused_recurrent_kda",
    examples=(
        {"B": 4, "H": 2, "D": 16, "Dv": 16, "slots": 6, "q": "bfloat16", "state_idx": "int32"},
        {"B": 2, "H": 1, "D": 33, "Dv": 5, "slots": 3, "qk_l2norm": False},
    ),
    requires=(slots_fit(), written("state")),
)
def kda_decode(nx, q, k, v, g, beta, state, state_idx=None, *, scale, qk_l2norm=True):
    """S = S diag(exp(g)); S += beta (v - S k) k^T; o = S (scale q) for one token a row.

    Shapes: q, k [B, H, D], v [B, H, Dv] of one dtype; g float32 [B, H, D]; beta float32 [B, H]; state float32
    [slots, H, Dv, D], updated in place; state_idx int32 [B], negative: a null row; without it row b has slot b.
    out [B, H, Dv]. `qk_l2norm` divides q and k by sqrt(sum x^2 + 1e-6) first, unrounded.
    Rounding points: out from the unrounded state; the state.
    Errors: ContractError for a slot out of range or twice, scale <= 0.
    Source: Kimi Linear (arXiv 2510.26692); vLLM's kda.py, which leaves null rows of out as they were.
    """
    return delta_rule.one_token(nx, _parts(nx, q, k, v, g, beta, scale, qk_l2norm), state, state_idx, q.dtype)


@op(
    row=ROW,
    args={
        **_vectors("T"),
        "state": Tensor("N H Dv D", F32),
        "query_start_loc": STARTS,
        "scale": SCALE,
        "qk_l2norm": Flag(),
    },
    returns={"out": Tensor("T H Dv", like="q")},
    rounding=_POINTS,
    order=str(ORDER),
    parity=Parity("bytes"),
    mirror=Bound("D/2 + 32", scale=_scale_of(token_by_token_scale, "query_start_loc"), why=_WHY),
    nan=NAN,
    mutates=("state",),
    upstream=UPSTREAM + "fused_recurrent_kda with cu_seqlens",
    examples=(
        {"T": 9, "N": 4, "H": 2, "D": 16, "Dv": 8, "q": "bfloat16"},
        {"T": 5, "N": 1, "H": 1, "D": 12, "Dv": 3, "qk_l2norm": False},
        {"T": 0, "N": 2, "H": 1, "D": 4, "Dv": 4},
    ),
    requires=(starts_fit, written("state")),
)
def kda_prefill_recurrent(nx, q, k, v, g, beta, state, query_start_loc, *, scale, qk_l2norm=True):
    """S = S diag(exp(g_t)); S += beta_t (v_t - S k_t) k_t^T; o_t = S (scale q_t), along each sequence from its state.

    Shapes: q, k [T, H, D], v [T, H, Dv] of one dtype; g float32 [T, H, D]; beta float32 [T, H]; state float32
    [N, H, Dv, D] (zeros for a fresh sequence), updated in place; query_start_loc int32 [N + 1]; out [T, H, Dv].
    Rounding points: out from the unrounded state; the state, once. So the mirror's bytes are the same however a
    sequence is cut into calls; an empty sequence keeps its state.
    Errors: ContractError for starts that fall or do not span 0 ... T, scale <= 0.
    Source: Kimi Linear (arXiv 2510.26692); vLLM's kda.py. The chunked form is kda_chunk_prefill.
    """
    parts = _parts(nx, q, k, v, g, beta, scale, qk_l2norm)
    return delta_rule.token_by_token(nx, parts, state, query_start_loc, q.dtype)
