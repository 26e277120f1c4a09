"""The paged cache of multi-head latent attention: one latent and one rotated key part a token. Nothing rounds."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import EXACT, Scalar, Tensor, refuse
from vtlab.ops.table import op

from .kv_blocks import bounds_ascend, pages_exist, places, starts_on_pages
from .kv_cache import BYTES, MOVED, NAN, ROW, apart, draw_slots, raw, slots_fit, takes_writes, written


def _both_parts_are_there(arguments, axes):
    """a latent or a rotated part without columns"""
    for name, width in (("kv_c", "R"), ("k_pe", "P")):
        if axes[width] == 0:
            raise refuse(name, "0 columns", "at least 1")


def _cache_takes_writes(arguments, axes):
    """a cache that is read-only, in which two elements share memory, or that shares memory with what is stored"""
    takes_writes("kv_cache", arguments["kv_cache"])
    for name in ("kv_c", "k_pe"):
        apart("kv_cache", name, arguments)


@op(
    row=ROW,
    args={
        "kv_c": Tensor("T R", layout="rows"),
        "k_pe": Tensor("T P", like="kv_c", layout="rows"),
        "kv_cache": Tensor("NB BS R+P", like="kv_c", layout="strided"),
        "slot_mapping": Tensor("S", dtypes=("int64",), values=draw_slots),
    },
    returns={},
    rounding=MOVED,
    parity=BYTES,
    mirror=EXACT,
    nan=NAN,
    ties="of several tokens with one slot the last is kept (on a device: undefined)",
    layout="any strides of blocks and of their rows; an entry is the latent (R), then the rotated part (P)",
    mutates=("kv_cache",),
    upstream="torch.ops._C_cache_ops.concat_and_cache_mla",
    requires=(_both_parts_are_there, slots_fit, _cache_takes_writes),
    examples=(
        {"T": 5, "R": 512, "P": 64, "NB": 3, "BS": 16, "S": 4, "kv_c": "bfloat16"},
        {"T": 4, "R": 3, "P": 2, "NB": 2, "BS": 2, "S": 4},
        {"T": 2, "R": 1, "P": 1, "NB": 1, "BS": 2, "S": 0, "kv_c": "float16"},
    ),
)
def concat_and_cache_mla(nx, kv_c, k_pe, kv_cache, slot_mapping):
    """kv_cache[s // BS, s % BS] = (kv_c[i], k_pe[i]) end to end, for every slot s = slot_mapping[i] >= 0.

    Shapes: kv_c [T, R], k_pe [T, P] (rows may be strided: columns of one fused projection), kv_cache [NB, BS, R + P]
    with any strides but a unit last one, all of one float dtype; slot_mapping int64 [S], S <= T. Tokens from S on are
    padding. k_pe is stored as it comes: its rotation is the caller's. Returns nothing: the cache is written in place,
    and every other byte of it stays.
    Rounding points: none, bytes are copied.
    Errors: ContractError for a slot >= NB * BS, S > T, mixed or quantised dtypes, a width other than R + P, R or P of
    0, cache elements that overlap. A quantised cache converts, which is another op.
    Source: arXiv 2405.04434 (DeepSeek-V2), section 2.1; vllm/_custom_ops.py: concat_and_cache_mla.
    """
    token = written(slot_mapping)
    block, offset = np.divmod(slot_mapping[token], kv_cache.shape[1])
    entries, latent = raw(kv_cache), kv_c.shape[1]
    entries[block, offset, :latent] = raw(kv_c)[token]
    entries[block, offset, latent:] = raw(k_pe)[token]


def _dst_takes_writes(arguments, axes):
    """a dst that is read-only, in which two elements share memory, or that shares memory with the cache"""
    takes_writes("dst", arguments["dst"])
    apart("dst", "src_cache", arguments)


def _tokens_have_rows(arguments, axes):
    """more tokens than rows of dst or entries of token_to_seq"""
    if axes["N"] > min(axes["rows"], axes["M"]):
        raise refuse("num_tokens", axes["N"], f"at most {axes['rows']} rows of dst, {axes['M']} of token_to_seq")


def _requests_have_tokens(arguments, axes):
    """bounds that do not start at 0 or descend; a request that does not exist; a token before its request's first"""
    bounds, used = arguments["cu_seq_lens"], arguments["token_to_seq"][: axes["N"]]
    if not isinstance(bounds, np.ndarray):
        return
    bounds_ascend(bounds)
    if used.size and not 0 <= int(used.min()) <= int(used.max()) < axes["B"]:
        raise refuse("token_to_seq", f"requests in [{used.min()}, {used.max()}]", f"in [0, {axes['B']})")
    early = np.arange(axes["N"]) < bounds[used]
    if early.any():
        at = int(np.argmax(early))
        raise refuse("token_to_seq", f"request {used[at]} for token {at}", f"its tokens from {bounds[used[at]]} on")


def _pages_are_there(arguments, axes):
    """starts that are no multiples of BS or negative; a token's page beyond MB, or of a block beyond NB"""
    bounds, starts, size = arguments["cu_seq_lens"], arguments["seq_starts"], axes["BS"]
    if not isinstance(bounds, np.ndarray):
        return
    starts_on_pages(starts, size)
    token, request = _gathered(arguments["token_to_seq"], bounds, axes["N"])
    if token.size and not size:
        raise refuse("src_cache", "pages of 0 rows", "at least 1 row")
    pages_exist(arguments["block_table"], request, places(token, request, bounds, starts, size)[0], axes["NB"])


def _gathered(token_to_seq, cu_seq_lens, num_tokens):
    """Tokens that lie before the end of their request, and these requests."""
    request = token_to_seq[:num_tokens]
    token = np.flatnonzero(np.arange(num_tokens) < cu_seq_lens[1:][request])
    return token, request[token]


@op(
    row=ROW,
    args={
        "dst": Tensor("rows D", layout="strided"),
        "src_cache": Tensor("NB BS D", like="dst", layout="strided"),
        "block_table": Tensor("B MB", dtypes=("int32",), layout="rows",
                              values=lambda rng, axes: rng.integers(0, axes["NB"], (axes["B"], axes["MB"]))),
        "cu_seq_lens": Tensor("B+1", dtypes=("int32",)),
        "token_to_seq": Tensor("M", dtypes=("int32",)),
        "num_tokens": Scalar(int, minimum=0, axis="N"),
        "seq_starts": Tensor("B", dtypes=("int32",), optional=True,
                             values=lambda rng, axes: axes["BS"] * rng.integers(0, 2, axes["B"])),
    },
    returns={},
    rounding=MOVED,
    parity=BYTES,
    mirror=EXACT,
    nan=NAN,
    layout="entries of block_table that no token needs, and of token_to_seq from num_tokens on, may hold anything",
    mutates=("dst",),
    upstream="torch.ops._C_cache_ops.gather_and_maybe_dequant_cache with kv_cache_dtype \"auto\": widths 320, 512 and "
    "576 only; it skips a page beyond MB, which is refused here",
    requires=(_dst_takes_writes, _tokens_have_rows, _requests_have_tokens, _pages_are_there),
    examples=(
        {"rows": 12, "D": 576, "NB": 6, "BS": 4, "B": 3, "MB": 3, "N": 9, "M": 10, "dst": "bfloat16",
         "cu_seq_lens": np.int32([0, 5, 5, 9]), "token_to_seq": np.int32([0] * 5 + [2] * 4 + [7]),
         "seq_starts": "int32"},
        {"rows": 5, "D": 3, "NB": 4, "BS": 2, "B": 2, "MB": 2, "N": 5, "M": 5,
         "cu_seq_lens": np.int32([0, 2, 4]), "token_to_seq": np.int32([0, 0, 1, 1, 1])},
        {"rows": 2, "D": 1, "NB": 1, "BS": 1, "B": 1, "MB": 1, "N": 0, "M": 0, "dst": "float16",
         "cu_seq_lens": np.int32([0, 0]), "token_to_seq": np.int32([])},
    ),
)  # fmt: skip
def gather_mla_cache(nx, dst, src_cache, block_table, cu_seq_lens, token_to_seq, *, num_tokens, seq_starts=None):
    """dst[i] = src_cache[block_table[b, p // BS], p % BS], p = i - cu[b] + seq_starts[b], b = token_to_seq[i].

    Shapes: dst [at least N, D], src_cache [NB, BS, D] of the same float dtype, unit inner strides; block_table int32
    [B, MB]; cu_seq_lens int32 [B + 1], from 0; token_to_seq int32 [at least N]; N = num_tokens; seq_starts int32 [B]
    or None (all 0), multiples of BS: where the chunk begins in its request. A token i >= cu[b + 1] is skipped. Returns
    nothing: dst is a workspace written in place, its rows of skipped tokens and from N on stay.
    Rounding points: none, bytes are copied.
    Errors: ContractError for N beyond dst or token_to_seq, a request outside [0, B), i < cu[b], bounds that descend,
    starts off a page, a page beyond MB, a block beyond NB, mixed or quantised dtypes.
    Source: vllm/_custom_ops.py: gather_and_maybe_dequant_cache.
    """
    token, request = _gathered(token_to_seq, cu_seq_lens, num_tokens)
    page, offset = places(token, request, cu_seq_lens, seq_starts, src_cache.shape[1])
    raw(dst)[token] = raw(src_cache)[block_table[request, page], offset]
