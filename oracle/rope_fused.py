"""Fusions around the rotation: QK norm and output gate in front of it, the paged KV write behind it."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Choice, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.dtypes import dtype as storage
from vtlab.ops.table import op

from . import kv_cache
from .norm import TREE, inverse_rms
from .rope import NAN, POSITIONS, ROTATED, ROTATION, ROW, TABLE, draw_table, rope_from_cache
from .rope_rotation import (
    cache_is_float32_or_matches,
    cos_sin_rows,
    pairs,
    positions_in_table,
    rotary_lanes_fit,
    rotated,
)

# The norm's relative error (half of the sum's, and five more operations) passes through the rotation as well.
_NORM_ROTATION = Bound("1.5 * ((D/256 + 17) / 2 + 8)", scale="row", why="the norm's error, then the rotation's")


def _normed(nx, x, weight, eps, gemma):
    """RMSNorm over the head, not yet rounded."""
    weight = nx.load(weight)
    return nx.mul(nx.mul(x, inverse_rms(nx, x, eps)), nx.add(weight, nx.const(1)) if gemma else weight)


def _rotate_unrounded(nx, x, cos, sin, is_neox, dtype):
    """Rotate the first lanes of x, which is in compute precision, and round all lanes once to `dtype`."""
    first, second = pairs(cos.shape[-1], 0, is_neox)
    ahead, behind = rotated(nx, x[..., first], x[..., second], nx.load(cos)[:, None], nx.load(sin)[:, None])
    x = x.copy()
    x[..., first], x[..., second] = ahead, behind
    return nx.store(x, dtype)


def _vllm_inputs_are_half(arguments, axes):
    """rounding="vllm" for inputs that are not bfloat16 or float16 of one dtype"""
    kinds = arguments["qgate"].dtype, arguments["kf"].dtype
    if arguments["rounding"] == "vllm" and (kinds[0] != kinds[1] or kinds[0].itemsize != 2):
        raise refuse("rounding", f"vllm with {kinds[0]} and {kinds[1]}", "bfloat16 or float16, the same for both")


@op(
    row=ROW,
    rows="T",
    args={
        "qgate": Tensor("T Hq*2*D", layout="rows"),
        "kf": Tensor("T Hk*D", layout="rows"),
        "q_norm": Tensor("D", dtypes=("float32",)),
        "k_norm": Tensor("D", dtypes=("float32",)),
        "cos_sin": Tensor("T rotary_dim", values=draw_table),
        "eps": Scalar(minimum=0),
        "gemma": Flag(),
        "out_dtype": Choice(("float32", "bfloat16", "float16"), optional=True),
        "gate_dtype": Choice(("float32", "bfloat16", "float16"), optional=True),
        "rounding": Choice(("vt", "vllm")),
    },
    returns={"q": Tensor("T Hq D"), "k": Tensor("T Hk D"), "gate": Tensor("T Hq D")},
    rounding={
        "vt": ("q, k = round(rotation of x * inv * w)", "gate: none, or once to gate_dtype"),
        "vllm": ("normed = round(x * inv * w)", "q, k = round(rotation of normed)", "gate: as vt"),
    },
    order=str(TREE),
    parity=Parity("bytes"),
    mirror=_NORM_ROTATION,
    nan="a NaN spoils its head of q or k; the gate keeps its bytes",
    layout="each head's chunk of qgate is D lanes of q, then D lanes of gate",
    upstream="vllm/model_executor/layers/fused_qk_norm_rope.py: fused_qk_rmsnorm_rope_gate rounds as vllm, and takes "
    "weights that have their 1 already",
    requires=(rotary_lanes_fit, _vllm_inputs_are_half),
    examples=(
        {"T": 3, "Hq": 2, "Hk": 1, "D": 64, "rotary_dim": 16},
        {"T": 2, "Hq": 3, "Hk": 2, "D": 40, "rotary_dim": 40, "qgate": "bfloat16", "kf": "bfloat16",
         "rounding": "vllm"},
        {"T": 2, "Hq": 1, "Hk": 1, "D": 300, "rotary_dim": 64, "qgate": "bfloat16", "gemma": False,
         "gate_dtype": "float32"},
    ),
)  # fmt: skip
def attn_qk_norm_rope_gate(
    nx, qgate, kf, q_norm, k_norm, cos_sin, *, eps=1e-6, gemma=True, out_dtype=None, gate_dtype=None, rounding="vt"
):
    """q, k = rope(rms_norm(x)), gate = the other half of each head's chunk: the front of gated attention, fused.

    Shapes: qgate [T, Hq*2*D], kf [T, Hk*D] (rows may be strided); q_norm, k_norm float32 [D]; cos_sin [T, rotary_dim],
    one row per token; returns q [T, Hq, D], k [T, Hk, D] in out_dtype (default: qgate's) and gate [T, Hq, D] in
    gate_dtype (default: out_dtype). NeoX pairs within the first rotary_dim lanes. w = weight + 1 with gemma.
    Rounding points: "vt" keeps the norm unrounded through the rotation; "vllm" rounds it to the input's dtype first.
    Errors: ContractError for mismatched shapes, rotary width odd or beyond D, "vllm" on float32.
    Source: Qwen3-Next's gated attention; vllm/model_executor/layers/fused_qk_norm_rope.py.
    """
    tokens, width = qgate.shape[0], q_norm.size
    out_dtype = qgate.dtype if out_dtype is None else storage(out_dtype)
    gate_dtype = out_dtype if gate_dtype is None else storage(gate_dtype)
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, :half], cos_sin[:, half:]
    chunks = qgate.reshape(tokens, qgate.shape[1] // (2 * width), 2 * width)

    def front(x, weight):
        normed = _normed(nx, nx.load(x), weight, eps, gemma)
        normed = nx.load(nx.store(normed, x.dtype)) if rounding == "vllm" else normed
        return _rotate_unrounded(nx, normed, cos, sin, True, out_dtype)

    gate = chunks[..., width:]
    gate = np.array(gate, order="C") if gate.dtype == gate_dtype else nx.store(nx.load(gate), gate_dtype)
    return front(chunks[..., :width], q_norm), front(kf.reshape(tokens, kf.shape[1] // width, width), k_norm), gate


@op(
    row=ROW,
    rows="T",
    args={
        "qkv": Tensor("T Hq*D+Hk*D+Hv*D", layout="rows"),
        "q_weight": Tensor("D"),
        "k_weight": Tensor("D", like="q_weight"),
        "cos_sin_cache": TABLE,
        "positions": POSITIONS,
        "num_heads_q": Scalar(int, minimum=1, axis="Hq"),
        "num_heads_k": Scalar(int, minimum=1, axis="Hk"),
        "num_heads_v": Scalar(int, minimum=1, axis="Hv"),
        "head_dim": Scalar(int, minimum=2, axis="D"),
        "eps": Scalar(minimum=0),
        "is_neox": Flag(),
    },
    returns={"qkv": Tensor("T Hq*D+Hk*D+Hv*D", like="qkv")},
    rounding=("q, k = round(rotation of x * inv * w); v is copied",),
    order=str(TREE),
    parity=Parity("bytes"),
    mirror=Bound("1.5 * ((D/256 + 17) / 2 + 8)", scale=lambda arguments, results: _by_head(arguments, results[0]),
                 why="the norm's error, then the rotation's, within each head"),
    nan="a NaN spoils its head of q or k; v keeps its bytes",
    layout="the heads of q, then of k, then of v",
    upstream="torch.ops._C.fused_qk_norm_rope (vllm/_custom_ops.py)",
    requires=(rotary_lanes_fit, cache_is_float32_or_matches, positions_in_table),
    examples=(
        {"T": 3, "Hq": 4, "Hk": 2, "Hv": 2, "D": 64, "P": 20, "rotary_dim": 64},
        {"T": 2, "Hq": 3, "Hk": 1, "Hv": 1, "D": 128, "P": 7, "rotary_dim": 32, "qkv": "bfloat16",
         "q_weight": "bfloat16", "cos_sin_cache": "bfloat16", "is_neox": False},
    ),
)  # fmt: skip
def fused_qk_norm_rope(
    nx, qkv, q_weight, k_weight, cos_sin_cache, positions, *, num_heads_q, num_heads_k, num_heads_v, head_dim,
    eps=1e-6, is_neox=True,
):  # fmt: skip
    """q, k = rope(rms_norm(x) * w) within a packed projection, v as it is.

    Shapes: qkv [T, (Hq + Hk + Hv) * D] (rows may be strided), weights [D], cos_sin_cache [P, rotary_dim] in float32 or
    qkv's dtype, positions [T]; returns the new qkv.
    Rounding points: one, after the rotation; the norm is not rounded before it.
    Errors: ContractError for mismatched shapes, positions outside [0, P), rotary width odd or beyond D.
    Source: vllm/_custom_ops.py: fused_qk_norm_rope.
    """
    cos, sin = cos_sin_rows(cos_sin_cache, positions)
    out = np.array(qkv, order="C")
    heads = out.reshape(qkv.shape[0], num_heads_q + num_heads_k + num_heads_v, head_dim)
    for weight, part in ((q_weight, slice(0, num_heads_q)), (k_weight, slice(num_heads_q, num_heads_q + num_heads_k))):
        normed = _normed(nx, nx.load(heads[:, part]), weight, eps, False)
        heads[:, part] = _rotate_unrounded(nx, normed, cos, sin, is_neox, qkv.dtype)
    return out


def _by_head(arguments, out):
    heads = np.abs(out.astype(np.float64)).reshape(len(out), -1, arguments["head_dim"])
    return np.broadcast_to(heads.max(axis=-1, keepdims=True), heads.shape).reshape(out.shape)


@op(
    row=ROW,
    args={
        "q": Tensor("T Hq D", layout="strided"),
        "k": Tensor("T Hk D", like="q", layout="strided"),
        "v": Tensor("T Hk D", like="q", layout="rows"),
        "positions": POSITIONS,
        "cos_sin_cache": TABLE,
        "key_cache": Tensor("NB BS Hk D", layout="strided"),
        "value_cache": Tensor("NB BS Hk D", like="key_cache", layout="strided"),
        "slot_mapping": Tensor("S", dtypes=("int64",), values=kv_cache.draw_slots),
        "is_neox": Flag(),
    },
    returns={"q": Tensor("T Hq D", like="q"), "k": Tensor("T Hk D", like="k")},
    rounding=(*ROTATED, "the caches hold the rounded k and v, rounded once more where their dtype is another"),
    parity=Parity("bytes"),
    mirror=ROTATION,
    nan=NAN,
    ties="of several tokens with one slot the last is kept (on a device: undefined)",
    mutates=("key_cache", "value_cache"),
    upstream="vllm/v1/attention/backends/triton_attn.py: do_rope_and_kv_cache_update",
    requires=(
        rotary_lanes_fit, cache_is_float32_or_matches, positions_in_table, kv_cache.slots_fit,
        kv_cache.caches_take_writes,
    ),
    examples=(
        {"T": 4, "Hq": 4, "Hk": 2, "D": 64, "P": 20, "rotary_dim": 64, "NB": 3, "BS": 4, "S": 3, "q": "bfloat16",
         "key_cache": "bfloat16"},
        {"T": 2, "Hq": 1, "Hk": 1, "D": 24, "P": 3, "rotary_dim": 16, "NB": 2, "BS": 1, "S": 2, "is_neox": False},
    ),
)  # fmt: skip
def rope_and_cache(nx, q, k, v, positions, cos_sin_cache, key_cache, value_cache, slot_mapping, *, is_neox=True):
    """q, k = rope_from_cache(q, k); then reshape_and_cache(k, v): rotation and paged write in one pass.

    Shapes: q [T, Hq, D], k and v [T, Hk, D], positions [T], cos_sin_cache [P, rotary_dim], caches [NB, BS, Hk, D]
    (any strides but the last), slot_mapping int64 [S], S <= T: tokens from S on are rotated and not stored. Returns
    the new (q, k); key_cache and value_cache are written in place.
    Rounding points: those of rope_from_cache; the cache gets the rounded k and the bytes of v, both rounded once more
    where its dtype is another, as in reshape_and_cache.
    Errors: those of rope_from_cache and reshape_and_cache, raised before anything is written.
    Source: vllm/v1/attention/backends/triton_attn.py: do_rope_and_kv_cache_update.
    """
    q, k = rope_from_cache.body(nx, q, k, positions, cos_sin_cache, is_neox=is_neox)
    kv_cache.reshape_and_cache.body(nx, k, v, key_cache, value_cache, slot_mapping)
    return q, k
