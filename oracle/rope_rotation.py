"""The rotation itself: which cache row and lanes each pair reads, and the two products and one sum it takes."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import extremes, refuse


def pairs(half: int, offset: int, is_neox: bool) -> tuple[slice, slice]:
    """Lanes of the first and the second member of every pair: NeoX pairs i with half + i, GPT-J 2i with 2i + 1."""
    if is_neox:
        return slice(offset, offset + half), slice(offset + half, offset + 2 * half)
    return slice(offset, offset + 2 * half, 2), slice(offset + 1, offset + 2 * half, 2)


def rotated(nx, first, second, cos, sin, point=None, contracted=False):
    """(first*cos - second*sin, second*cos + first*sin); `point` rounds each of the four products.

    contracted: the products of `first` go unrounded into the sums, as nvcc fuses them.
    """
    if contracted:
        return nx.fma(first, cos, nx.neg(nx.mul(second, sin))), nx.fma(first, sin, nx.mul(second, cos))
    point = point or (lambda value: value)
    ahead = nx.sub(point(nx.mul(first, cos)), point(nx.mul(second, sin)))
    behind = nx.add(point(nx.mul(second, cos)), point(nx.mul(first, sin)))
    return ahead, behind


def rotate(nx, tensors, cos, sin, *, is_neox, offset=0, inverse=False, product_dtype=None, contracted=False):
    """Copies of the tensors [T, H, D], of one dtype, with their rotary lanes rotated and rounded once.

    The other lanes keep their bytes. The heads of all tensors go through the arithmetic together.
    """
    first, second = pairs(cos.shape[-1], offset, is_neox)
    cos, sin = nx.load(cos)[:, None], nx.load(sin)[:, None]
    sin = nx.neg(sin) if inverse else sin
    point = None if product_dtype is None else lambda value: nx.load(nx.store(value, product_dtype))
    x, y = (nx.load(np.concatenate([tensor[..., lanes] for tensor in tensors], axis=1)) for lanes in (first, second))
    ahead, behind = (nx.store(value, tensors[0].dtype) for value in rotated(nx, x, y, cos, sin, point, contracted))
    outs, head = [], 0
    for tensor in tensors:
        out, heads = np.array(tensor, order="C"), slice(head, head + tensor.shape[1])
        out[..., first], out[..., second] = ahead[:, heads], behind[:, heads]
        outs.append(out)
        head = heads.stop
    return tuple(outs)


def section_axes(section, interleaved: bool) -> np.ndarray:
    """For each pair, the row of the positions it reads: 0 time, 1 height, 2 width."""
    i = np.arange(sum(section))
    if not interleaved:
        return np.searchsorted(np.cumsum(section), i, side="right")
    tall = (i % 3 == 1) & (i <= 3 * section[1])
    wide = (i % 3 == 2) & (i <= 3 * section[2])
    return np.where(tall, 1, np.where(wide, 2, 0))


def is_section(section, half: int) -> bool:
    """Three counts of pairs that add up to all of them."""
    if not isinstance(section, (list, tuple)) or len(section) != 3:
        return False
    counts = all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n >= 0 for n in section)
    return counts and sum(section) == half


def cos_sin_rows(cache, positions, section=None, interleaved=False):
    """cos and sin [T, half] of every token, in the cache's dtype: one row each, or per pair the row of its axis."""
    half = cache.shape[-1] // 2
    if positions.ndim == 1:
        rows = cache[positions]
        return rows[:, :half], rows[:, half:]
    at = positions[section_axes(section, interleaved)].T
    column = np.arange(half)
    return cache[at, column], cache[at, half + column]


def rotary_lanes_fit(arguments, axes):
    """rotary width (the last axis of the cache) odd, 0, or beyond the head's last lane"""
    name = next(n for n in ("cos_sin_cache", "cos_sin", "rotary_dim") if n in arguments)
    width = axes["rotary_dim"]
    room = axes["D"] - arguments.get("rope_dim_offset", 0)
    if width % 2 or not 0 < width <= room:
        raise refuse(name, f"rotary width {width}", f"an even number in (0, {room}]")


def positions_in_table(arguments, axes):
    """a position that is negative, or not a row of the cache"""
    positions, limit = arguments["positions"], axes.get("P")
    if not isinstance(positions, np.ndarray) or positions.size == 0:
        return
    low, high = extremes(positions)
    if low < 0 or (limit is not None and high >= limit):
        raise refuse("positions", low if low < 0 else high, ">= 0" if limit is None else f"in [0, {limit})")


def positions_match_sections(arguments, axes):
    """positions other than [T], or [3, T] with an mrope_section of three counts that add up to the pairs"""
    positions, section = arguments["positions"], arguments["mrope_section"]
    if section is not None and not is_section(section, axes["rotary_dim"] // 2):
        raise refuse("mrope_section", section, f"three counts that add up to {axes['rotary_dim'] // 2}")
    if positions.ndim == 1:
        return
    if positions.ndim != 2 or positions.shape[0] != 3:
        raise refuse("positions", f"shape {tuple(positions.shape)}", "(T,) or (3, T)")
    if section is None:
        raise refuse("mrope_section", None, "three counts for positions of shape (3, T)")


def cache_is_float32_or_matches(arguments, axes):
    """a cache that is neither float32 nor of the dtype of what it rotates"""
    x = arguments["q"] if "q" in arguments else arguments["qkv"]
    if arguments["cos_sin_cache"].dtype not in (np.dtype(np.float32), x.dtype):
        raise refuse("cos_sin_cache", f"dtype {arguments['cos_sin_cache'].dtype}", f"float32 or {x.dtype}")
