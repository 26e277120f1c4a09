"""How rows of a vocabulary are cut into chunks for cuda/vocab.cuh, and where the blocks leave what they found."""

from __future__ import annotations

from functools import lru_cache

from vtlab.ops.errors import ContractError

from .launch import start
from .runtime import current
from .scratch import scratch

THREADS = 256
_LEAST = 4 * THREADS  # columns of a chunk: a 16-byte load for each thread
_BLOCKS = 1536  # a few for each place on a large GPU
_LARGEST = (1 << 21) - 1  # oracle/fixed_point.py


@lru_cache(maxsize=256)
def cut(rows: int, width: int, blocks: int = _BLOCKS) -> tuple[int, int]:
    """(chunks of a row, columns of a chunk): small chunks, but no more than `blocks` of them where rows are many."""
    per = _LEAST
    while per < width and rows * -(-width // per) > blocks:
        per *= 2
    return -(-width // per), per


def suffix(width: int, *arrays) -> str:
    """``_v4`` where rows of that width, and the arrays, allow 16-byte accesses, else ``_v1``."""
    runtime = current()
    return "_v1" if width % 4 or any(runtime.pointer(array) % 16 for array in arrays) else "_v4"


def check_width(op: str, width: int) -> None:
    """Sums of weights are 63-bit integers: ContractError for a row that could overflow them."""
    if width > _LARGEST:
        raise ContractError(op, "logits", f"{width} columns", f"at most {_LARGEST}")


def launch_chunks(op: str, family: str, kernel: str, blocks: int, args: list) -> None:
    """A block of THREADS for each chunk."""
    start(op, family, kernel, blocks, (THREADS, 1), args)


def softmax_of(op: str, family: str, logits, last: str, *more) -> None:
    """Three launches over every chunk: maxima, sums of exponentials, and the kernel `last` that uses them.

    `last` gets width, chunks, columns of a chunk, logits, `more[:-1]`, maxima, sums, and `more[-1]`, the result.
    """
    rows, width = logits.shape
    if not rows:
        return
    check_width(op, width)
    chunks, per = cut(rows, width)
    form, blocks = suffix(width, logits, more[-1]), rows * chunks
    maxima, sums = scratch.parts("softmax", 4 * blocks, 8 * blocks)
    head = [width, chunks, per, logits]
    launch_chunks(op, family, f"{family}_maximum{form}", blocks, [*head, maxima])
    launch_chunks(op, family, f"{family}_sum{form}", blocks, [*head, maxima, sums])
    launch_chunks(op, family, last + form, blocks, [*head, *more[:-1], maxima, sums, more[-1]])
