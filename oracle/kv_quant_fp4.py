"""NVFP4 in the paged KV cache: e2m1 codes and an e4m3 scale for each 16 neighbours, under one float32 scale a tensor.

A block of a side, keys or values, is all its codes and then all its scales. Every float32 operation on the way to a
code is a rounding point.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Parity, Tensor, refuse
from vtlab.ops.nvfp4 import BLOCK
from vtlab.ops.table import op

from .fp4 import NAN, block_quant
from .fp8_matmul import scales_are
from .fp8_weights import EXACT
from .kv_cache import caches_take_writes, slots_fit, written
from .kv_quant import LAST, ROW, SLOTS

_SCALE = Tensor("1", ("float32",), values=lambda rng, axes: rng.uniform(0.005, 0.02, 1))
_TOKENS = 4
"""Neighbouring tokens whose scales of values take turns."""


def two_scales(arguments, axes):
    """scales are positive and finite; on a GPU the host does not read them"""
    for name in ("k_scale", "v_scale"):
        scales_are(name, arguments[name])


two_scales.finite = ("k_scale", "v_scale")


def heads_first(cache) -> bool:
    """Whether a block of the cache [NB, BS, H, F] is head after head, not token after token."""
    return cache.shape[2] > 1 and cache.strides[2] != cache.shape[3]


def sides_are_whole(arguments, axes):
    """pages of whole fours of tokens, heads of values of whole 64; blocks without gaps, token or head after head"""
    if axes["BS"] % _TOKENS:
        raise refuse("value_cache", f"{axes['BS']} tokens a page", f"a multiple of {_TOKENS}")
    if axes["Gv"] % _TOKENS:
        raise refuse("value", f"{BLOCK * axes['Gv']} elements a head", f"a multiple of {BLOCK * _TOKENS}")
    for name in ("key_cache", "value_cache"):
        cache = arguments[name]
        _, size, heads, width = cache.shape
        token, head = (width, size * width) if heads_first(cache) else (heads * width, width)
        for axis, want in ((1, token), (2, head), (3, 1)):
            if cache.size and cache.shape[axis] > 1 and cache.strides[axis] != want:
                raise refuse(name, f"strides {tuple(cache.strides)}", "blocks without gaps")


def planes(cache):
    """(codes [NB, BS, H, 8 G], scales [NB, BS, H, G]) on the memory of a cache [NB, BS, H, 9 G]."""
    blocks, size, heads, width = cache.shape
    first = heads_first(cache)
    flat = (cache.swapaxes(1, 2) if first else cache).reshape(blocks, size * heads * width)
    groups = width // 9
    cut = size * heads * groups * 8
    shape = (heads, size) if first else (size, heads)
    parts = flat[:, :cut].reshape(blocks, *shape, 8 * groups), flat[:, cut:].reshape(blocks, *shape, groups)
    return tuple(part.swapaxes(1, 2) for part in parts) if first else parts


def interleaved(offset, group, groups):
    """Where the scale of a value's group of the token at `offset` of its page stands: (offset, group) among scales."""
    quarter = groups // _TOKENS
    return offset // _TOKENS * _TOKENS + group // quarter, group % quarter * _TOKENS + offset % _TOKENS


@op(
    row=ROW,
    args={
        "key": Tensor("T H 16*G", layout="rows"),
        "value": Tensor("T H 16*Gv", like="key", layout="rows"),
        "key_cache": Tensor("NB BS H 9*G", ("uint8",), layout="strided", values="zeros"),
        "value_cache": Tensor("NB BS H 9*Gv", ("uint8",), layout="strided", values="zeros"),
        "slot_mapping": SLOTS,
        "k_scale": _SCALE,
        "v_scale": _SCALE,
    },
    returns={},
    rounding=("g = f32(1 / k_scale)", "scale = e4m3(f32(g * f32(max|x| * f32(1/6))))",
              "f = f32(1 / f32(f32(scale) * f32(1 / g))), 0 for scale 0", "v = f32(x * f)", "code = e2m1(v), no -0"),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan=NAN.split(";")[0],
    ties=f"to the even code; {LAST}",
    layout="a block of a cache is the codes of all its heads and tokens, then their scales, both token after token or "
    "both head after head, as the cache's strides say (`planes`). Byte j of a row of codes holds element 2j in its low "
    "half. Scales of keys stand in order; of values, the scale of token t of its page and group s stands at token "
    "t//4*4 + s//(Gv/4), group s%(Gv/4)*4 + t%4",
    mutates=("key_cache", "value_cache"),
    upstream='torch.ops._C_cache_ops.reshape_and_cache_flash with kv_cache_dtype "nvfp4", which no GPU before '
    "Blackwell runs; flashinfer nvfp4_quantize_paged_kv_cache",
    requires=(sides_are_whole, slots_fit, two_scales, caches_take_writes),
    examples=(
        {"T": 5, "H": 2, "G": 4, "Gv": 4, "NB": 3, "BS": 4, "S": 4, "key": "bfloat16"},
        {"T": 3, "H": 1, "G": 3, "Gv": 8, "NB": 2, "BS": 8, "S": 3},
        {"T": 2, "H": 3, "G": 1, "Gv": 4, "NB": 1, "BS": 4, "S": 0, "key": "float16"},
    ),
)  # fmt: skip
def reshape_and_cache_nvfp4(nx, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale):
    """At slot s of token i: e2m1 codes of key[i] and, for 16 neighbours, e4m3(max / (6 k_scale)); of value[i] likewise.

    Shapes: key [T, H, 16 G], value [T, H, 16 Gv] (rows may be strided); caches uint8 [NB, BS, H, 9 G] and
    [NB, BS, H, 9 Gv], for a head's codes and scales, without gaps in a block; slot_mapping int64 [S], S <= T, negative
    slots skip; k_scale, v_scale float32 [1]. A code stands for e2m1 * scale * k_scale. Returns nothing: the caches are
    written in place, and every other byte of them stays.
    Rounding points: as scaled_fp4_quant with the global scale f32(1 / k_scale), true divisions. vLLM's CUDA op takes
    approximate reciprocals, so that its scales and codes may differ within an ulp or two of a tie, and keeps -0.
    Errors: ContractError for pages of no whole fours of tokens, Gv no multiple of 4, blocks with gaps, scales that are
    not positive and finite, a slot >= NB * BS, S > T, mismatched shapes.
    Source: flashinfer/quantization/fp4_quantization.py: nvfp4_quantize_paged_kv_cache; vllm/utils/torch_utils.py:
    nvfp4_split_data_scale.
    """
    token = written(slot_mapping)
    block, offset = np.divmod(slot_mapping[token], key_cache.shape[1])
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        codes, scales = block_quant(nx, nx.load(rows[token]), _reciprocal(nx, scale), False, "vt")
        stored, beside = planes(cache)
        stored[block, offset] = codes
        if cache is key_cache:
            beside[block, offset] = scales
            continue
        groups = scales.shape[-1]
        at, place = interleaved(offset[:, None], np.arange(groups), groups)
        beside[block[:, None], at, :, place] = scales.swapaxes(1, 2)


def _reciprocal(nx, scale):
    return nx.load(nx.store(nx.div(1, nx.load(scale)), np.float32))
