"""The gated delta rule as a loop over tokens: packed decode, decode, prefill.

States are [slots, Hv, Dv, Dk], Dk fastest; value head h reads key head h // (Hv / Hk). A negative slot is null: its row
is zero and no state changes. vLLM's slot 0 is null too; here it is a slot like any other.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Parity, Scalar, Tensor, refuse
from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import op

from . import delta_rule
from .delta_rule import ORDER, one_token_scale, repeated, token_by_token_scale, unit_factor
from .sequences import SLOTS, STARTS, flips, heads_divide, slots_fit, starts_fit, written

_F32 = ("float32",)
_UPSTREAM = "vllm/third_party/flash_linear_attention/ops/fused_recurrent.py: "
_SCALE = Scalar(above=0.0, example=0.25)
_STATE = Tensor("slots Hv Dv Dk", ("float32", "bfloat16", "float16"))
_NAN = "propagates within its sequence and head; a null row is zero whatever it holds"


def unit_rows(rng, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of length 1: what an L2 norm leaves."""
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def draw_keys(rows: str, heads: str = "Hk"):
    """Example values of q and k: unit rows [rows, heads, Dk]."""
    return lambda rng, axes: unit_rows(rng, (axes[rows], axes[heads], axes["Dk"]))


def draw_decay(rows: str):
    """Example values of g, a negative logarithm."""
    return lambda rng, axes: -rng.exponential(0.5, (axes[rows], axes["Hv"]))


def draw_strength(rows: str, heads: str = "Hv"):
    """Example values of beta, between 0 and 1."""
    return lambda rng, axes: rng.uniform(0, 1, (axes[rows], axes[heads]))


def _vectors(rows: str) -> dict[str, Tensor]:
    return {
        "q": Tensor(f"{rows} Hk Dk", values=draw_keys(rows)),
        "k": Tensor(f"{rows} Hk Dk", like="q", values=draw_keys(rows)),
        "v": Tensor(f"{rows} Hv Dv", like="q"),
        "g": Tensor(f"{rows} Hv", _F32, values=draw_decay(rows)),
        "beta": Tensor(f"{rows} Hv", _F32, values=draw_strength(rows)),
    }


def _parts(nx, q, k, v, g, beta, scale):
    """What `step` takes: q times the scale, both of q and k for every value head, the decay and beta to broadcast."""
    heads = v.shape[-2]
    q = nx.mul(repeated(nx.load(q), heads), scale)
    decay = nx.exp(nx.load(g))[..., None, None]
    return q, repeated(nx.load(k), heads), nx.load(v), decay, nx.load(beta)[..., None]


def _mixed_is_whole(arguments, axes):
    """mixed_qkv holds q and k of the same number of heads, then v of Hv heads"""
    keys, rest = axes["Dk"], axes["C"] - axes["Hv"] * axes["Dv"]
    if keys == 0 or rest <= 0 or rest % (2 * keys) or axes["Hv"] % (rest // (2 * keys)):
        want = f"2 * Hk * {keys} + {axes['Hv']} * {axes['Dv']}, Hk a divisor of {axes['Hv']}"
        raise refuse("mixed_qkv", f"a last axis of {axes['C']}", want)


def _packed_parts(nx, mixed_qkv, a, b, A_log, dt_bias, state, scale):
    rows, (_, heads, Dv, Dk) = len(a), state.shape
    lanes = nx.load(mixed_qkv)
    keys = (lanes.shape[1] - heads * Dv) // 2
    q, k = (part.reshape(rows, keys // Dk, Dk) for part in (lanes[:, :keys], lanes[:, keys : 2 * keys]))
    q = nx.mul(q, nx.mul(unit_factor(nx, q), scale))
    k = nx.mul(k, unit_factor(nx, k))
    softplus = nx.softplus(nx.add(nx.load(a), nx.load(dt_bias)))
    decay = nx.exp(nx.mul(nx.neg(nx.exp(nx.load(A_log))), softplus))
    beta = nx.load(nx.store(nx.sigmoid(nx.load(b)), b.dtype))
    v = lanes[:, 2 * keys :].reshape(rows, heads, Dv)
    return repeated(q, heads), repeated(k, heads), v, decay[..., None, None], beta[..., None]


def _packed_scale(arguments, results):
    """The rule's spread; the decay moves with g by |g| (1 + |a + dt_bias|), beta by an ulp where it nearly is a tie."""
    given = {name: arguments[name] for name in ("mixed_qkv", "a", "b", "A_log", "dt_bias", "state", "scale")}
    parts = _packed_parts(TRUTH, **given)
    y = np.abs(arguments["a"].astype(np.float64) + arguments["dt_bias"].astype(np.float64))
    with np.errstate(divide="ignore"):
        g = np.maximum(np.log(parts[3][..., 0, 0]), -800)
    more = 1 + np.abs(g) * (1 + y)
    exact, kept, unit = (
        1 / (1 + np.exp(-arguments["b"].astype(np.float64))),
        parts[4][..., 0],
        flips(arguments["b"].dtype),
    )
    half = np.exp2(np.floor(np.log2(np.maximum(exact, 2.0**-126))) - 25) * unit
    tie = (np.abs(exact - kept) >= half * (1 - 2.0**-8)) | (unit == 2)
    return one_token_scale(
        parts, arguments["state"], arguments["state_idx"], more[..., None], 1 + (tie * unit)[..., None]
    )


@op(
    row="KERNEL-GDN-PACKED-DECODE",
    args={
        "mixed_qkv": Tensor("B C", layout="rows"),
        "a": Tensor("B Hv", like="mixed_qkv", layout="rows"),
        "b": Tensor("B Hv", like="mixed_qkv", layout="rows"),
        "A_log": Tensor("Hv"),
        "dt_bias": Tensor("Hv"),
        "state": _STATE,
        "state_idx": Tensor("B", ("int32",), values=SLOTS.values),
        "scale": _SCALE,
    },
    returns={"out": Tensor("B Hv Dv", like="mixed_qkv")},
    rounding=(
        "beta = round(sigmoid(b)) to b's dtype",
        "out = round(o), o of the unrounded new state",
        "state = round(S) to the state's dtype",
    ),
    order=str(ORDER),
    parity=Parity("bytes"),
    mirror=Bound(
        "Dk/2 + 40",
        scale=_packed_scale,
        why="three dots of Dk/8 + 3, the norms' halves, and single roundings, relative to a step's magnitudes; "
        "where sigmoid(b) is close to a tie of b's dtype, beta may move by an ulp of it",
    ),
    nan=_NAN,
    layout="mixed_qkv = [q: Hk Dk | k: Hk Dk | v: Hv Dv]; its rows and those of a and b may be strided",
    mutates=("state",),
    upstream=_UPSTREAM + "fused_recurrent_gated_delta_rule_packed_decode",
    examples=(
        {"B": 4, "C": 2 * 32 + 2 * 32, "Hv": 2, "Dv": 32, "Dk": 32, "slots": 5, "mixed_qkv": "bfloat16",
         "dt_bias": "bfloat16"},
        {"B": 3, "C": 2 * 2 * 12 + 4 * 5, "Hv": 4, "Dv": 5, "Dk": 12, "slots": 3},
        {"B": 2, "C": 2 * 16 + 3 * 16, "Hv": 3, "Dv": 16, "Dk": 16, "slots": 2, "mixed_qkv": "float16",
         "state": "bfloat16"},
    ),
    requires=(_mixed_is_whole, slots_fit(), written("state")),
)  # fmt: skip
def gdn_packed_decode(nx, mixed_qkv, a, b, A_log, dt_bias, state, state_idx, *, scale):
    """S = exp(g) S; S += beta (v - S k) k^T; o = S q for one token a row, with all parts from raw projections.

    q = q / sqrt(sum q^2 + 1e-6) * scale, k likewise without the scale; g = -exp(A_log) softplus(a + dt_bias),
    beta = sigmoid(b). Values stay in the compute type: only beta is rounded on the way.
    Shapes: mixed_qkv [B, 2 Hk Dk + Hv Dv] as [q | k | v]; a, b [B, Hv]; A_log, dt_bias [Hv]; state [slots, Hv, Dv, Dk],
    updated in place; state_idx int32 [B], negative: a null row; out [B, Hv, Dv]. mixed_qkv, a, b and out share a dtype,
    A_log, dt_bias and state have their own.
    Rounding points: beta through b's dtype; out from the unrounded state; the state.
    Errors: ContractError for lanes that do not fill mixed_qkv, a slot out of range or twice, scale <= 0.
    Source: Yang et al. 2024 (arXiv 2412.06464); vLLM's fused_recurrent.py. A null row is zero there too, but vLLM's
    slot 0 is null, and its softplus is log(1 + exp(y)).
    """
    parts = _packed_parts(nx, mixed_qkv, a, b, A_log, dt_bias, state, scale)
    return delta_rule.one_token(nx, parts, state, state_idx, mixed_qkv.dtype)


def _scale_of(spread, where: str):
    def scale(arguments, results):
        parts = _parts(TRUTH, *(arguments[name] for name in ("q", "k", "v", "g", "beta", "scale")))
        return spread(parts, arguments["state"], arguments[where])

    return scale


_WHY = "two dots of Dk/8 + 3 roundings, exp within 1 ulp and single roundings a token, relative to a step's magnitudes"


@op(
    row="KERNEL-GDN-PACKED-DECODE",
    args={**_vectors("B"), "state": _STATE, "state_idx": SLOTS, "scale": _SCALE},
    returns={"out": Tensor("B Hv Dv", like="q")},
    rounding=("out = round(o), o of the unrounded new state", "state = round(S) to the state's dtype"),
    order=str(ORDER),
    parity=Parity("bytes"),
    mirror=Bound("Dk/4 + 16", scale=_scale_of(one_token_scale, "state_idx"), why=_WHY),
    nan=_NAN,
    mutates=("state",),
    upstream=_UPSTREAM + "fused_recurrent_gated_delta_rule",
    examples=(
        {"B": 4, "Hk": 2, "Hv": 4, "Dk": 16, "Dv": 8, "slots": 6, "q": "bfloat16", "state_idx": "int32"},
        {"B": 3, "Hk": 1, "Hv": 3, "Dk": 33, "Dv": 5, "slots": 3},
        {"B": 2, "Hk": 2, "Hv": 2, "Dk": 8, "Dv": 8, "slots": 2, "state": "bfloat16", "state_idx": "int32"},
    ),
    requires=(heads_divide, slots_fit(), written("state")),
)
def gdn_decode(nx, q, k, v, g, beta, state, state_idx=None, *, scale):
    """S = exp(g) S; S += beta (v - S k) k^T; o = S (scale q) for one token a row.

    Shapes: q, k [B, Hk, Dk] with normalised rows, v [B, Hv, Dv]; g, beta float32 [B, Hv]; state [slots, Hv, Dv, Dk],
    updated in place; state_idx int32 [B], negative: a null row; without it row b has slot b. out [B, Hv, Dv].
    Rounding points: out from the unrounded state; the state. beta is not rounded.
    Errors: ContractError for Hv not divisible by Hk, a slot out of range or twice, scale <= 0.
    Source: Yang et al. 2024 (arXiv 2412.06464); vLLM's fused_recurrent.py.
    """
    return delta_rule.one_token(nx, _parts(nx, q, k, v, g, beta, scale), state, state_idx, q.dtype)


@op(
    row="KERNEL-GDN-AOT-BF16",
    args={
        **_vectors("T"),
        "state": Tensor("N Hv Dv Dk", _F32),
        "query_start_loc": STARTS,
        "scale": _SCALE,
    },
    returns={"out": Tensor("T Hv Dv", like="q")},
    rounding=("out = round(o), o of the unrounded new state", "state = f32(S), once, after the last token"),
    order=str(ORDER),
    parity=Parity("bytes"),
    mirror=Bound("Dk/4 + 16", scale=_scale_of(token_by_token_scale, "query_start_loc"), why=_WHY),
    nan=_NAN,
    layout="sequence n is tokens query_start_loc[n] ... query_start_loc[n + 1]; its state is updated in place",
    mutates=("state",),
    upstream=_UPSTREAM + "fused_recurrent_gated_delta_rule",
    examples=(
        {"T": 9, "N": 4, "Hk": 2, "Hv": 4, "Dk": 16, "Dv": 8, "q": "bfloat16"},
        {"T": 5, "N": 1, "Hk": 1, "Hv": 2, "Dk": 20, "Dv": 3},
        {"T": 0, "N": 2, "Hk": 1, "Hv": 1, "Dk": 4, "Dv": 4},
    ),
    requires=(heads_divide, starts_fit, written("state")),
)
def gdn_prefill(nx, q, k, v, g, beta, state, query_start_loc, *, scale):
    """S = exp(g_t) S; S += beta_t (v_t - S k_t) k_t^T; o_t = S (scale q_t), along each sequence from its state.

    Shapes: q, k [T, Hk, Dk] with normalised rows, v [T, Hv, Dv]; g, beta float32 [T, Hv]; state float32 [N, Hv, Dv, Dk]
    (zeros for a fresh sequence), updated in place; query_start_loc int32 [N + 1]; out [T, Hv, Dv].
    Rounding points: out from the unrounded state; the state, once. So the mirror's bytes are the same however a
    sequence is cut into calls; an empty sequence keeps its state.
    Errors: ContractError for starts that fall or do not span 0 ... T, Hv not divisible by Hk, scale <= 0.
    Source: Yang et al. 2024 (arXiv 2412.06464); vLLM's fused_recurrent.py. The chunked form is gdn_chunk_prefill.
    """
    return delta_rule.token_by_token(nx, _parts(nx, q, k, v, g, beta, scale), state, query_start_loc, q.dtype)
