"""Quantised caches of latent attention: DeepSeek-V3.2's latent in FP8 with four scales, and its indexer's keys.

Both are bytes: e4m3 codes, float32 scales and 16-bit numbers, all little-endian, end to end. Every float32 operation
on the way to a code is a rounding point.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops.contract import EXACT as MOVED
from vtlab.ops.contract import Flag, Parity, Tensor, refuse
from vtlab.ops.dtypes import FLOATS
from vtlab.ops.table import op

from .fp8_weights import EXACT
from .kv_blocks import bounds_ascend, pages_exist, places
from .kv_cache import apart, slots_fit, takes_writes, written
from .kv_quant import LAST, OUT_DTYPE, ROW, SLOTS
from .quant_fp8 import E4M3, LARGEST, e4m3, largest, power_of_two, single

LATENT, ROPE, TILE = 512, 64, 128
ENTRY = LATENT + LATENT // TILE * 4 + ROPE * 2
"""656 bytes a token: 512 codes, four float32 scales, 64 numbers of 16 bits."""
INDEXER = 128
_LEAST = float(np.finfo(np.float32).tiny)
_LEAST_KEY = float(np.float32(1e-4))
_HALVES = ("bfloat16", "float16")


def cache_takes_writes(arguments, axes):
    """a cache that is read-only, or in which two elements share memory"""
    takes_writes("kv_cache", arguments["kv_cache"])


def bytes_of(array):
    """The bytes of each row's last axis."""
    return np.ascontiguousarray(array).view(np.uint8)


@op(
    row=ROW,
    args={
        "kv_c": Tensor(f"T {LATENT}", _HALVES, layout="rows"),
        "k_pe": Tensor(f"T {ROPE}", like="kv_c", layout="rows"),
        "kv_cache": Tensor(f"NB BS {ENTRY}", ("uint8",), layout="strided", values="zeros"),
        "slot_mapping": SLOTS,
    },
    returns={},
    rounding=("scale = max(f32(max|x| / 448), 2^-126) of 128 neighbours", "v = f32(x / scale)", "code = e4m3(v)"),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="passed over in the maximum, code 0x7F; bytes of k_pe are copied",
    ties=LAST,
    layout="an entry is 512 codes, the four scales, k_pe; any strides of blocks and slots",
    mutates=("kv_cache",),
    upstream='torch.ops._C_cache_ops.concat_and_cache_mla with kv_cache_dtype "fp8_ds_mla"',
    requires=(slots_fit, cache_takes_writes),
    examples=(
        {"T": 5, "NB": 3, "BS": 4, "S": 4, "kv_c": "bfloat16"},
        {"T": 2, "NB": 1, "BS": 2, "S": 0, "kv_c": "float16"},
    ),
)
def concat_and_cache_ds_mla(nx, kv_c, k_pe, kv_cache, slot_mapping):
    """kv_cache[s // BS, s % BS] = (e4m3(kv_c[i] / scale), scale, k_pe[i]) end to end, scale[g] = max|kv_c[i, g]| / 448.

    Shapes: kv_c bfloat16 or float16 [T, 512], k_pe of that dtype [T, 64] (rows may be strided); kv_cache uint8
    [NB, BS, 656]; slot_mapping int64 [S], S <= T, negative slots skip. Returns nothing: the cache is written in place.
    Rounding points: scale and quotient to float32, then the code; a scale is no power of two, and at least 2^-126.
    Errors: ContractError for another width or dtype, a slot >= NB * BS, S > T, cache elements that overlap.
    Source: DeepSeek-V3.2; vllm/_custom_ops.py: concat_and_cache_mla.
    """
    token = written(slot_mapping)
    tiles = nx.load(kv_c[token]).reshape(token.size, LATENT // TILE, TILE)
    scale = nx.maximum(single(nx, nx.div(largest(nx, tiles), LARGEST)), _LEAST)
    codes = e4m3(nx, nx.div(tiles, scale)).reshape(token.size, LATENT)
    parts = codes, bytes_of(nx.store(scale[..., 0], np.float32)), bytes_of(k_pe[token])
    block, offset = np.divmod(slot_mapping[token], kv_cache.shape[1])
    kv_cache[block, offset] = np.concatenate(parts, axis=-1)


def _draw_entries(rng, axes):
    """Entries of small codes under scales near one."""
    rows = axes["..."]
    parts = (rng.integers(0, 0x59, (*rows, LATENT)).astype(np.uint8),
             bytes_of(rng.uniform(0.5, 2, (*rows, LATENT // TILE)).astype(np.float32)),
             bytes_of(rng.standard_normal((*rows, ROPE)).astype(ml_dtypes.bfloat16)))  # fmt: skip
    return np.concatenate(parts, axis=-1)


@op(
    row=ROW,
    rows="...",
    args={
        "entries": Tensor(f"... {ENTRY}", ("uint8",), layout="strided", values=_draw_entries),
        "out_dtype": OUT_DTYPE,
    },
    returns={"out": Tensor(f"... {LATENT + ROPE}", FLOATS)},
    rounding=("v = f32(code * scale)", "out = round(v), in out_dtype; the 64 bfloat16 numbers likewise"),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="codes or scales of NaN give NaN",
    layout="entries as concat_and_cache_ds_mla stores those of bfloat16",
    upstream="torch.ops._C_cache_ops.cp_gather_and_upconvert_fp8_kv_cache",
    examples=({"...": (3, 2)}, {"...": (5,), "out_dtype": "float32"}, {"...": (0,)}),
)
def dequantize_ds_mla(nx, entries, *, out_dtype=ml_dtypes.bfloat16):
    """out = (e4m3(codes) * their tile's scale, rope part) of entries of 656 bytes.

    Shapes: entries uint8 [..., 656], a whole cache or tokens of it, their rope parts bfloat16; out [..., 576].
    Rounding points: the product to float32, then the store.
    Errors: ContractError for another width or dtype.
    Source: vllm/_custom_ops.py: cp_gather_and_upconvert_fp8_kv_cache.
    """
    lead, scales_end = entries.shape[:-1], ENTRY - 2 * ROPE
    codes = bytes_of(entries[..., :LATENT]).view(E4M3).reshape(*lead, LATENT // TILE, TILE)
    scale = bytes_of(entries[..., LATENT:scales_end]).view("<f4")
    rope = bytes_of(entries[..., scales_end:]).view(ml_dtypes.bfloat16)
    latent = single(nx, nx.mul(nx.load(codes), nx.load(scale)[..., None])).reshape(*lead, LATENT)
    return nx.store(np.concatenate([latent, nx.load(rope)], axis=-1), out_dtype)


def planes(kv_cache):
    """(codes [NB, BS, 128], scale bytes [NB, BS, 4]) of blocks that hold all codes and then all scales."""
    blocks, size, _ = kv_cache.shape
    flat = kv_cache.reshape(blocks, size * (INDEXER + 4))
    return flat[:, : size * INDEXER].reshape(blocks, size, INDEXER), flat[:, size * INDEXER :].reshape(blocks, size, 4)


_PLANES = "a block is the codes of its BS tokens, then their scales: token t at 128 t and 128 BS + 4 t"
_KEYS = Tensor(f"NB BS {INDEXER + 4}", ("uint8",), values=lambda rng, axes: rng.integers(
    0, 0x40, (axes["NB"], axes["BS"], INDEXER + 4)))  # fmt: skip


@op(
    row=ROW,
    args={
        "k": Tensor(f"T {INDEXER}", layout="rows"),
        "kv_cache": _KEYS,
        "slot_mapping": SLOTS,
        "ue8m0": Flag(),
    },
    returns={},
    rounding=("scale = f32(max(max|k|, f32(1e-4)) / 448)", "ue8m0: scale = 2^ceil(log2(scale))", "v = f32(k / scale)",
              "code = e4m3(v)"),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="passed over in the maximum, code 0x7F",
    ties=LAST,
    layout=_PLANES,
    mutates=("kv_cache",),
    upstream="torch.ops._C_cache_ops.indexer_k_quant_and_cache; rocm_aiter_mla_sparse.py: "
    "indexer_k_quant_and_cache_triton, which tiles blocks of more than one token",
    requires=(slots_fit, cache_takes_writes),
    examples=(
        {"T": 5, "NB": 3, "BS": 4, "S": 4, "k": "bfloat16"},
        {"T": 3, "NB": 4, "BS": 1, "S": 3, "k": "float32", "ue8m0": True},
    ),
)  # fmt: skip
def indexer_k_quant_and_cache(nx, k, kv_cache, slot_mapping, *, ue8m0=False):
    """At slot s of token i: e4m3(k[i] / scale) and scale = max(max|k[i]|, 1e-4) / 448, with ue8m0 a power of two.

    Shapes: k [T, 128] (rows may be strided); kv_cache uint8 [NB, BS, 132], contiguous; slot_mapping int64 [S], S <= T,
    negative slots skip. Returns nothing: the cache is written in place.
    Rounding points: scale and quotient (a true division) to float32, then the code. ue8m0 takes the exact ceiling of
    the logarithm: for a scale an ulp or so above 2^k, vLLM's float32 log2 may give 2^k.
    Errors: ContractError for another width, a slot >= NB * BS, S > T.
    Source: DeepSeek-V3.2; vllm/_custom_ops.py: indexer_k_quant_and_cache.
    """
    token = written(slot_mapping)
    value = nx.load(k[token])
    scale = single(nx, nx.div(nx.maximum(largest(nx, value), _LEAST_KEY), LARGEST))
    if ue8m0:
        scale = power_of_two(nx, scale)
    block, offset = np.divmod(slot_mapping[token], kv_cache.shape[1])
    for plane, part in zip(planes(kv_cache), (e4m3(nx, nx.div(value, scale)), bytes_of(nx.store(scale, np.float32)))):
        plane[block, offset] = part


def results_take_writes(arguments, axes):
    """a dst_k or dst_scale that is read-only, or that shares memory with the cache"""
    for name in ("dst_k", "dst_scale"):
        takes_writes(name, arguments[name])
        apart(name, "kv_cache", arguments)


def requests(bounds):
    """(tokens, their requests) below the last bound."""
    request = np.repeat(np.arange(bounds.size - 1), np.diff(bounds))
    return np.arange(request.size), request


def keys_are_there(arguments, axes):
    """bounds that do not start at 0, descend or end beyond dst_k; a page beyond MB, or of a block beyond NB"""
    bounds = arguments["cu_seq_lens"]
    if not isinstance(bounds, np.ndarray):
        return
    bounds_ascend(bounds)
    if int(bounds[-1]) > axes["N"]:
        raise refuse("cu_seq_lens", f"{bounds[-1]} tokens", f"at most {axes['N']} rows of dst_k")
    token, request = requests(bounds)
    if token.size and not axes["BS"]:
        raise refuse("kv_cache", "pages of 0 rows", "at least 1 row")
    page = places(token, request, bounds, None, axes["BS"])[0] if token.size else token
    pages_exist(arguments["block_table"], request, page, axes["NB"])


@op(
    row=ROW,
    args={
        "kv_cache": _KEYS,
        "dst_k": Tensor(f"N {INDEXER}", ("uint8",), values="zeros", holds="float8_e4m3fn"),
        "dst_scale": Tensor("N", ("float32",), values="zeros"),
        "block_table": Tensor("B MB", ("int32",), layout="rows",
                              values=lambda rng, axes: rng.integers(0, axes["NB"], (axes["B"], axes["MB"]))),
        "cu_seq_lens": Tensor("B+1", ("int32",)),
    },
    returns={},
    rounding=("none: bytes are copied",),
    parity=Parity("bytes", why="a copy"),
    mirror=MOVED,
    nan="payloads are kept",
    layout=_PLANES,
    mutates=("dst_k", "dst_scale"),
    upstream="torch.ops._C_cache_ops.cp_gather_indexer_k_quant_cache",
    requires=(results_take_writes, keys_are_there),
    examples=(
        {"NB": 6, "BS": 4, "N": 10, "B": 3, "MB": 3, "cu_seq_lens": np.int32([0, 5, 5, 9])},
        {"NB": 4, "BS": 1, "N": 3, "B": 1, "MB": 3, "cu_seq_lens": np.int32([0, 3])},
    ),
)  # fmt: skip
def cp_gather_indexer_k_quant_cache(nx, kv_cache, dst_k, dst_scale, block_table, cu_seq_lens):
    """dst_k[i], dst_scale[i] = code and scale at block_table[b, p // BS], p % BS; p = i - cu[b], b the request of i.

    Shapes: kv_cache uint8 [NB, BS, 132], contiguous; dst_k uint8 [N, 128], dst_scale float32 [N]; block_table int32
    [B, MB]; cu_seq_lens int32 [B + 1], from 0. Returns nothing: dst_k and dst_scale are written in place up to
    cu_seq_lens[B], and stay beyond.
    Rounding points: none, bytes are copied.
    Errors: ContractError for bounds that descend or end beyond N, a page beyond MB, a block beyond NB.
    Source: vllm/_custom_ops.py: cp_gather_indexer_k_quant_cache.
    """
    token, request = requests(cu_seq_lens)
    page, offset = places(token, request, cu_seq_lens, None, kv_cache.shape[1])
    block = block_table[request, page]
    codes, scales = planes(kv_cache)
    dst_k[token] = codes[block, offset]
    dst_scale.view(np.uint8).reshape(-1, 4)[token] = scales[block, offset]
