"""Weights of 2, 3, 4 and 8 bits: integer types, codes in 32-bit words, and who stands where, as index formulas.

An order is an array of places: `new = old[order]`, so that new place p holds old place order[p], and `inverse(order)`
leads back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class QuantType:
    """An unsigned code of `bits` bits that stands for code - bias."""

    bits: int
    bias: int = 0

    @property
    def low(self) -> int:
        """The least value."""
        return -self.bias

    @property
    def high(self) -> int:
        """The largest value."""
        return (1 << self.bits) - 1 - self.bias


QUANT_TYPES = {
    "uint4": QuantType(4), "uint8": QuantType(8), "uint2b2": QuantType(2, 2), "uint3b4": QuantType(3, 4),
    "uint4b8": QuantType(4, 8), "uint8b128": QuantType(8, 128),
}  # fmt: skip
"""Types without a bias have zero points."""


def run_length(bits: int) -> int:
    """How many codes fill whole words: 16, 32, 8 and 4 of 2, 3, 4 and 8 bits."""
    return math.lcm(bits, 32) // bits


def _runs(array: np.ndarray, axis: int, length: int) -> np.ndarray:
    """[before the axis, runs, length, behind it], the array's own memory."""
    axis %= array.ndim
    before, behind = math.prod(array.shape[:axis]), math.prod(array.shape[axis + 1 :])
    return array.reshape(before, array.shape[axis] // length, length, behind)


def _with_axis(array: np.ndarray, axis: int, size: int) -> tuple[int, ...]:
    """The array's shape with another size of `axis`."""
    axis %= array.ndim
    return (*array.shape[:axis], size, *array.shape[axis + 1 :])


def pack(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Codes along `axis` as a little-endian stream of bits in int32 words: code i of a run begins at bit bits * i.

    Codes of 3 bits fill three words by 32, codes 10 and 21 of them across two words.
    """
    length = run_length(bits)
    words = np.zeros(_with_axis(codes, axis, codes.shape[axis] * bits // 32), np.uint32)
    runs, into = _runs(codes, axis, length), _runs(words, axis, length * bits // 32)
    for i in range(length):
        word, shift = divmod(bits * i, 32)
        value = runs[:, :, i].astype(np.uint32)
        into[:, :, word] |= value << np.uint32(shift)
        if shift + bits > 32:
            into[:, :, word + 1] |= value >> np.uint32(32 - shift)
    return words.view(np.int32)


def unpack(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The inverse of `pack`, int32 codes."""
    length = run_length(bits)
    codes = np.empty(_with_axis(words, axis, words.shape[axis] * 32 // bits), np.int32)
    runs, into = _runs(words.view(np.uint32), axis, length * bits // 32), _runs(codes, axis, length)
    for i in range(length):
        word, shift = divmod(bits * i, 32)
        value = runs[:, :, word] >> np.uint32(shift)
        if shift + bits > 32:
            value = value | runs[:, :, word + 1] << np.uint32(32 - shift)
        into[:, :, i] = value & np.uint32((1 << bits) - 1)
    return codes


def inverse(order: np.ndarray) -> np.ndarray:
    """The order that undoes `order`."""
    back = np.empty_like(order)
    back[order] = np.arange(len(order), dtype=order.dtype)
    return back


def reordered(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Every run of len(order) neighbours of the last axis in another order."""
    return np.take(values.reshape(-1, len(order)), order, axis=1).reshape(values.shape)


def interleave(bits: int) -> np.ndarray:
    """AWQ's order of the codes of one word: the even places first, then the odd ones (4 bits); 0 2 1 3 (8 bits)."""
    count = 32 // bits
    return np.arange(count).reshape(count // 2, 2).T.reshape(-1)


@cache
def shuffle(bits: int) -> tuple[tuple[int, int], ...]:
    """Where the bits of a run go when exllama shuffles it: (bit of the stream, bit of the shuffled words).

    Codes 2i go to the low half of a word and codes 2i + 1 to its high half, bits * i bits up, so that one mask takes
    a pair apart. Of 3 bits, each of three words holds ten codes so; the last two codes lie bit by bit in the bits 15
    and 31 that are left. Codes of 8 bits stay.
    """
    if bits == 8:
        return tuple((i, i) for i in range(32))
    pairs = []
    for code in range(run_length(bits)):
        word, place = divmod(code, 32 // bits) if code < 30 or bits != 3 else (None, code - 30)
        for b in range(bits):
            half, step = divmod(place, 2)[::-1]
            to = 32 * word + 16 * half + bits * step + b if word is not None else 32 * b + 16 * place + 15
            pairs.append((bits * code + b, to))
    return tuple(pairs)


def move_bits(words: np.ndarray, moves, width: int) -> np.ndarray:
    """words [W, N] with the bits of every `width` rows moved: bit `a` of the run becomes bit `b`, for each (a, b)."""
    runs = words.view(np.uint32).reshape(-1, width, words.shape[1])
    out = np.zeros_like(runs)
    for a, b in moves:
        bit = runs[:, a // 32] >> np.uint32(a % 32) & np.uint32(1)
        out[:, b // 32] |= bit << np.uint32(b % 32)
    return out.reshape(words.shape).view(np.int32)


@cache
def marlin_order(bits: int, is_a_8bit: bool = False) -> np.ndarray:
    """The order of 1024 weights, tiles of 16 x 16 (32 x 16) side by side, each k-major, in Marlin's fragments.

    Lane l holds 32 neighbours: column l / 4 and the one 8 further on, of four (two) tiles, from each the rows that one
    lane of a matrix instruction multiplies, 2 (l % 4) + (0, 1, 8, 9), or 4 (l % 4) + (0 ... 3, 16 ... 19). Within a
    word, codes are interleaved so that a mask takes two halves' worth at once.
    """
    count, neighbours = (16, 4) if is_a_8bit else (8, 2)
    lane, rest = np.divmod(np.arange(1024), 32)
    tile, e = np.divmod(rest, count)
    slots = interleave(bits)
    if is_a_8bit:
        slots = np.arange(8).reshape(2, 4).T.reshape(-1) if bits == 4 else np.arange(4)
    e = e // len(slots) * len(slots) + slots[e % len(slots)]
    block, r = np.divmod(e, 2 * neighbours)
    row = neighbours * (lane % 4) + r % neighbours + 4 * neighbours * (r // neighbours)
    return 16 * row + lane // 4 + 8 * block + 32 * count * tile


MARLIN_GROUPED = np.arange(64).reshape(8, 8).T.reshape(-1)
"""Scales of groups, and zero points: 64 columns, 8 x 8 turned; its own inverse."""
MARLIN_SINGLE = np.arange(32).reshape(4, 4, 2).transpose(1, 0, 2).reshape(-1)
"""Scales of whole columns, and biases: 32 columns, pairs of them 4 x 4 turned; its own inverse."""


def marlin_tiles(codes: np.ndarray, bits: int, is_a_8bit: bool) -> np.ndarray:
    """[K, N] codes -> [K/16, N*16] in Marlin's order; tiles are 32 rows high for 8-bit activations."""
    (k, n), high = codes.shape, 32 if is_a_8bit else 16
    tiles = codes.reshape(k // high, high, n // 16, 16).transpose(0, 2, 1, 3).reshape(k // 16, n * 16)
    return reordered(tiles, marlin_order(bits, is_a_8bit))


def marlin_rows(tiles: np.ndarray, bits: int, is_a_8bit: bool) -> np.ndarray:
    """The inverse of `marlin_tiles`."""
    k, n, high = tiles.shape[0] * 16, tiles.shape[1] // 16, 32 if is_a_8bit else 16
    plain = reordered(tiles, inverse(marlin_order(bits, is_a_8bit)))
    return plain.reshape(k // high, n // 16, high, 16).transpose(0, 2, 1, 3).reshape(k, n)


@cache
def machete_order(bits: int) -> np.ndarray:
    """The order of a block of 64 (k) x 128 (n) weights, n * 64 + k, in Machete's prepacked blocks.

    Thread t of 256 holds 32 neighbours. Value v of them, s = v / 8, belongs to row n = 64 (t / 128) + 16 (t / 32 % 4) +
    t % 32 / 4 + 8 (v / 2 % 2) and k = 16 s + 2 (t % 4) + v % 2 + 8 (v / 4 % 2). Of 4 bits, each eight are interleaved.
    """
    t, slot = np.divmod(np.arange(8192), 32)
    order = interleave(4) if bits == 4 else np.arange(8)
    v = slot // 8 * 8 + order[slot % 8]
    n = 64 * (t // 128) + 16 * (t // 32 % 4) + t % 32 // 4 + 8 * (v // 2 % 2)
    return n * 64 + 16 * (v // 8) + 2 * (t % 4) + v % 2 + 8 * (v // 4 % 2)


def machete_blocks(codes: np.ndarray, bits: int) -> np.ndarray:
    """[K, N] codes -> [blocks * 8192], blocks of 64 x 128 along n first, each in `machete_order`."""
    k, n = codes.shape
    blocks = codes.reshape(k // 64, 64, n // 128, 128).transpose(0, 2, 3, 1)
    return reordered(np.ascontiguousarray(blocks).reshape(-1), machete_order(bits))


def machete_rows(flat: np.ndarray, bits: int, k: int, n: int) -> np.ndarray:
    """The inverse of `machete_blocks`."""
    plain = reordered(flat, inverse(machete_order(bits)))
    return plain.reshape(k // 64, n // 128, 128, 64).transpose(0, 3, 1, 2).reshape(k, n)


def allspark_place(k: np.ndarray, n: np.ndarray, rows: int) -> np.ndarray:
    """The byte that weight (k, n) of `rows` rows is in AllSpark's n32k16 order: 32 columns x 16 rows in 512 bytes."""
    row = n // 32 * 8 + n % 8
    column = k // 16 * 64 + (2 * (k % 8 // 2) + n % 32 // 16) * 8 + n % 16 // 8 * 4 + 2 * (k % 16 // 8) + k % 2
    return row * (4 * rows) + column


def allspark_scale_place(n: np.ndarray) -> np.ndarray:
    """The place of column n's scale: n % 8 first, so that a lane reads its four columns at once."""
    return n // 32 * 32 + n % 8 * 4 + n % 32 // 8


@cache
def fragment_order() -> np.ndarray:
    """The order of 16 (n) x 32 (k) codes, n * 32 + k, as a warp multiplies them with m64n?k32 of 8-bit operands.

    Lane l holds 16 neighbours: value v is row l / 4 + 8 (v / 4 % 2) and k = 4 (l % 4) + v % 4 + 16 (v / 8).
    """
    lane, v = np.divmod(np.arange(512), 16)
    return (lane // 4 + 8 * (v // 4 % 2)) * 32 + 4 * (lane % 4) + v % 4 + 16 * (v // 8)


def fragments(codes: np.ndarray) -> np.ndarray:
    """[K, N] codes -> [K * N], tiles of 16 columns x 32 rows, along N first."""
    k, n = codes.shape
    tiles = codes.reshape(k // 32, 32, n // 16, 16).transpose(0, 2, 3, 1)
    return reordered(np.ascontiguousarray(tiles).reshape(-1), fragment_order())


def fragment_rows(flat: np.ndarray, k: int, n: int) -> np.ndarray:
    """The inverse of `fragments`."""
    plain = reordered(flat, inverse(fragment_order()))
    return plain.reshape(k // 32, n // 16, 16, 32).transpose(0, 3, 1, 2).reshape(k, n)
