"""Rotary position embeddings: the caches of every frequency family, and the rotation of q and k."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vtlab.ops import rotary
from vtlab.ops.contract import Bound, Choice, Flag, Parity, Scalar, Tensor, Value, refuse
from vtlab.ops.dtypes import IDS
from vtlab.ops.dtypes import dtype as storage
from vtlab.ops.numerics import round_to
from vtlab.ops.numerics.angles import cos_sin
from vtlab.ops.table import op

from . import rope_frequencies
from .rope_rotation import (
    cache_is_float32_or_matches,
    cos_sin_rows,
    positions_in_table,
    positions_match_sections,
    rotary_lanes_fit,
    rotate,
)

ROW = "KERNEL-ROPE-QKNORM"
ROTATED = ("q, k = round(x*cos - y*sin), round(y*cos + x*sin)",)
_ANGLES = "cos, sin = float32(cos(a)), float32(sin(a)) of the float64 angle a = position * inv_freq"
# Two roundings of |x cos| + |y sin| <= hypot of the rotated pair <= sqrt(2) * the row's largest value: 2 sqrt(2) < 3.
ROTATION = Bound("3", scale="row", why="one rounding of each product and one of the sum, over a pair inside the row")
NAN = "NaN and infinity spoil both lanes of their pair, also at position 0 (inf * 0); other lanes keep their bytes"


def draw_positions(rng, axes):
    shape = (*axes.get("...", ()), axes["T"])
    return rng.integers(0, axes.get("P", 4096), shape)


def draw_table(rng, axes):
    angle = rng.uniform(0, 2 * np.pi, (axes.get("P", axes["T"]), axes["rotary_dim"] // 2))
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=-1)


POSITIONS = Tensor("T", dtypes=IDS, values=draw_positions)
TABLE = Tensor("P rotary_dim", values=draw_table)
_LLAMA3 = Value(
    "a mapping with factor, low_freq_factor, high_freq_factor, original_max_position_embeddings", optional=True
)
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
            rotary.llama3(np.ones(1), arguments["llama3"])
        except ValueError as error:
            raise refuse("llama3", error.got, error.want) from None


def _parameters_make_a_table(arguments, axes):
    """rope_parameters of an unknown rope_type, without a number that it needs, or with an impossible one"""
    if not isinstance(arguments["rope_parameters"], Mapping):
        raise refuse("rope_parameters", type(arguments["rope_parameters"]).__name__, "a mapping")
    rope_frequencies.tables(arguments["rope_parameters"], arguments["head_size"], arguments["max_position"], np.float64)


def _token_cos_sin(positions, base, rotary_dim, llama3):
    inv = rotary.token_frequencies(base, rotary_dim, llama3)
    with np.errstate(all="ignore"):
        angle = positions.astype(np.float64)[:, None] * inv
    return tuple(round_to(turned, np.float32) for turned in cos_sin(angle))


@op(
    row=ROW,
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
    upstream="vllm/model_executor/layers/rotary_embedding: get_rope(...).cos_sin_cache, rounded as emulate='f32'",
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
    row=ROW,
    rows="T",
    args={
        "positions": POSITIONS,
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
    examples=(
        {"T": 5, "rotary_dim": 64},
        {"T": 3, "rotary_dim": 2, "base": 5e5, "llama3": _LLAMA3_8B, "positions": "int64"},
    ),
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
    row=ROW,
    rows="T",
    args={
        "q": Tensor("T Hq D", layout="strided"),
        "k": Tensor("T Hk D", like="q", layout="strided"),
        "positions": POSITIONS,
        "base": Scalar(above=0, example=10000.0),
        "rotary_dim": Scalar(int, minimum=2, axis="rotary_dim"),
        "llama3": _LLAMA3,
    },
    returns={"q": Tensor("T Hq D", like="q"), "k": Tensor("T Hk D", like="k")},
    rounding=(_ANGLES, *ROTATED),
    parity=Parity("bytes"),
    mirror=ROTATION,
    nan=NAN,
    upstream="vt:: op; vLLM has float32 caches instead, 1e-7 * position away",
    requires=(rotary_lanes_fit, positions_in_table, _llama3_is_complete),
    examples=(
        {"T": 3, "Hq": 4, "Hk": 2, "D": 64, "rotary_dim": 64},
        {"T": 2, "Hq": 3, "Hk": 1, "D": 80, "rotary_dim": 20, "q": "bfloat16", "base": 5e5, "llama3": _LLAMA3_8B},
    ),
)
def rope_neox(nx, q, k, positions, *, base, rotary_dim, llama3=None):
    """(x, y) -> (x cos a - y sin a, y cos a + x sin a), a = position * base^(-2i/rotary_dim), for lanes i and half + i.

    Shapes: q [T, Hq, D], k [T, Hk, D] of one dtype, unit inner stride; positions [T]; returns new (q, k). Lanes from
    rotary_dim on keep their bytes.
    Rounding points: cos and sin to float32, then each result once. Equals rope_cos_sin_cache followed by
    rope_from_cache to the byte.
    Errors: ContractError for negative positions, rotary_dim odd or beyond D, mixed dtypes.
    Source: arXiv 2104.09864, in GPT-NeoX's pairing.
    """
    cos, sin = _token_cos_sin(positions, base, rotary_dim, llama3)
    return rotate(nx, (q, k), cos, sin, is_neox=True)


@op(
    row=ROW,
    rows="T",
    args={
        "q": Tensor("T Hq D", layout="strided"),
        "k": Tensor("T Hk D", like="q", optional=True, layout="strided"),
        "positions": Tensor("... T", dtypes=IDS, values=draw_positions),
        "cos_sin_cache": TABLE,
        "is_neox": Flag(),
        "mrope_section": Value("three counts of pairs for time, height and width", optional=True),
        "mrope_interleaved": Flag(),
        "rope_dim_offset": Scalar(int, minimum=0),
        "inverse": Flag(),
        "rounding": Choice(("vt", "vllm", "vllm_native")),
    },
    returns={"q": Tensor("T Hq D", like="q"), "k": Tensor("T Hk D", like="k", optional=True)},
    rounding={
        "vt": ROTATED,
        "vllm": (*ROTATED, "the products of x are fused into the sum: fma(x, cos, -(y*sin)), fma(x, sin, y*cos)"),
        "vllm_native": ("each of the four products to the wider of q's and the cache's dtype", *ROTATED),
    },
    parity=Parity("bytes"),
    mirror=ROTATION,
    nan=NAN,
    upstream="torch.ops._C.rotary_embedding rounds as vllm; forward_native of rotary_embedding/{base,mrope,"
    "deepseek_scaling_rope,phi3_long_rope_scaled_rope}.py as vllm_native",
    requires=(rotary_lanes_fit, cache_is_float32_or_matches, positions_match_sections, positions_in_table),
    examples=(
        {"T": 3, "Hq": 4, "Hk": 2, "D": 64, "P": 50, "rotary_dim": 64, "k": "float32"},
        {"T": 2, "Hq": 3, "Hk": 1, "D": 80, "P": 9, "rotary_dim": 20, "q": "bfloat16", "k": "bfloat16",
         "is_neox": False, "rounding": "vllm"},
        {
            "...": (3,), "T": 4, "Hq": 2, "Hk": 1, "D": 128, "P": 40, "rotary_dim": 64, "q": "bfloat16",
            "k": "bfloat16", "cos_sin_cache": "bfloat16", "mrope_section": (11, 11, 10), "mrope_interleaved": True,
            "rounding": "vllm_native",
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
    Rounding points: "vt" once per result, its float32 products and sum each rounded; "vllm" (the CUDA op) the same
    with one fused product, which shows in float32 alone; "vllm_native" also rounds each product to storage.
    Errors: ContractError for positions outside [0, P), widths that are odd or beyond D, sections that do not add up
    to the pairs, mixed dtypes.
    Source: arXiv 2104.09864, 2409.12191 (M-RoPE); vllm/model_executor/layers/rotary_embedding/{base,mrope}.py.
    """
    cos, sin = cos_sin_rows(cos_sin_cache, positions, mrope_section, mrope_interleaved)
    how = {"is_neox": is_neox, "offset": rope_dim_offset, "inverse": inverse, "contracted": rounding == "vllm"}
    if rounding == "vllm_native":
        how["product_dtype"] = cos.dtype if cos.dtype == np.float32 else q.dtype
    return rotate(nx, (q,), cos, sin, **how)[0] if k is None else rotate(nx, (q, k), cos, sin, **how)
