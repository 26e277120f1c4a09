"""Merges of a SentencePiece BPE vocabulary, recovered from its scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_CODE_BITS = 21  # of a Unicode code point


def merges(pieces: Sequence[str], scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(left, right): every way to make a piece from two others, best score first, then longest left half, then longest
    right, then first in `pieces`; both are indices into `pieces`, int64 [merges].

    pieces : different ones. scores : float64 [pieces].
    """
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    codes = np.frombuffer("".join(pieces).encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.int64)
    ends = np.cumsum(lengths)
    heads = _affixes(codes, ends - lengths, lengths, 1)
    tails = _affixes(codes, ends - 1, lengths, -1)
    inner = np.ones(len(codes), bool)  # whether a piece goes on after this code point
    inner[ends[lengths > 0] - 1] = False
    at = np.flatnonzero(inner[:-1] & (heads[:-1] >= 0) & (tails[1:] >= 0))
    left, right, made = heads[at], tails[at + 1], np.searchsorted(ends, at, side="right")
    best = np.lexsort((-lengths[right], -lengths[left], -scores[made]))
    return left[best], right[best]


def _affixes(codes: np.ndarray, first: np.ndarray, lengths: np.ndarray, step: int) -> np.ndarray:
    """The piece that is spelled from a piece's first code point up to and with this one, -1 where none is, for every
    code point of every piece; step -1 reads from the last one backwards.

    A trie, level by level: a node is its parent's number and a code point.
    """
    found = np.full(len(codes), -1, np.int64)
    active = np.flatnonzero(lengths > 0)
    at, node, depth = first[active], np.zeros(len(active), np.int64), 1
    while len(active):
        nodes, node = np.unique(node << _CODE_BITS | codes[at], return_inverse=True)
        whole = lengths[active] == depth
        owner = np.full(len(nodes), -1, np.int64)
        owner[node[whole]] = active[whole]
        found[at] = owner[node]
        on = ~whole
        active, at, node, depth = active[on], at[on] + step, node[on], depth + 1
    return found
