"""What the launchers here share: words, launches on the current stream, faults found before anything is written."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec

import numpy as np

from vtlab.ops.capabilities import Capabilities

from ..errors import DeviceError
from ..runtime import current
from ..scratch import scratch
from ..units import unit_of

PROVIDER, PRIORITY = "numba-cuda", -10
"""Below the kernels in CUDA C++, which move 16 bytes a thread; ``VTLAB_DISABLE=cuda-c++`` steers past them."""

_THREADS, _MOST_WORD, _NONE = 256, 8, 2**63 - 1


def installed(_: Capabilities) -> bool:
    """Whether this provider can serve at all."""
    return find_spec("numba_cuda") is not None


@cache
def _numba():
    """(the kernels, how an array and the stream are passed to them)."""
    try:
        kernels = importlib.import_module(".kernels", __package__)
        from numba import config, cuda
    except ImportError as error:
        raise DeviceError(
            f"numba-cuda is not installed ({error}): pip install vtlab[cuda13] or vtlab[cuda12]"
        ) from None
    if config.ENABLE_CUDASIM:
        return kernels, importlib.import_module("numba.cuda.cudadrv.devicearray").FakeCUDAArray, lambda pointer: 0
    # a decode step is small work, and Numba would say so at every launch
    importlib.import_module("numba.cuda.dispatcher").config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
    # sync=False: waiting for the array's stream would break a capture, and the launch goes to that stream anyway
    array = lambda array: cuda.as_cuda_array(array, sync=False)
    return kernels, array, lambda pointer: cuda.external_stream(pointer) if pointer else 0


def words(item: int, arrays: Sequence, numbers: Iterable[int]) -> list:
    """The arrays over unsigned words as wide as their addresses and `numbers` (bytes) allow, at least `item`."""
    size = max(item, min(_MOST_WORD, unit_of(arrays, numbers)))
    return [array.view(f"u{size}") for array in arrays]


def launch(kernel: str, grid: tuple[int, int], block: int, args: Sequence) -> None:
    """Start kernels.<kernel> on the current stream: arrays as they are, integers as 64 bits."""
    if not grid[0] * grid[1]:
        return
    kernels, array, stream = _numba()
    passed = [array(a) if hasattr(a, "strides") and not isinstance(a, np.generic) else np.int64(a) for a in args]
    getattr(kernels, kernel)[grid, (block, 1), stream(current().stream())](*passed)


def launch_rows(kernel: str, rows: int, width: int, args: Sequence) -> None:
    """A block of threads for each row and up to 256 of its `width` words."""
    block = min(_THREADS, width)
    launch(kernel, (rows, -(-width // block) if width else 0), block, args)


def number(slot: str, value: int):
    """A 64-bit number on the device."""
    held = scratch.take(slot, 8)[:8].view(np.int64)
    launch("fill", (1, 1), 1, [held, value])
    return held


def first_fault(kernel: str, count: int, args: Sequence) -> int | None:
    """As device/faults.py: the lowest number that the kernel notes; None in a capture, where nobody may wait."""
    if not count or current().capturing():
        return None
    lowest = number("numba faults", _NONE)
    block = min(_THREADS, count)
    launch(kernel, (-(-count // block), 1), block, [*args, lowest])
    found = int(current().read(lowest)[0])
    return None if found == _NONE else found
