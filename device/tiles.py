"""What the launchers of 8-bit products share: which kernel, how many blocks, stages and bytes of shared memory."""

from __future__ import annotations

from typing import NamedTuple

from .launch import MULTIPROCESSORS, start
from .runtime import current

EXACT_SIDE = 64
_SHARED = 227 << 10
_K_TILE, _MOST_STAGES = 128, 16
_CLUSTER = 2


class Loaded(NamedTuple):
    """A kernel whose tiles the copy engine brings: rows of its tiles, groups that multiply, bytes through which results
    leave, and what a tile costs beside the others."""

    tokens: int
    weights: int
    groups: int
    leaving: int
    cost: float
    suffix: str


_LOADED = (
    Loaded(16, 64, 1, 16 * 68 * 4, 1.0, "16"),
    Loaded(64, 64, 1, 64 * 68 * 4, 1.0, "64"),
    Loaded(128, 64, 2, 128 * 68 * 4, 1.0, "128"),
    Loaded(128, 128, 2, 16 << 10, 1.15, "128_by_128"),
    Loaded(256, 128, 2, 16 << 10, 2.0, "256_by_128"),
)


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
    return current().capability() == (9, 0) and left.vectors and right.vectors


def start_exact(op: str, family: str, kernel: str, matrices: int, tokens: int, high: int, columns: int, args) -> None:
    """Launch an exact kernel: a block for each tile, up to a number that keeps a GPU busy."""
    tiles = matrices * -(-tokens // min(high, EXACT_SIDE)) * -(-columns // EXACT_SIDE)
    grid = min(tiles, 16 * MULTIPROCESSORS)
    start(op, family, kernel, grid, (256, 1), [grid, *args, 0], EXACT_SIDE * (EXACT_SIDE + 4) * 4)


def loaded_form(matrices: int, tokens: int, high: int, columns: int) -> Loaded:
    """The kernel for the shape: tiles as low as the tokens where one is enough, else those that end soonest."""
    wide = min(tokens, high)
    if wide <= 128 and tokens <= wide:
        return next(form for form in _LOADED if wide <= form.tokens)

    def time(form: Loaded) -> float:
        return -(-_pairs(form, matrices, tokens, high, columns) // (MULTIPROCESSORS // _CLUSTER)) * form.cost

    return min((form for form in _LOADED[3:] if form.tokens <= 128 or wide > 128), key=time)


def _pairs(form: Loaded, matrices: int, tokens: int, high: int, columns: int) -> int:
    """Tiles that a cluster of two takes at a time: the same tokens, neighbouring weights."""
    return matrices * -(-tokens // min(high, form.tokens)) * -(-columns // (form.weights * _CLUSTER))


def map_of(array, rows: int, stride: int, high: int):
    """The tensor map of `rows` rows of the last axis of `array`."""
    return current().tensor_map(current().pointer(array), array.shape[-1], rows, stride, high)


def start_loaded(
    op: str, family: str, kernel: str, matrices: int, tokens: int, high: int, columns: int, operands, args
) -> None:
    """Launch the kernel whose tiles the copy engine brings; operands: (array, rows, stride) of tokens, weights."""
    form = loaded_form(matrices, tokens, high, columns)
    grid = min(_CLUSTER * _pairs(form, matrices, tokens, high, columns), MULTIPROCESSORS)
    fixed = 1024 + form.leaving + _MOST_STAGES * (2 * 8 + 4)
    stage = (form.tokens + form.weights) * _K_TILE + 4 * form.tokens
    stages = min(_MOST_STAGES, (_SHARED - fixed) // stage)
    maps = [map_of(*each, high) for each, high in zip(operands, (form.tokens // 2, form.weights))]
    threads = 128 + 128 * form.groups
    name = f"{kernel}_{form.suffix}"
    start(op, family, name, grid, (threads, 1), [*maps, grid, *args, stages], fixed + stages * stage)
