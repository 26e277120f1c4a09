"""What the recurrent ops share: sequences by their starts, states by their slots, tokens in chunks of sequences."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Tensor, refuse

from .kv_cache import takes_writes


def _draw_starts(rng, axes):
    """Sequences of uneven lengths that fill T tokens, one of them empty where there are several."""
    count = axes["N"] if "N" in axes else axes["S"] - 1
    cuts = np.sort(rng.integers(0, axes["T"] + 1, count - 1)) if count > 1 else np.zeros(0, np.int64)
    if count > 2:
        cuts[1] = cuts[0]
    return np.concatenate([[0], cuts, [axes["T"]]])


def _draw_slots(rng, axes):
    """Distinct slots, the second row's null where there are several."""
    slots = rng.permutation(axes["slots"])[: axes["B"]]
    slots[1:2] = -1
    return slots


def distinct(rows: str):
    """Example values: a slot of its own for each of `rows`."""
    return lambda rng, axes: rng.permutation(axes["slots"])[: axes[rows]]


def flags(rows: str):
    """Example values: 0 or 1 for each of `rows`."""
    return lambda rng, axes: rng.integers(0, 2, axes[rows])


STARTS = Tensor("N+1", ("int32",), values=_draw_starts)
STARTS_ALONE = Tensor("S", ("int32",), values=_draw_starts)  # where no state says how many sequences there are
SLOTS = Tensor("B", ("int32",), optional=True, values=_draw_slots)


def starts_fit(arguments, axes):
    """query_start_loc starts at 0, never falls, and ends at T"""
    starts = arguments["query_start_loc"]
    if not isinstance(starts, np.ndarray):
        return
    if starts.size == 0 or starts[0] != 0 or starts[-1] != axes["T"] or (np.diff(starts) < 0).any():
        raise refuse("query_start_loc", starts.tolist(), f"0, never falling, up to {axes['T']}")


def slots_fit(rows: str = "B", slots: str = "slots", name: str = "state_idx", shared: bool = False):
    """A check: every slot below `slots` (negative ones are null), live ones distinct; None gives each row its own."""

    def check(arguments, axes):
        chosen = arguments[name]
        if chosen is None:
            if axes[rows] > axes[slots]:
                raise refuse(name, f"None for {axes[rows]} rows", f"at most {axes[slots]} of them")
        elif isinstance(chosen, np.ndarray):
            if chosen.size and int(chosen.max()) >= axes[slots]:
                raise refuse(name, int(chosen.max()), f"slots < {axes[slots]}")
            live = chosen[chosen >= 0]
            if not shared and np.unique(live).size != live.size:
                raise refuse(name, chosen.tolist(), "no slot twice")

    check.__doc__ = f"a slot of {name} beyond the last one" + (", or one that two rows write" if not shared else "")
    return check


def written(name: str):
    """A check: the state `name` can be written, and no two of its elements share memory."""

    def check(arguments, axes):
        takes_writes(name, arguments[name])

    check.__doc__ = f"{name} can be written"
    return check


def heads_divide(arguments, axes):
    """the value heads are a multiple of the key heads"""
    if axes["Hk"] == 0 or axes["Hv"] % axes["Hk"]:
        name = next(name for name in ("v", "u", "v_new", "beta") if name in arguments)
        raise refuse(name, f"{axes['Hv']} value heads", f"a multiple of {axes['Hk']}")


def rows_and_slots(state_idx, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows that have a live slot, and these slots."""
    slots = np.arange(rows) if state_idx is None else state_idx
    live = np.flatnonzero(slots >= 0)
    return live, slots[live]


def steps(starts: np.ndarray):
    """For t = 0, 1, ...: the sequences longer than t, and where their token t stands."""
    lengths = np.diff(starts)
    for t in range(int(lengths.max(initial=0))):
        active = np.flatnonzero(lengths > t)
        yield active, starts[active] + t


class Chunks:
    """Tokens in chunks of `size`, aligned to the starts of their sequences; the last of a sequence may be short.

    Attributes
    ----------
    first, length, sequence, local : of each chunk, its first token, its tokens, its sequence, and its place there.
    before : the chunks before each sequence. valid : [chunks, size], the places that hold a token.
    """

    def __init__(self, starts: np.ndarray, size: int):
        lengths = np.diff(starts).astype(np.int64)
        counts = -(-lengths // size)
        self.before = np.cumsum(counts) - counts
        self.sequence = np.repeat(np.arange(counts.size), counts)
        self.local = np.arange(self.sequence.size) - self.before[self.sequence]
        self.first = starts[self.sequence] + size * self.local
        self.length = np.minimum(size, starts[self.sequence + 1] - self.first)
        place = np.arange(size)
        self.valid = place < self.length[:, None]
        self.index = np.where(self.valid, self.first[:, None] + place, 0)
        self.counts, self.size, self.tokens = counts, size, int(starts[-1])

    def __len__(self) -> int:
        return self.sequence.size

    def split(self, array: np.ndarray, heads: int = 1) -> np.ndarray:
        """[T, H, ...] -> [chunks, heads, size, ...], zeros where there is no token; each head given to heads / H."""
        part = np.where(self.valid.reshape(*self.valid.shape, *[1] * (array.ndim - 1)), array[self.index], 0)
        part = np.swapaxes(part.astype(array.dtype, copy=False), 1, 2)
        return np.repeat(part, max(heads // max(part.shape[1], 1), 1), axis=1)

    def join(self, part: np.ndarray) -> np.ndarray:
        """[chunks, H, size, ...] -> [T, H, ...]."""
        out = np.zeros((self.tokens, part.shape[1], *part.shape[3:]), part.dtype)
        out[self.index[self.valid]] = np.swapaxes(part, 1, 2)[self.valid]
        return out

    def steps(self):
        """For c = 0, 1, ...: the sequences that have a chunk c, and these chunks."""
        for c in range(int(self.counts.max(initial=0))):
            active = np.flatnonzero(self.counts > c)
            yield active, self.before[active] + c


def products(nx, a, b_t):
    """a[..., M, K] @ b_t[..., N, K].T; in float32 each element is one chain of fma, k ascending."""
    if nx.dtype == np.float64:
        return np.matmul(a, np.swapaxes(b_t, -1, -2))
    total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b_t.shape[:-2]), a.shape[-2], b_t.shape[-2]), np.float32)
    for k in range(a.shape[-1]):
        total = nx.fma(a[..., :, k, None], b_t[..., None, :, k], total)
    return total


def running(nx, x):
    """The inclusive sum along the second last axis, in ascending order."""
    total, parts = nx.const(0), []
    for i in range(x.shape[-2]):
        total = nx.add(total, x[..., i, :])
        parts.append(total)
    return np.stack(parts, axis=-2) if parts else x


def flips(dtype) -> float:
    """What one unit in the last place of `dtype` is in units of 2^-24: how far a rounding can be moved by a flip."""
    digits = {"float32": 23, "float16": 10, "bfloat16": 7}[np.dtype(dtype).name]
    return 2.0 ** (24 - digits)
