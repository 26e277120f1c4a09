"""Softmax attention over contiguous and over paged keys, and the merge of two partial results.

A request's result depends on that request alone: not on its neighbours in the batch, nor on how its queries are cut.
Keys are taken in chunks of CHUNK at fixed absolute positions, each with a maximum of its own, where masked keys weigh
exactly zero; the chunks are merged in ascending order, as far as a row sees them.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from vtlab.ops.contract import Bound, Choice, Flag, Parity, Scalar, Tensor, Value
from vtlab.ops.numerics import parallel, sequential, warp_butterfly
from vtlab.ops.table import op

from . import attention_chunks as chunks
from . import attention_contract as contract
from .attention_chunks import CHUNK
from .attention_contract import key_ranges

_ROW = "KERNEL-ATTN-PAGED"
_SCORES_AT_A_TIME = 1 << 19
_F32 = ("float32",)

_OPTIONS = {
    "scale": Scalar(above=0, example=0.125),
    "causal": Value("bool, or bool [R], one for each request", example=True),
    "window": Value("(left, right), inclusive distances >= 0", optional=True),
    "softcap": Scalar(minimum=0),
    "sinks": Tensor("Hq", _F32, optional=True),
    "lse_includes_sink": Flag(),
    "alibi_slopes": Tensor("Hq", _F32, optional=True),
    "return_lse": Flag(),
    "p_round": Choice(("bfloat16", "float16"), optional=True),
}
_RETURNS = {"out": Tensor("T Hq D", like="q"), "lse": Tensor("Hq T", _F32, optional=True)}
_SHARED = {
    "rounding": {
        "vt": ("out = round(sum_j p_j v_j / l)", "lse = round(m + log(l)) to float32"),
        "p_round": (
            f"p_j = round(exp(s_j - m)) to p_round, m of the {CHUNK} keys that j stands in; l sums the unrounded",
            "out and lse as in vt",
        ),
    },
    "order": f"q . k {chunks.DOT_ORDER} by fma, p . v {sequential} by fma, l {warp_butterfly}, in chunks of {CHUNK} "
    "keys merged in sequence",
    "parity": Parity("rel_l2", 2.0**-7, "bfloat16 roundings of p and of out, each at worst 2**-8 of its value"),
    "nan": "propagates from the keys that a row sees, and from no other; a row without keys gives zeros",
    "lse_base": "natural; -inf for a row without keys, even with sinks",
}


@op(
    row=_ROW,
    args={
        "q": Tensor("T Hq D"),
        "k": Tensor("S Hk D", like="q"),
        "v": Tensor("S Hk D", like="q"),
        **_OPTIONS,
        "causal": Flag(),
    },
    returns=_RETURNS,
    **_SHARED,
    mirror=Bound("1", scale=contract.dense_scale, why=contract.WHY),
    upstream="vllm/v1/attention/backends/cpu_attn.py; torch.nn.functional.scaled_dot_product_attention",
    examples=(
        {"T": 7, "S": 7, "Hq": 4, "Hk": 2, "D": 8, "q": "float32"},
        {"T": 3, "S": 130, "Hq": 2, "Hk": 1, "D": 72, "q": "bfloat16", "window": (127, 0), "return_lse": True},
        {"T": 5, "S": 5, "Hq": 2, "Hk": 2, "D": 16, "q": "float16", "causal": False, "softcap": 5.0,
         "sinks": "float32", "alibi_slopes": "float32"},
    ),
    requires=(contract.heads_divide, contract.window_is_a_pair, contract.dense_causal),
)  # fmt: skip
def attention(
    nx, q, k, v, *, scale, causal=True, window=None, softcap=0.0, sinks=None, lse_includes_sink=True,
    alibi_slopes=None, return_lse=False, p_round=None,
):  # fmt: skip
    """out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j, g]) v[j, g], g = h // (Hq / Hk), over the keys that i sees.

    Shapes: q [T, Hq, D]; k, v [S, Hk, D]; one dtype; query i stands at key position S - T + i (bottom right).
    Options, rounding points and results are those of `paged_attention`, for one request.
    Rounding points: the store of `out`, of `lse`, and of p under `p_round`.
    Errors: ContractError for mismatched shapes, Hq % Hk, scale <= 0, causal with S < T, a bad window.
    Source: Vaswani et al. 2017 (arXiv 1706.03762); vllm/v1/attention/backends/cpu_attn.py.
    """
    first, last, position = key_ranges(q.shape[0], k.shape[0], causal, window)
    pad = [(0, -k.shape[0] % CHUNK), (0, 0), (0, 0)]
    options = (scale, softcap, sinks, lse_includes_sink, alibi_slopes, p_round)
    out, lse = _attend(nx, q, np.pad(k, pad), np.pad(v, pad), first, last, position, *options)
    return (out, lse) if return_lse else out


@op(
    row=_ROW,
    args={
        "q": Tensor("T Hq D"),
        "k_cache": Tensor("NB BS Hk D", layout="strided"),
        "v_cache": Tensor("NB BS Hk D", like="k_cache", layout="strided"),
        "block_table": Tensor("R MB", ("int32",), values=contract.pages),
        "seq_lens": Tensor("R", ("int32",), values=contract.lengths),
        "query_start_loc": Tensor("R+1", ("int32",), values=contract.starts),
        **_OPTIONS,
    },
    returns=_RETURNS,
    **_SHARED,
    mirror=Bound("1", scale=contract.paged_scale, why=contract.WHY),
    layout="each cache any view with unit inner stride: K and V of one page allocation, NHD or HND",
    upstream="torch.ops._C.cpu_attention_with_kv_cache; vllm/v1/attention/ops/triton_unified_attention.py",
    examples=(
        {"T": 5, "Hq": 4, "Hk": 2, "D": 8, "NB": 9, "BS": 4, "R": 2, "MB": 3, "q": "float32", "k_cache": "float32",
         "lens": (4, 6), "new": (4, 1)},
        {"T": 9, "Hq": 2, "Hk": 1, "D": 64, "NB": 40, "BS": 16, "R": 3, "MB": 13, "q": "float32", "lens": (200, 9, 40),
         "k_cache": "bfloat16", "new": (5, 0, 3), "window": (130, 0), "softcap": 30.0, "return_lse": True},
        {"T": 4, "Hq": 4, "Hk": 1, "D": 80, "NB": 6, "BS": 2, "R": 2, "MB": 3, "lens": (5, 3), "new": (1, 3),
         "q": "bfloat16", "k_cache": "bfloat16", "sinks": "float32", "alibi_slopes": "float32",
         "lse_includes_sink": False, "return_lse": True, "p_round": "bfloat16"},
    ),
    requires=(contract.heads_divide, contract.window_is_a_pair, contract.metadata_agrees, contract.pages_exist),
)  # fmt: skip
def paged_attention(
    nx, q, k_cache, v_cache, block_table, seq_lens, query_start_loc, *, scale, causal=True, window=None, softcap=0.0,
    sinks=None, lse_includes_sink=True, alibi_slopes=None, return_lse=False, p_round=None,
):  # fmt: skip
    """out_i = sum_j p_ij / l_i * v_j, p_ij = exp(s_ij - m_i), s_ij = softcap(scale * q_i . k_j) + slope * (j - i).

    Shapes: q [T, Hq, D] holds the new tokens of R requests one after the other, those of request r in rows
    query_start_loc[r] ... query_start_loc[r + 1]. k_cache, v_cache [NB, BS, Hk, D] in one dtype, which may differ from
    q's: key j of request r is k_cache[block_table[r, j // BS], j % BS]. seq_lens [R] counts context and new tokens,
    so row i of L new tokens stands at position seq_lens[r] - L + i. out [T, Hq, D]; lse [Hq, T] float32.
    It sees all keys of its request; not those after it where `causal` (one bool, or one for each request); only those
    with position - left <= j <= position + right in a window. softcap(s) = cap * tanh(s / cap). `sinks` [Hq] is one
    more logit without a value, not scaled; `lse_includes_sink` says whether the returned lse counts it.
    Rows past query_start_loc[R] and rows that see no key give zeros and an lse of -inf.
    Rounding points: the store of `out` and of `lse`; under `p_round` also p, before it meets v, while l sums the
    unrounded p. The mirror sums q . k by fma in 8 lanes, lane t taking dims 8 t ... 8 t + 7 and those 64 further on,
    and adds the lanes in sequence. Keys CHUNK * c ... CHUNK * (c + 1) - 1 have a maximum m_c of their own,
    p_j = exp(s_j - m_c), l_c = sum p_j in 32 lanes and a butterfly, o_c = sum p_j v_j by fma over ascending j. From
    m = -inf, l = o = 0 the chunks merge in sequence: m' = max(m, m_c), a = exp(m - m'), b = exp(m_c - m'),
    l = fma(l, a, l_c * b), o = fma(o, a, o_c * b); last the sink, as a chunk with l_c = 1 and o_c = 0.
    out = o * (1 / l) + 0, so that no zero is negative.
    Errors: ContractError for mismatched shapes or dtypes, Hq % Hk, scale <= 0, a bad window, query_start_loc that does
    not start at 0 or ascend or goes past T, seq_lens beyond MB * BS or, where causal, under L, pages outside NB.
    Table entries that no visible key needs are never read.
    Source: Kwon et al. 2023 (arXiv 2309.06180); vllm/v1/attention/ops/triton_unified_attention.py.
    """
    out = np.zeros(q.shape, q.dtype)
    lse = np.full((q.shape[1], q.shape[0]), -np.inf, np.float32)
    options = (scale, softcap, sinks, lse_includes_sink, alibi_slopes, p_round)
    causal = np.broadcast_to(causal, seq_lens.shape)
    for r, (start, stop) in enumerate(pairwise(query_start_loc.tolist())):
        first, last, position = key_ranges(stop - start, int(seq_lens[r]), bool(causal[r]), window)
        seen = first <= last
        if not seen.any():
            continue
        lo, hi = int(first[seen].min()), int(last[seen].max()) + 1
        k, v = (_gather(cache, block_table[r], lo, hi) for cache in (k_cache, v_cache))
        base = lo - lo % CHUNK
        result = _attend(nx, q[start:stop], k, v, first - base, last - base, position - base, *options)
        out[start:stop], lse[:, start:stop] = result
    return (out, lse) if return_lse else out


def _gather(cache, pages, lo, hi):
    """Keys lo ... hi of a request out of its pages, zero-padded on both sides to whole chunks: [W, Hk, D]."""
    size = cache.shape[1]
    base, end = lo - lo % CHUNK, hi + -hi % CHUNK
    keys = np.zeros((end - base, *cache.shape[2:]), cache.dtype)
    found = cache[pages[lo // size : -(-hi // size)]].reshape(-1, *cache.shape[2:])
    keys[lo - base : hi - base] = found[lo % size :][: hi - lo]
    return keys


def _attend(nx, q, k, v, first, last, position, scale, softcap, sinks, lse_includes_sink, slopes, p_round):
    """One request: q [L, Hq, D] over k, v [W, Hk, D], W whole chunks; row i sees keys first[i] ... last[i]."""
    (rows, heads, width), group = q.shape, q.shape[1] // k.shape[1]
    out, lse = np.zeros(q.shape, q.dtype), np.full((heads, rows), -np.inf, np.float32)
    step = max(1, _SCORES_AT_A_TIME // max(1, group * k.shape[0]))
    tasks = [(h, i) for h in range(0, heads, group) for i in range(0, rows, step)]

    def run(task):
        h, i = task
        own, some = slice(h, h + group), slice(i, min(i + step, rows))
        seen = first[some] <= last[some]
        if not seen.any():
            return
        lo = int(first[some][seen].min()) // CHUNK * CHUNK
        hi = -(-(int(last[some][seen].max()) + 1) // CHUNK) * CHUNK
        keys, values = k[lo:hi, h // group], v[lo:hi, h // group]
        j = np.arange(lo, hi)
        visible = ((j >= first[some, None]) & (j <= last[some, None]))[:, None]  # [n, 1, w]
        scores = nx.matmul(q[some, own].reshape(-1, width), keys, order=chunks.DOT_ORDER, fused=True)
        scores = nx.mul(scores.reshape(-1, group, hi - lo), nx.const(scale))
        if softcap > 0:
            cap = nx.const(softcap)
            scores = nx.mul(cap, nx.tanh(nx.div(scores, cap)))
        if slopes is not None:
            distance = nx.load((j - position[some, None])[:, None])
            scores = nx.add(scores, nx.mul(nx.load(slopes[own])[:, None], distance))
        if not visible.all():
            scores = nx.where(visible, scores, nx.const(-np.inf))
        top, total, mixed = chunks.merge(nx, *chunks.attend(nx, scores, values, visible, p_round))
        row_lse = chunks.lse(nx, top, total)
        if sinks is not None:
            top, total, mixed = chunks.with_sink(nx, top, total, mixed, nx.load(sinks[own]))
            row_lse = chunks.lse(nx, top, total) if lse_includes_sink else row_lse
        inverse = nx.div(nx.const(1), nx.where(total == 0, nx.const(1), total))[..., None]
        mixed = nx.add(nx.mul(mixed, inverse), nx.const(0))
        out[some, own] = nx.store(nx.where(seen[:, None, None], mixed, nx.const(0)), q.dtype)
        lse[own, some] = nx.store(nx.where(seen[:, None], row_lse, nx.const(-np.inf)), np.float32).T

    parallel(run, tasks, work=rows * heads * k.shape[0])
    return out, lse
