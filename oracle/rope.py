"""Rotary position embeddings: frequencies, caches, rotations, and the fusions with QK norm and the paged cache."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vtlab.ops.contract import Bound, Choice, Flag, Parity, Scalar, Tensor, Value, refuse
from vtlab.ops.dtypes import IDS
from vtlab.ops.dtypes import dtype as storage
from vtlab.ops.numerics import round_to, strided_tree
from vtlab.ops.table import op

from . import kv_cache, rope_frequencies
from .rope_rotation import (
    cache_is_float32_or_matches,
    cos_sin_rows,
    pairs,
    positions_in_table,
    positions_match_sections,
    rotary_lanes_fit,
    rotate,
    rotated,
)

_ROW = "KERNEL-ROPE-QKNORM"
_TREE = strided_tree(256)
_ROTATED = ("q, k = round(x*cos - y*sin), round(y*cos + x*sin)",)
_ANGLES = "cos, sin = float32(cos(a)), float32(sin(a)) of the float64 angle a = position * inv_freq"
# Two roundings of |x cos| + |y sin| <= hypot of the rotated pair <= sqrt(2) * the row's largest value: 2 sqrt(2) < 3.
_ROTATION = Bound("3", scale="row", why="one rounding of each product and one of the sum, over a pair inside the row")
# The norm's relative error (half of the sum's, and five more operations) passes through the rotation as well.
_NORM_ROTATION = Bound("1.5 * ((D/256 + 10) / 2 + 8)", scale="row", why="the norm's error, then the rotation's")
_NAN = "NaN and infinity spoil both lanes of their pair, also at position 0 (inf * 0); other lanes keep their bytes"


def _draw_positions(rng, axes):
    shape = (*axes.get("...", ()), axes["T"])
    return rng.integers(0, axes.get("P", 4096), shape)


def _draw_table(rng, axes):
    angle = rng.uniform(0, 2 * np.pi, (axes.get("P", axes["T"]), axes["rotary_dim"] // 2))
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=-1)


_POSITIONS = Tensor("T", dtypes=IDS, values=_draw_positions)
_TABLE = Tensor("P rotary_dim", values=_draw_table)
_LLAMA3 = Value("a mapping with factor, low_freq_factor, high_freq_factor, original_max_position_embeddings", optional=True)
_LLAMA3_8B = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _rotary_dim_is_even(arguments, axes):
    """rotary_dim odd"""
    if arguments["rotary_dim"] % 2:
        raise refuse("rotary_dim", arguments["rotary_dim"], "an even number")


def _llama3_is_complete(arguments, axes):
    """llama3 without one of its four numbers"""
    if arguments["llama3"] is not None:
        try:
            if not isinstance(arguments["llama3"], Mapping):
                raise refuse("", type(arguments["llama3"]).__name__, "a mapping")
            rope_frequencies.llama3(np.ones(1), arguments["llama3"])
        except ValueError as error:
            raise refuse("llama3", error.got, error.want) from None


def _parameters_make_a_table(arguments, axes):
    """rope_parameters of an unknown rope_type, without a number that it needs, or with an impossible one"""
    if not isinstance(arguments["rope_parameters"], Mapping):
        raise refuse("rope_parameters", type(arguments["rope_parameters"]).__name__, "a mapping")
    rope_frequencies.tables(arguments["rope_parameters"], arguments["head_size"], arguments["max_position"], np.float64)


def _token_cos_sin(positions, base, rotary_dim, llama3):
    inv = rope_frequencies.plain(base, rotary_dim, np.float64)
    inv = inv if llama3 is None else rope_frequencies.llama3(inv, llama3)
    angle = positions.astype(np.float64)[:, None] * inv
    return round_to(np.cos(angle), np.float32), round_to(np.sin(angle), np.float32)


@op(
    row=_ROW,
    args={
        "rope_parameters": Value("a mapping with the keys of Hugging Face's rope_parameters", example={}),
        "head_size": Scalar(int, minimum=2, example=64),
        "max_position": Scalar(int, minimum=1, example=32),
        "dtype": Choice(("float32", "bfloat16", "float16")),
        "emulate": Choice(("f32",), optional=True),
    },
    returns={"cos_sin_cache": Tensor("P rotary_dim")},
    rounding={
        "vt": ("everything in float64, one rounding to `dtype`",),
        "f32": ("exponent, power, reciprocal, scaling, angle, cos or sin, mscale: each to float32", "then to `dtype`"),
    },
    parity=Parity("bytes", why="a table made on the host, once"),
    mirror=Bound(ulps=0, why="a host table: float64 or the declared float32 roundings in both arithmetics"),
    nan="none: no tensor goes in",
    layout="row t is [cos of all pairs | sin of all pairs]",
    upstream="vllm/model_executor/layers/rotary_embedding: get_rope(...).cos_sin_cache; emulate='f32' follows its roundings",
    requires=(_parameters_make_a_table,),
    examples=(
        {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}, "head_size": 128, "max_position": 33},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **_LLAMA3_8B}, "emulate": "f32"},
        {
            "rope_parameters": {
                "rope_type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7,
            },
            "dtype": "bfloat16",
        },
        {
            "rope_parameters": {
                "rope_type": "longrope", "original_max_position_embeddings": 8,
                "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 4.0, 8.0, 16.0],
            },
            "head_size": 8, "dtype": "bfloat16", "emulate": "f32",
        },
    ),
)  # fmt: skip
def rope_build_cache(nx, rope_parameters, *, head_size, max_position, dtype="float32", emulate=None):
    """cache[t] = [cos(t * inv) | sin(t * inv)] * mscale, with inv and mscale of the `rope_type`.

    Shapes: cos_sin_cache [P, rotary_dim] in `dtype`. P is max_position for default, dynamic, ntk, llama3 and
    proportional; max_position * factor for linear (several factors: one table under the other); four times
    max_position with an `mrope_section`; original length * factor for yarn and deepseek_yarn, whatever max_position
    says (with sections 4 * original * factor, and the ramp too takes 4 * original for the length);
    original + max_position for longrope, the short table first: a long-context engine adds original to its positions.
    rotary_dim is `rope_dim`, or int(head_size * partial_rotary_factor), or head_size for proportional. With
    `is_deepseek_v4` the cache is float32 whatever `dtype` says. Attention over deepseek_yarn multiplies its softmax
    scale by g(factor, mscale_all_dim)^2 on its own.
    Rounding points: "vt" rounds once; emulate="f32" rounds where vLLM's float32 tensors do.
    Errors: ContractError for an unknown rope_type, missing or impossible parameters, an odd rotary width.
    Source: arXiv 2104.09864 (RoPE), 2309.00071 (YaRN), 2402.13753 (LongRoPE); vllm rotary_embedding/__init__.py.
    """
    real = np.float64 if emulate is None else np.float32
    kept = "float32" if rope_parameters.get("is_deepseek_v4") else dtype
    parts = rope_frequencies.tables(rope_parameters, head_size, max_position, real)
    return rope_frequencies.fill(parts, storage(kept), real)


@op(
    row=_ROW,
    args={
        "positions": _POSITIONS,
        "base": Scalar(above=0, example=10000.0),
        "rotary_dim": Scalar(int, minimum=2, axis="rotary_dim"),
        "llama3": _LLAMA3,
    },
    returns={"cos_sin": Tensor("T rotary_dim", dtypes=("float32",))},
    rounding=(_ANGLES,),
    parity=Parity("bytes", why="made on the host, once a step"),
    mirror=Bound(ulps=0, why="angles are float64 in both arithmetics"),
    nan="none: positions are integers",
    upstream="vt:: op; in vLLM the cache of rotary_embedding/base.py, in float32 throughout",
    requires=(_rotary_dim_is_even, positions_in_table, _llama3_is_complete),
    examples=({"T": 5, "rotary_dim": 64}, {"T": 3, "rotary_dim": 2, "base": 5e5, "llama3": _LLAMA3_8B, "positions": "int64"}),
)
def rope_cos_sin_cache(nx, positions, *, base, rotary_dim, llama3=None):
    """cos_sin[t] = [cos(positions[t] * base^(-2i/rotary_dim)) | sin(the same)], the rows that one step needs.

    Shapes: positions [T]; cos_sin float32 [T, rotary_dim]. `llama3` rescales the frequencies.
    Rounding points: each cos and sin once, from a float64 angle.
    Errors: ContractError for negative positions, an odd rotary_dim, incomplete llama3 parameters.
    Source: arXiv 2104.09864, equation 34.
    """
    return np.concatenate(_token_cos_sin(positions, base, rotary_dim, llama3), axis=-1)


@op(
    row=_ROW,
    args={
        "q": Tensor("T Hq D", layout="strided"),
        "k": Tensor("T Hk D", like="q", layout="strided"),
        "positions": _POSITIONS,
        "base": Scalar(above=0, example=10000.0),
        "rotary_dim": Scalar(int, minimum=2, axis="rotary_dim"),
        "llama3": _LLAMA3,
    },
    returns={"q": Tensor("T Hq D", like="q"), "k": Tensor("T Hk D", like="k")},
    rounding=(_ANGLES, *_ROTATED),
    parity=Parity("bytes"),
    mirror=_ROTATION,
    nan=_NAN,
    upstream="vt:: op; vLLM has float32 caches instead, 1e-7 * position away",
    requires=(rotary_lanes_fit, positions_in_table, _llama3_is_complete),
    examples=(
        {"T": 3, "Hq": 4, "Hk": 2, "D": 64, "rotary_dim": 64},
        {"T": 2, "Hq": 3, "Hk": 1, "D": 80, "rotary_dim": 20, "q": "bfloat16", "base": 5e5, "llama3": _LLAMA3_8B},
    ),
)
def rope_neox(nx, q, k, positions, *, base, rotary_dim, llama3=None):
    """(x, y) -> (x cos a - y sin a, y cos a + x sin a), a = position * base^(-2i/rotary_dim), pair i = lanes i, half + i.

    Shapes: q [T, Hq, D], k [T, Hk, D] of one dtype, unit inner stride; positions [T]; returns new (q, k). Lanes from
    rotary_dim on keep their bytes.
    Rounding points: cos and sin to float32, then each result once. Equals rope_cos_sin_cache followed by
    rope_from_cache to the byte.
    Errors: ContractError for negative positions, rotary_dim odd or beyond D, mixed dtypes.
    Source: arXiv 2104.09864, in GPT-NeoX's pairing.
    """
    cos, sin = _token_cos_sin(positions, base, rotary_dim, llama3)
    return rotate(nx, q, cos, sin, is_neox=True), rotate(nx, k, cos, sin, is_neox=True)


@op(
    row=_ROW,
    args={
        "q": Tensor("T Hq D", layout="strided"),
        "k": Tensor("T Hk D", like="q", optional=True, layout="strided"),
        "positions": Tensor("... T", dtypes=IDS, values=_draw_positions),
        "cos_sin_cache": _TABLE,
        "is_neox": Flag(),
        "mrope_section": Value("three counts of pairs for time, height and width", optional=True),
        "mrope_interleaved": Flag(),
        "rope_dim_offset": Scalar(int, minimum=0),
        "inverse": Flag(),
        "rounding": Choice(("vt", "vllm_native")),
    },
    returns={"q": Tensor("T Hq D", like="q"), "k": Tensor("T Hk D", like="k", optional=True)},
    rounding={
        "vt": _ROTATED,
        "vllm_native": ("each of the four products to the wider of q's and the cache's dtype", *_ROTATED),
    },
    parity=Parity("bytes"),
    mirror=_ROTATION,
    nan=_NAN,
    upstream="torch.ops._C.rotary_embedding rounds as vt; forward_native of rotary_embedding/{base,mrope,"
    "deepseek_scaling_rope,phi3_long_rope_scaled_rope}.py as vllm_native",
    requires=(rotary_lanes_fit, cache_is_float32_or_matches, positions_match_sections, positions_in_table),
    examples=(
        {"T": 3, "Hq": 4, "Hk": 2, "D": 64, "P": 50, "rotary_dim": 64, "k": "float32"},
        {"T": 2, "Hq": 3, "Hk": 1, "D": 80, "P": 9, "rotary_dim": 20, "q": "bfloat16", "k": "bfloat16", "is_neox": False},
        {
            "...": (3,), "T": 4, "Hq": 2, "Hk": 1, "D": 128, "P": 40, "rotary_dim": 64, "q": "bfloat16", "k": "bfloat16",
            "cos_sin_cache": "bfloat16", "mrope_section": (11, 11, 10), "mrope_interleaved": True, "rounding": "vllm_native",
        },
        {"T": 2, "Hq": 2, "D": 96, "P": 7, "rotary_dim": 32, "q": "bfloat16", "rope_dim_offset": 64, "inverse": True},
    ),
)  # fmt: skip
def rope_from_cache(
    nx, q, k, positions, cos_sin_cache, *, is_neox=True, mrope_section=None, mrope_interleaved=False,
    rope_dim_offset=0, inverse=False, rounding="vt",
):  # fmt: skip
    """(x, y) -> (x c - y s, y c + x s), with c and s of pair i from the cache row of the token's position.

    Shapes: q [T, Hq, D], k [T, Hk, D] or None, of one dtype, unit inner stride (every other stride is free: slices of
    a fused projection are fine); cos_sin_cache [P, rotary_dim] in float32 or q's dtype; positions [T], or [3, T]
    (time, height, width) with mrope_section = (sT, sH, sW). Returns new (q, k), or q alone where k is None. Pairs are
    lanes i and half + i, or 2i and 2i + 1 without is_neox. Sections: the first sT pairs read the time row, the next
    sH the height row, the rest the width row; interleaved, pair i reads height where i % 3 == 1 and i <= 3 sH, width
    where i % 3 == 2 and i <= 3 sW, else time. DeepSeek-V4 rotates the last lanes (rope_dim_offset = D - rotary_dim)
    and undoes the rotation of the attention output with `inverse` (s -> -s). Other lanes keep their bytes.
    Rounding points: "vt" (vLLM's CUDA op) once per result; "vllm_native" also each product.
    Errors: ContractError for positions outside [0, P), widths that are odd or beyond D, sections that do not add up
    to the pairs, mixed dtypes.
    Source: arXiv 2104.09864, 2409.12191 (M-RoPE); vllm/model_executor/layers/rotary_embedding/{base,mrope}.py.
    """
    cos, sin = cos_sin_rows(cos_sin_cache, positions, mrope_section, mrope_interleaved)
    products = None if rounding == "vt" else cos.dtype if cos.dtype == np.float32 else q.dtype
    how = {"is_neox": is_neox, "offset": rope_dim_offset, "inverse": inverse, "product_dtype": products}
    rotated_q = rotate(nx, q, cos, sin, **how)
    return rotated_q if k is None else (rotated_q, rotate(nx, k, cos, sin, **how))


def _normed(nx, x, weight, eps, gemma):
    """RMSNorm over the head, not yet rounded."""
    mean = nx.div(nx.sum(nx.mul(x, x), order=_TREE), nx.const(x.shape[-1]))
    inv = nx.div(nx.const(1), nx.sqrt(nx.add(mean, nx.const(eps))))
    weight = nx.load(weight)
    return nx.mul(nx.mul(x, inv[..., None]), nx.add(weight, nx.const(1)) if gemma else weight)


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
    row=_ROW,
    args={
        "qgate": Tensor("T Hq*2*D", layout="rows"),
        "kf": Tensor("T Hk*D", layout="rows"),
        "q_norm": Tensor("D", dtypes=("float32",)),
        "k_norm": Tensor("D", dtypes=("float32",)),
        "cos_sin": Tensor("T rotary_dim", values=_draw_table),
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
    order=str(_TREE),
    parity=Parity("bytes"),
    mirror=_NORM_ROTATION,
    nan="a NaN spoils its head of q or k; the gate keeps its bytes",
    layout="each head's chunk of qgate is D lanes of q, then D lanes of gate",
    upstream="vllm/model_executor/layers/fused_qk_norm_rope.py: fused_qk_rmsnorm_rope_gate rounds as vllm, and takes "
    "weights that have their 1 already",
    requires=(rotary_lanes_fit, _vllm_inputs_are_half),
    examples=(
        {"T": 3, "Hq": 2, "Hk": 1, "D": 64, "rotary_dim": 16},
        {"T": 2, "Hq": 3, "Hk": 2, "D": 40, "rotary_dim": 40, "qgate": "bfloat16", "kf": "bfloat16", "rounding": "vllm"},
        {"T": 2, "Hq": 1, "Hk": 1, "D": 300, "rotary_dim": 64, "qgate": "bfloat16", "gemma": False, "gate_dtype": "float32"},
    ),
)
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
    chunks = qgate.reshape(tokens, -1, 2 * width)

    def front(x, weight):
        normed = _normed(nx, nx.load(x), weight, eps, gemma)
        normed = nx.load(nx.store(normed, x.dtype)) if rounding == "vllm" else normed
        return _rotate_unrounded(nx, normed, cos, sin, True, out_dtype)

    gate = chunks[..., width:]
    gate = np.array(gate, order="C") if gate.dtype == gate_dtype else nx.store(nx.load(gate), gate_dtype)
    return front(chunks[..., :width], q_norm), front(kf.reshape(tokens, -1, width), k_norm), gate


@op(
    row=_ROW,
    args={
        "qkv": Tensor("T Hq*D+Hk*D+Hv*D", layout="rows"),
        "q_weight": Tensor("D"),
        "k_weight": Tensor("D", like="q_weight"),
        "cos_sin_cache": _TABLE,
        "positions": _POSITIONS,
        "num_heads_q": Scalar(int, minimum=1, axis="Hq"),
        "num_heads_k": Scalar(int, minimum=1, axis="Hk"),
        "num_heads_v": Scalar(int, minimum=1, axis="Hv"),
        "head_dim": Scalar(int, minimum=2, axis="D"),
        "eps": Scalar(minimum=0),
        "is_neox": Flag(),
    },
    returns={"qkv": Tensor("T Hq*D+Hk*D+Hv*D", like="qkv")},
    rounding=("q, k = round(rotation of x * inv * w); v is copied",),
    order=str(_TREE),
    parity=Parity("bytes"),
    mirror=Bound("1.5 * ((D/256 + 10) / 2 + 8)", scale=lambda arguments, results: _by_head(arguments, results[0]),
                 why="the norm's error, then the rotation's, within each head"),
    nan="a NaN spoils its head of q or k; v keeps its bytes",
    layout="the heads of q, then of k, then of v",
    upstream="torch.ops._C.fused_qk_norm_rope (vllm/_custom_ops.py)",
    requires=(rotary_lanes_fit, cache_is_float32_or_matches, positions_in_table),
    examples=(
        {"T": 3, "Hq": 4, "Hk": 2, "Hv": 2, "D": 64, "P": 20, "rotary_dim": 64},
        {"T": 2, "Hq": 3, "Hk": 1, "Hv": 1, "D": 128, "P": 7, "rotary_dim": 32, "qkv": "bfloat16", "q_weight": "bfloat16",
         "cos_sin_cache": "bfloat16", "is_neox": False},
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


_CACHE = Tensor("NB BS Hk D", like="k", layout="strided")


@op(
    row=_ROW,
    args={
        "q": Tensor("T Hq D", layout="strided"),
        "k": Tensor("T Hk D", like="q", layout="strided"),
        "v": Tensor("T Hk D", like="q", layout="rows"),
        "positions": _POSITIONS,
        "cos_sin_cache": _TABLE,
        "key_cache": _CACHE,
        "value_cache": _CACHE,
        "slot_mapping": Tensor("S", dtypes=("int64",), values=kv_cache.draw_slots),
        "is_neox": Flag(),
    },
    returns={"q": Tensor("T Hq D", like="q"), "k": Tensor("T Hk D", like="k")},
    rounding=(*_ROTATED, "key_cache holds the rounded k"),
    parity=Parity("bytes"),
    mirror=_ROTATION,
    nan=_NAN,
    mutates=("key_cache", "value_cache"),
    upstream="vllm/v1/attention/backends/triton_attn.py: do_rope_and_kv_cache_update",
    requires=(
        rotary_lanes_fit, cache_is_float32_or_matches, positions_in_table, kv_cache.slots_fit, kv_cache.caches_take_writes
    ),
    examples=(
        {"T": 4, "Hq": 4, "Hk": 2, "D": 64, "P": 20, "rotary_dim": 64, "NB": 3, "BS": 4, "S": 3, "q": "bfloat16"},
        {"T": 2, "Hq": 1, "Hk": 1, "D": 24, "P": 3, "rotary_dim": 16, "NB": 2, "BS": 1, "S": 2, "is_neox": False},
    ),
)  # fmt: skip
def rope_and_cache(nx, q, k, v, positions, cos_sin_cache, key_cache, value_cache, slot_mapping, *, is_neox=True):
    """q, k = rope_from_cache(q, k); then reshape_and_cache(k, v): rotation and paged write in one pass.

    Shapes: q [T, Hq, D], k and v [T, Hk, D], positions [T], cos_sin_cache [P, rotary_dim], caches [NB, BS, Hk, D]
    (any strides but the last), slot_mapping int64 [S], S <= T: tokens from S on are rotated and not stored. Returns
    the new (q, k); key_cache and value_cache are written in place.
    Rounding points: those of rope_from_cache; the cache gets the rounded k and the bytes of v.
    Errors: those of rope_from_cache and reshape_and_cache, raised before anything is written.
    Source: vllm/v1/attention/backends/triton_attn.py: do_rope_and_kv_cache_update.
    """
    q, k = rope_from_cache.body(nx, q, k, positions, cos_sin_cache, is_neox=is_neox)
    kv_cache.reshape_and_cache.body(nx, k, v, key_cache, value_cache, slot_mapping)
    return q, k
