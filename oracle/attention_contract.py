"""What the attention contracts say beyond shapes: who sees which keys, refusals, example metadata, error scales."""

from __future__ import annotations

import itertools

import numpy as np

from vtlab.ops.contract import refuse
from vtlab.ops.numerics import widen

WHY = """a score is off by (D + 4) u A, A = scale |q| |k| + softcap + |alibi| + |sink| bounding all it is made of; so
p, l and their quotient by twice that and a few u more, also over several maxima, whose differences add up to no more;
the sums over S keys, the few u of each merge among them, add 2 S u. A p_round that flips costs 2**-8 of p."""


def key_ranges(new, total, causal, window):
    """(first, last, position) of each of `new` queries over `total` keys; last < first where a query sees none."""
    position = np.arange(total - new, total)
    first = np.zeros(new, np.int64)
    last = position.copy() if causal else np.full(new, total - 1)
    if window is not None:
        first = np.maximum(first, position - window[0])
        last = np.minimum(last, position + window[1])
    return first, np.minimum(last, total - 1), position


def heads_divide(arguments, axes):
    """Hq a multiple of Hk"""
    if axes["Hk"] == 0 or axes["Hq"] % axes["Hk"]:
        raise refuse("q", f"{axes['Hq']} query heads", f"a multiple of the {axes['Hk']} key heads")


def window_is_a_pair(arguments, axes):
    """window a pair of integers >= 0"""
    window = arguments["window"]
    if window is None:
        return
    whole = isinstance(window, (tuple, list)) and len(window) == 2
    whole = whole and all(isinstance(w, (int, np.integer)) and not isinstance(w, bool) and w >= 0 for w in window)
    if not whole:
        raise refuse("window", repr(window), "(left, right), integers >= 0, or None")


def dense_causal(arguments, axes):
    """S >= T where causal"""
    if arguments["causal"] and axes["S"] < axes["T"]:
        raise refuse("k", f"{axes['S']} keys", f">= {axes['T']}, the number of queries, where causal")


def metadata_agrees(arguments, axes):
    """R >= 1; query_start_loc from 0, ascending, at most T; seq_lens within MB * BS and, where causal, >= new tokens

    Metadata in a device's memory is not read: that would wait for the device, and could not be captured.
    """
    if axes["R"] < 1:
        raise refuse("seq_lens", "no request", "at least one")
    if axes["BS"] < 1:
        raise refuse("k_cache", "pages of 0 keys", "at least 1")
    causal = arguments["causal"]
    several = hasattr(causal, "strides") and not isinstance(causal, np.generic)
    if not isinstance(causal, (bool, np.bool_)) and not (
        several and causal.dtype == np.bool_ and causal.shape == (axes["R"],) and causal.flags.c_contiguous
    ):
        raise refuse("causal", repr(causal), f"a bool, or a bool array of shape ({axes['R']},)")
    if not _on_host(arguments):
        return
    starts, lengths = arguments["query_start_loc"].tolist(), arguments["seq_lens"].tolist()
    new = [stop - start for start, stop in itertools.pairwise(starts)]
    if starts[0] != 0 or min(new) < 0 or starts[-1] > axes["T"]:
        raise refuse("query_start_loc", starts, f"ascending from 0 to at most {axes['T']}")
    if min(lengths) < 0 or max(lengths) > axes["MB"] * axes["BS"]:
        raise refuse("seq_lens", lengths, f"0 ... {axes['MB'] * axes['BS']} (MB * BS)")
    needed = causal.tolist() if several else [bool(causal)] * len(new)
    if any(one and length < count for one, length, count in zip(needed, lengths, new)):
        raise refuse("seq_lens", lengths, f">= {new}, the new tokens, where causal")


def _on_host(arguments):
    return all(isinstance(arguments[name], np.ndarray) for name in ("query_start_loc", "seq_lens", "block_table"))


def pages_exist(arguments, axes):
    """block_table entries that visible keys need within 0 ... NB - 1, where the table is in the host's memory"""
    if not _on_host(arguments):
        return
    starts, size, table = arguments["query_start_loc"], axes["BS"], arguments["block_table"]
    if table.size and table.min() >= 0 and table.max() < axes["NB"]:
        return  # all of it, needed or not
    causal = np.broadcast_to(arguments["causal"], (axes["R"],))
    for r, total in enumerate(arguments["seq_lens"]):
        first, last, _ = key_ranges(int(starts[r + 1] - starts[r]), int(total), bool(causal[r]), arguments["window"])
        seen = first <= last
        if not seen.any():
            continue
        pages = table[r, first[seen].min() // size : last[seen].max() // size + 1]
        if (pages < 0).any() or (pages >= axes["NB"]).any():
            raise refuse("block_table", f"pages {pages.tolist()} of request {r}", f"0 ... {axes['NB'] - 1}")


def pages(rng, axes):
    """Example block tables: the cache's pages, shuffled, dealt to the requests; unused entries are garbage."""
    table = np.full((axes["R"], axes["MB"]), -7)
    order = iter(rng.permutation(axes["NB"]))
    for r, total in enumerate(axes["lens"]):
        used = -(-total // axes["BS"])
        table[r, :used] = [next(order) for _ in range(used)]
    return table


def lengths(rng, axes):
    """Example sequence lengths: the example's `lens`."""
    return np.array(axes["lens"])


def starts(rng, axes):
    """Example query starts: prefix sums of the example's `new` tokens."""
    return np.concatenate([[0], np.cumsum(axes["new"])])


def dense_scale(arguments, results):
    return _scale(arguments, results, arguments["k"], arguments["v"], arguments["k"].shape[0])


def paged_scale(arguments, results):
    keys = arguments["block_table"].shape[1] * arguments["k_cache"].shape[1]
    return _scale(arguments, results, arguments["k_cache"], arguments["v_cache"], keys)


def _scale(arguments, results, k, v, keys):
    """The bound that WHY derives, in units of 2**-24: one for out, one for lse."""
    width = k.shape[-1]
    norms = [np.sqrt(np.max(np.sum(widen(x, np.float64) ** 2, axis=-1), initial=0)) for x in (arguments["q"], k)]
    size = arguments["scale"] * norms[0] * norms[1] + arguments["softcap"]
    for name, factor in (("alibi_slopes", keys), ("sinks", 1)):
        if arguments[name] is not None:
            size += factor * float(np.max(np.abs(arguments[name])))
    score = (width + 4) * size + 4
    flips = 2.0**16 if arguments["p_round"] else 0.0
    out = (2 * score + 2 * keys + 8 + flips) * float(np.max(np.abs(widen(v, np.float64))))
    return (np.float64(out), np.float64(score + keys + 4))[: len(results)]
