"""What the launchers of 8-bit products share: which kernel, how many blocks, stages and bytes of shared memory."""

from __future__ import annotations

from typing import NamedTuple

from .launch import MULTIPROCESSORS, start
from .runtime import current

EXACT_SIDE = 64
_SHARED = 227 << 10
_K_TILE, _MOST_STAGES = 128, 16
_FORMS = ((16, 1, "16"), (64, 1, "64"), (128, 1, "128"), (128, 2, "128_by_2"))
"""(tokens, groups of 64 weight rows, suffix) of the tensor-core kernels, as in the .cu files."""


class Rows(NamedTuple):
    """How the rows of codes lie: bytes between them, and whether they may move 16 or 4 bytes at a time."""

    stride: int
    vectors: bool
    words: bool


def rows_of(array, stride: int) -> Rows:
    """Rows of the last axis of `array`, `stride` bytes apart, where every matrix of a batch begins at a row."""
    at, width = current().pointer(array) if array.size else 0, array.shape[-1]
    return Rows(stride, not (at % 16 or stride % 16 or width % 16), not (at % 4 or stride % 4 or width % 4))


def on_tensor_cores(left: Rows, right: Rows) -> bool:
    """Whether the current device has Hopper's tensor cores and the operands suit them."""
    return current().capability() == (9, 0) and left.vectors and right.vectors


def start_exact(op: str, family: str, kernel: str, matrices: int, tokens: int, high: int, columns: int, args) -> None:
    """Launch an exact kernel: a block for each tile, up to a number that keeps a GPU busy."""
    tiles = matrices * -(-tokens // min(high, EXACT_SIDE)) * -(-columns // EXACT_SIDE)
    grid = min(tiles, 16 * MULTIPROCESSORS)
    start(op, family, kernel, grid, (256, 1), [grid, *args, 0], EXACT_SIDE * (EXACT_SIDE + 4) * 4)


def start_tiles(op: str, family: str, kernel: str, matrices: int, tokens: int, high: int, columns: int, args) -> None:
    """Launch the tensor-core kernel that suits the shape; `high`: tokens that a tile may have."""
    wide = min(tokens, high)
    height, groups, form = next((each for each in _FORMS if wide <= each[0]), _FORMS[-1])
    tiles = matrices * -(-tokens // min(high, height)) * -(-columns // (64 * groups))
    grid = min(tiles, MULTIPROCESSORS)
    fixed = 1024 + height * (64 * groups + 4) * 4 + _MOST_STAGES * (2 * 8 + 4 * height)
    stage = (64 * groups + height) * _K_TILE
    stages = min(_MOST_STAGES, (_SHARED - fixed) // stage)
    threads = 128 + 128 * groups
    start(op, family, f"{kernel}_{form}", grid, (threads, 1), [grid, *args, stages], fixed + stages * stage)
