"""FP8 in the paged KV cache: bytes of e4m3 or e5m2 under one scale a tensor, or one a head.

Caches are uint8 arrays of codes in the layouts of the 16-bit cache. A code is the value divided by its scale, a true
division; every float32 operation on the way to it is a rounding point.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops.contract import Choice, Parity, Tensor, refuse
from vtlab.ops.dtypes import FLOATS
from vtlab.ops.table import op

from .fp8_matmul import draw_codes, scales_are
from .fp8_weights import EXACT
from .kv_cache import caches_take_writes, draw_slots, slots_fit, written
from .quant_fp8 import E4M3, e4m3, single

ROW = "KERNEL-KV-QUANT"
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
LAST = "of several tokens with one slot the last is kept (on a device: undefined)"
OUT_DTYPE = Choice(FLOATS)
SLOTS = Tensor("S", dtypes=("int64",), values=draw_slots)
_KIND = Choice(("fp8", "fp8_e4m3", "fp8_e5m2"))


def _draw_scales(name):
    return lambda rng, axes: rng.uniform(0.01, 0.05, axes.get(name, 1))


def e5m2(nx, value):
    """The codes of float32(value): to nearest even, saturating at +-57344; a NaN is 0x7F."""
    value = single(nx, value)
    return np.where(np.isnan(value), np.uint8(0x7F), nx.store(value, E5M2, saturate=True).view(np.uint8))


def one_or_a_head(arguments, axes):
    """scales are [1] or [H], positive and finite; on a GPU the host does not read them"""
    for name in ("k_scale", "v_scale", "scale"):
        if name in arguments:
            value = arguments[name]
            if tuple(value.shape) not in ((1,), (axes["H"],)):
                raise refuse(name, f"shape {tuple(value.shape)}", f"(1,) or ({axes['H']},)")
            scales_are(name, value)


one_or_a_head.finite = ("k_scale", "v_scale", "scale")


def put(cache, slots, token, codes):
    """cache[slot // BS, slot % BS] = codes, a row a token."""
    block, offset = np.divmod(slots[token], cache.shape[1])
    cache[block, offset] = codes


@op(
    row=ROW,
    args={
        "key": Tensor("T H D", layout="rows"),
        "value": Tensor("T H Dv", like="key", layout="rows"),
        "key_cache": Tensor("NB BS H D", ("uint8",), layout="strided", values="zeros", holds="float8_e4m3fn"),
        "value_cache": Tensor("NB BS H Dv", ("uint8",), layout="strided", values="zeros", holds="float8_e4m3fn"),
        "slot_mapping": SLOTS,
        "k_scale": Tensor("Sk", ("float32",), values=_draw_scales("Sk")),
        "v_scale": Tensor("Sv", ("float32",), values=_draw_scales("Sv")),
        "kind": _KIND,
    },
    returns={},
    rounding=("v = f32(x / scale)", "code = e4m3(v), or e5m2(v), saturating"),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="code 0x7F; +-inf becomes the largest value",
    ties=LAST,
    layout="any cache strides with a unit last one, as reshape_and_cache",
    mutates=("key_cache", "value_cache"),
    upstream="torch.ops._C_cache_ops.reshape_and_cache_flash; triton_reshape_and_cache_flash, which writes e4m3 for "
    "every kind",
    requires=(slots_fit, one_or_a_head, caches_take_writes),
    examples=(
        {"T": 5, "H": 2, "D": 8, "Dv": 8, "NB": 3, "BS": 4, "S": 4, "Sk": 1, "Sv": 1, "key": "bfloat16"},
        {"T": 3, "H": 3, "D": 6, "Dv": 4, "NB": 2, "BS": 16, "S": 3, "Sk": 3, "Sv": 1, "kind": "fp8_e5m2"},
        {"T": 2, "H": 1, "D": 4, "Dv": 4, "NB": 1, "BS": 2, "S": 0, "Sk": 1, "Sv": 1, "key": "float16"},
    ),
)
def reshape_and_cache_fp8(nx, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, *, kind="fp8"):
    """key_cache[s // BS, s % BS] = e4m3(key[i] / k_scale), value_cache likewise, for slots s = slot_mapping[i] >= 0.

    Shapes: key [T, H, D], value [T, H, Dv] (rows may be strided); caches uint8 [NB, BS, H, D] and [NB, BS, H, Dv];
    slot_mapping int64 [S], S <= T; k_scale, v_scale float32 [1] or [H]. `kind` "fp8" is "fp8_e4m3". Returns nothing:
    the caches are written in place, and every other byte of them stays.
    Rounding points: the quotient to float32, then the code, to nearest even and saturating.
    Errors: ContractError for scales that are not positive and finite or of another shape, a slot >= NB * BS, S > T,
    mismatched shapes, cache elements that overlap.
    Source: vllm/_custom_ops.py: reshape_and_cache_flash; vllm/v1/attention/ops/triton_reshape_and_cache_flash.py.
    """
    token = written(slot_mapping)
    encode = e5m2 if kind == "fp8_e5m2" else e4m3
    pairs = ((key, k_scale), (value, v_scale))
    codes = [encode(nx, nx.div(nx.load(rows[token]), nx.load(scale)[:, None])) for rows, scale in pairs]
    for cache, stored in zip((key_cache, value_cache), codes):
        put(cache, slot_mapping, token, stored)


def values_of(nx, codes, kind):
    """The values of codes of a kind; exact."""
    return nx.load(np.ascontiguousarray(codes).view(E5M2 if kind == "fp8_e5m2" else E4M3))


@op(
    row=ROW,
    rows="...",
    args={
        "cache": Tensor("... H D", ("uint8",), layout="strided", holds="float8_e4m3fn",
                        values=lambda rng, axes: draw_codes("N", "H", "D")(rng, {**axes, "N": axes["..."][0]})),
        "scale": Tensor("Sk", ("float32",), values=_draw_scales("Sk")),
        "kind": _KIND,
        "out_dtype": OUT_DTYPE,
    },
    returns={"out": Tensor("... H D", FLOATS)},
    rounding=("v = f32(code * scale)", "out = round(v), in out_dtype"),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="codes of NaN are NaN; infinities of e5m2 stay",
    layout="any strides of blocks, slots and heads",
    upstream="vllm/v1/attention/ops/triton_unified_attention.py; torch.ops._C_cache_ops.convert_fp8",
    requires=(one_or_a_head,),
    examples=(
        {"...": (3,), "H": 2, "D": 8, "Sk": 1},
        {"...": (2,), "H": 3, "D": 5, "Sk": 3, "kind": "fp8_e5m2", "out_dtype": "float32"},
        {"...": (0,), "H": 3, "D": 5, "Sk": 3, "out_dtype": "float16"},
    ),
)  # fmt: skip
def dequantize_kv_fp8(nx, cache, scale, *, kind="fp8", out_dtype=ml_dtypes.bfloat16):
    """out = e4m3(cache) * scale: what attention reads, in the dtype it computes in.

    Shapes: cache uint8 [..., H, D], a whole cache [NB, BS, H, D] or rows of it; scale float32 [1] or [H]; out
    [..., H, D].
    Rounding points: the product to float32, then the store.
    Errors: ContractError for a scale that is not positive and finite or of another shape.
    Source: vllm/v1/attention/ops/triton_unified_attention.py.
    """
    return nx.store(single(nx, nx.mul(values_of(nx, cache, kind), nx.load(scale)[:, None])), out_dtype)
