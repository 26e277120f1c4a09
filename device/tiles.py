"""What the launchers of 8-bit products share: which kernel, how many blocks, stages and bytes of shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .launch import MULTIPROCESSORS, on_hopper, start
from .runtime import current

EXACT_SIDE = 64
_SHARED = 227 << 10
_K_TILE, _MOST_STAGES = 128, 16


class Loaded(NamedTuple):
    """A kernel whose tiles the copy engine brings.

    tokens, weights : rows of a block's tile; groups : how many multiply; alike, apart : blocks of a cluster with the
    same tokens, with the same weights; leaving : bytes through which results leave; cost : what a tile costs beside the
    others, as measured.
    """

    tokens: int
    weights: int
    groups: int
    alike: int
    apart: int
    leaving: int
    cost: float
    suffix: str

    @property
    def cluster(self) -> int:
        return self.alike * self.apart


_LEAVING = 8 << 10  # of a group
_LOADED = (
    Loaded(16, 64, 1, 1, 1, 16 * 68 * 4, 1.0, "16"),
    Loaded(64, 64, 1, 1, 1, _LEAVING, 1.05, "64"),
    Loaded(128, 64, 2, 1, 1, 2 * _LEAVING, 1.1, "128"),
    Loaded(128, 128, 2, 2, 1, 2 * _LEAVING, 1.55, "128_by_128_alike"),
    Loaded(128, 128, 2, 1, 2, 2 * _LEAVING, 1.4, "128_by_128"),
    Loaded(256, 128, 2, 1, 2, 2 * _LEAVING, 2.5, "256_by_128"),
)


class Narrow(NamedTuple):
    """A kernel whose tiles are as narrow as it takes for every multiprocessor to have one: cuda/fp8_narrow.cuh.

    tokens, width : rows of a tile, of a and b; deep : times 128 bytes of k a stage; alike : blocks of a cluster.
    """

    tokens: int
    width: int
    deep: int
    alike: int

    @property
    def groups(self) -> int:
        return 2 if self.tokens > 64 else 1

    def tiles(self, tokens: int, columns: int) -> int:
        """How often a cluster takes tiles, one for each of its blocks."""
        return -(-tokens // self.tokens) * -(-columns // (self.width * self.alike))


_NARROW = tuple(
    Narrow(tokens, width, 2, alike)
    for tokens, alike in ((16, 1), (64, 2), (128, 2))
    for width in (16, 32, 40, 48, 56, 64)
)
_MOST_NARROW = 128
"""Tokens up to which tiles are narrow."""
_READ_BEYOND, _ENDS, _ROW_ENDS = 6144, 12, 8
"""As in the .cuh file: bytes that may be read behind a stage, of a column and of a row at the end."""


class Rows(NamedTuple):
    """How the rows of codes lie: bytes between them, and whether they may move 16 or 4 bytes at a time."""

    stride: int
    vectors: bool
    words: bool


def rows_of(array, stride: int) -> Rows:
    """Rows of the last axis of `array`, `stride` bytes apart, where every matrix of a batch begins at a row."""
    at, width = current().pointer(array) if array.size else 0, array.shape[-1]
    apart = stride >= width  # the copy engine knows no rows within rows
    return Rows(stride, apart and not (at % 16 or stride % 16 or width % 16), not (at % 4 or stride % 4 or width % 4))


def on_tensor_cores(left: Rows, right: Rows) -> bool:
    """Whether the current device has Hopper's tensor cores and the operands suit them."""
    return on_hopper() and left.vectors and right.vectors


def start_exact(op: str, family: str, kernel: str, matrices: int, tokens: int, high: int, columns: int, args) -> None:
    """Launch an exact kernel: a block for each tile, up to a number that keeps a GPU busy."""
    tiles = matrices * -(-tokens // min(high, EXACT_SIDE)) * -(-columns // EXACT_SIDE)
    grid = min(tiles, 16 * MULTIPROCESSORS)
    start(op, family, kernel, grid, (256, 1), [grid, *args, 0], EXACT_SIDE * (EXACT_SIDE + 4) * 4)


def loaded_form(matrices: int, tokens: int, high: int, columns: int) -> Loaded:
    """The kernel for the shape: tiles as low as the tokens where they are few, else those that end soonest.

    high : tokens that surely have the same weights; blocks with the same weights need them all to.
    """
    wide = min(tokens, high)
    if wide <= 64:
        return next(form for form in _LOADED if wide <= form.tokens)

    def fits(form: Loaded) -> bool:
        if wide > 128:
            return form.weights == 128 and (form.apart == 1 or (matrices == 1 and tokens <= high))
        return form.tokens == 128 and form.apart == 1

    def time(form: Loaded) -> float:
        return -(-_clusters(form, matrices, tokens, high, columns) // (MULTIPROCESSORS // form.cluster)) * form.cost

    return min(filter(fits, _LOADED), key=time)


def _clusters(form: Loaded, matrices: int, tokens: int, high: int, columns: int) -> int:
    """How often a cluster takes tiles, one for each of its blocks."""
    return matrices * -(-tokens // min(high, form.tokens * form.apart)) * -(-columns // (form.weights * form.alike))


def narrow_form(tokens: int, columns: int, widths: Callable[[int], bool]) -> Narrow | None:
    """The narrow kernel for the shape, of those whose width is allowed; None where tokens are too many."""
    if tokens > _MOST_NARROW:
        return None
    high = next(form.tokens for form in _NARROW if tokens <= form.tokens)

    def time(form: Narrow) -> int:
        return -(-form.tiles(tokens, columns) // (MULTIPROCESSORS // form.alike)) * (form.width + 8)

    return min((form for form in _NARROW if form.tokens == high and widths(form.width)), key=time)


def start_narrow(op: str, family: str, kernel: str, form: Narrow, tokens: int, columns: int, operands, args) -> None:
    """Launch a narrow kernel; operands as for `start_loaded`."""
    grid = min(form.alike * form.tiles(tokens, columns), MULTIPROCESSORS // form.alike * form.alike)
    fixed = 1024 + _READ_BEYOND + _MOST_STAGES * 2 * 8 + form.groups * (form.width * _ENDS + 64 * _ROW_ENDS)
    stage = form.deep * (form.tokens + form.width) * _K_TILE
    stages = min(_MOST_STAGES, (_SHARED - fixed) // stage)
    maps = [map_of(*each, high) for each, high in zip(operands, (form.tokens // form.alike, form.width))]
    threads = 128 + 128 * form.groups
    name = f"{kernel}_{form.tokens}_{form.width}"
    start(op, family, name, grid, (threads, 1), [*maps, grid, *args, stages], fixed + stages * stage)


def map_of(array, rows: int, stride: int, high: int):
    """The tensor map of `rows` rows of the last axis of `array`."""
    return current().tensor_map(current().pointer(array), array.shape[-1], rows, stride, high)


def start_loaded(
    op: str, family: str, kernel: str, matrices: int, tokens: int, high: int, columns: int, operands, args
) -> None:
    """Launch the kernel whose tiles the copy engine brings; operands: (array, rows, stride) of tokens, weights."""
    form = loaded_form(matrices, tokens, high, columns)
    grid = min(form.cluster * _clusters(form, matrices, tokens, high, columns), MULTIPROCESSORS)
    fixed = 1024 + form.leaving + _MOST_STAGES * (2 * 8 + 4)
    stage = (form.tokens + form.weights) * _K_TILE + 4 * form.tokens
    stages = min(_MOST_STAGES, (_SHARED - fixed) // stage)
    maps = [
        map_of(*each, high) for each, high in zip(operands, (form.tokens // form.alike, form.weights // form.apart))
    ]
    threads = 128 + 128 * form.groups
    name = f"{kernel}_{form.suffix}"
    start(op, family, name, grid, (threads, 1), [*maps, grid, *args, stages], fixed + stages * stage)
