"""What the launchers of 8-bit products share: which kernel, how many blocks, stages and bytes of shared memory."""

from __future__ import annotations

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

    @property
    def threads(self) -> int:
        return 128 + 128 * self.groups

    def shared(self) -> tuple[int, int]:
        """(stages, bytes of shared memory)."""
        fixed = 1024 + self.leaving + _MOST_STAGES * (2 * 8 + 4)
        stage = (self.tokens + self.weights) * _K_TILE + 4 * self.tokens
        stages = min(_MOST_STAGES, (_SHARED - fixed) // stage)
        return stages, fixed + stages * stage


LEAVING = 8 << 10  # of a group
_LOADED = (
    Loaded(16, 64, 1, 1, 1, 16 * 68 * 4, 1.0, "16"),
    Loaded(64, 64, 1, 1, 1, LEAVING, 1.05, "64"),
    Loaded(128, 64, 2, 1, 1, 2 * LEAVING, 1.1, "128"),
    Loaded(128, 128, 2, 2, 1, 2 * LEAVING, 1.55, "128_by_128_alike"),
    Loaded(128, 128, 2, 1, 2, 2 * LEAVING, 1.4, "128_by_128"),
    Loaded(256, 128, 2, 1, 2, 2 * LEAVING, 2.5, "256_by_128"),
)


class Narrow(NamedTuple):
    """A kernel whose tiles are as narrow as it takes for every multiprocessor to have one: cuda/fp8_narrow.cuh.

    tokens : rows of a tile of a; least : rows of b at least; deep : times 128 bytes of k a stage; tile, row :
    nanoseconds that 128 of k of a tile cost, and a row of b more, as measured.
    """

    tokens: int
    least: int
    deep: int
    tile: float
    row: float

    @property
    def groups(self) -> int:
        return 2 if self.tokens > 64 else 1

    def tiles(self, width: int, tokens: int, columns: int) -> int:
        return -(-tokens // self.tokens) * -(-columns // width)

    def time(self, width: int, tokens: int, columns: int) -> float:
        """Nanoseconds for 128 of k."""
        return -(-self.tiles(width, tokens, columns) // MULTIPROCESSORS) * (self.tile + self.row * width)


_NARROW = (Narrow(16, 16, 2, 55, 1.0), Narrow(64, 16, 2, 45, 1.9), Narrow(128, 32, 1, 100, 1.6))
_MOST_NARROW = 256
"""Tokens up to which tiles may be narrow; beyond 128 they are where each multiprocessor has one at most."""
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


def narrow_form(tokens: int, columns: int, widths: tuple[int, ...]) -> tuple[Narrow, int] | None:
    """The narrow kernel for the shape, and which of its widths; None where wide tiles end sooner."""
    if tokens > _MOST_NARROW:
        return None
    fitting = [form for form in _NARROW if form.tokens >= min(tokens, 64)][: 1 if tokens <= 64 else 2]  # 64, then 128

    def time(choice: tuple[Narrow, int]) -> float:
        form, width = choice
        return form.time(width, tokens, columns)

    best = min(((form, width) for form in fitting for width in widths if width >= form.least), key=time)
    return best if tokens <= 128 or best[0].tiles(best[1], tokens, columns) <= MULTIPROCESSORS else None


def start_narrow(
    op: str, family: str, kernel: str, form: Narrow, width: int, tokens: int, columns: int, operands, args
) -> None:
    """Launch a narrow kernel; operands as for `start_loaded`."""
    grid = min(form.tiles(width, tokens, columns), MULTIPROCESSORS)
    fixed = 1024 + _READ_BEYOND + _MOST_STAGES * 2 * 8 + form.groups * (width * _ENDS + 64 * _ROW_ENDS)
    stage = form.deep * (form.tokens + width) * _K_TILE
    stages = min(_MOST_STAGES, (_SHARED - fixed) // stage)
    maps = [map_of(*each, high) for each, high in zip(operands, (min(form.tokens, tokens), width))]
    name = f"{kernel}_{form.tokens}_{width}"
    start(op, family, name, grid, (128 + 128 * form.groups, 1), [*maps, grid, *args, stages], fixed + stages * stage)


def map_of(array, rows: int, stride: int, high: int):
    """The tensor map of `rows` rows of the last axis of `array`."""
    return current().tensor_map(current().pointer(array), array.shape[-1], rows, stride, high)


def start_loaded(
    op: str, family: str, kernel: str, matrices: int, tokens: int, high: int, columns: int, operands, args
) -> None:
    """Launch the kernel whose tiles the copy engine brings; operands: (array, rows, stride) of tokens, weights."""
    form = loaded_form(matrices, tokens, high, columns)
    grid = min(form.cluster * _clusters(form, matrices, tokens, high, columns), MULTIPROCESSORS)
    stages, shared = form.shared()
    maps = [
        map_of(*each, high) for each, high in zip(operands, (form.tokens // form.alike, form.weights // form.apart))
    ]
    start(op, family, f"{kernel}_{form.suffix}", grid, (form.threads, 1), [*maps, grid, *args, stages], shared)
