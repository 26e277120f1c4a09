"""What every launcher does around its kernel: results, addresses, strides, grids, and the checks of all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from vtlab.ops import dtypes
from vtlab.ops.errors import ContractError

from .runtime import Runtime, current

PROVIDER = "cuda-c++"
KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Storage dtypes as the kernels number them (storage.cuh)."""
_BY_DTYPE = {dtypes.dtype(name): number for name, number in KINDS.items()}

VECTOR = 8
MULTIPROCESSORS = 132
"""An H200's, for which work is cut; results do not depend on it."""
_MOST_BLOCKS = 2**31 - 1
_WARP, _BLOCK = 32, 256
_SMALL = 1 << 15  # threads, a few for each scheduler of a large GPU


def kind(array_or_dtype) -> int:
    """The kernels' number of a storage dtype."""
    return _BY_DTYPE[np.dtype(getattr(array_or_dtype, "dtype", array_or_dtype))]


def results(op: str, out: object, inputs: Iterable, *forms: tuple[tuple[int, ...], object]) -> tuple:
    """The arrays to write: `out` once it is checked, else fresh ones of the (shape, dtype) forms.

    Raises ContractError where `out` has another number of arrays, another shape, dtype or layout, or shares memory
    with an input or with itself; and where any array lives elsewhere than on the current device.
    """
    runtime = current()
    inputs = [array for array in inputs if array is not None]
    if out is None:
        check_places(op, runtime, inputs)
        return tuple(runtime.empty(shape, dtype) for shape, dtype in forms)
    targets = out if isinstance(out, tuple) else (out,)
    if len(targets) != len(forms):
        raise ContractError(op, "out", f"{len(targets)} arrays", f"{len(forms)}")
    for target, (shape, dtype) in zip(targets, forms):
        if target.shape != tuple(shape) or target.dtype != dtype:
            raise ContractError(op, "out", f"{target.dtype} {target.shape}", f"{np.dtype(dtype)} {tuple(shape)}")
        if not target.flags.c_contiguous:
            raise ContractError(op, "out", f"strides {target.strides}", "a C-contiguous array")
    check_places(op, runtime, [*inputs, *targets])
    spans = [_span(runtime, array) for array in (*targets, *inputs)]
    for number, (begin, end) in enumerate(spans[: len(targets)]):
        for other, (first, last) in enumerate(spans):
            if other != number and begin < last and first < end:
                raise ContractError(op, "out", "memory shared with another argument", "memory of its own")
    return targets


def check_places(op: str, runtime: Runtime, arrays: Iterable) -> None:
    """Every array must live on the current device: a kernel cannot follow another device's address."""
    here = runtime.here()
    for array in arrays:
        if runtime.place(array) != here:
            raise ContractError(op, "", f"an array on device {runtime.place(array)}", f"the current device, {here}")


def _span(runtime: Runtime, array) -> tuple[int, int]:
    """[begin, end) of the memory that an array with ascending strides touches."""
    if not array.size:
        return 0, 0
    begin = runtime.pointer(array)
    if array.flags.c_contiguous:
        return begin, begin + array.nbytes
    return begin, begin + array.dtype.itemsize + sum((n - 1) * s for n, s in zip(array.shape, array.strides))


def as_rows(op: str, name: str, array) -> tuple[object, int, int]:
    """(array, rows, stride between them in elements) of an array seen as rows of its last axis.

    Leading axes that do not step evenly cost a contiguous copy. ContractError for offsets beyond 63 bits.
    """
    *lead, width = array.shape
    rows, item = math.prod(lead), array.dtype.itemsize
    if rows <= 1 or not width or array.flags.c_contiguous:
        return array, rows, width
    steps = [(n, s) for n, s in zip(lead, array.strides) if n > 1]
    if steps[0][0] * steps[0][1] >= 2**63:
        raise ContractError(op, name, f"a reach of {steps[0][0] * steps[0][1]} bytes", "less than 2**63")
    even = all(outer == inner * n for (_, outer), (n, inner) in itertools.pairwise(steps))
    stride, rest = divmod(steps[-1][1], item)
    return (array, rows, stride) if even and not rest else (array.copy(), rows, width)


def vectors(width: int, *arrays_and_strides: tuple[object, int]) -> bool:
    """Whether rows of `width` elements may move 8 elements at a time: width, addresses and strides all allow it."""
    runtime = current()
    if width % VECTOR:
        return False
    for array, stride in arrays_and_strides:
        absent = array is None or not array.size
        if not absent and (runtime.pointer(array) % 16 or stride * array.dtype.itemsize % 16):
            return False
    return True


def on_hopper() -> bool:
    """Whether the device has Hopper's own instructions: tensor cores by the warp group, the copy engine."""
    return current().capability() == (9, 0)


def start(
    op: str, family: str, kernel: str, grid: int, block: tuple[int, int], args: Sequence, shared: int = 0
) -> None:
    """Launch with arrays turned into addresses (None into 0); nothing is launched for an empty grid."""
    if grid == 0:
        return
    if grid > _MOST_BLOCKS:
        raise ContractError(op, "", f"{grid} blocks of work", f"at most {_MOST_BLOCKS}")
    runtime = current()
    packed = [
        0 if a is None else runtime.pointer(a) if hasattr(a, "strides") and not isinstance(a, np.generic) else a
        for a in args
    ]
    runtime.launch(family, kernel, grid, block, shared, packed)


def map_rows(
    op: str,
    family: str,
    kernel: str,
    rows: int,
    width: int,
    wide: bool,
    args: Sequence,
    depth: int = 1,
    most: int = _BLOCK,
    ending: str = "",
) -> None:
    """Launch ``<kernel>_v8`` or ``_v1`` over every group of 8 or 1 elements of `rows` x `width`, `depth` a thread.

    A block, of at most `most` threads, takes a rectangle of rows and groups: as many groups of one row as fill it, then
    more rows; small work is cut into small blocks, so that more multiprocessors share it. ending: of the name.
    """
    if not rows or not width:
        return
    groups = -(-(width // VECTOR if wide else width) // depth)
    grid, shape, split = rectangles(rows, groups, most if rows * groups > _SMALL else min(most, _BLOCK // 4))
    suffix = ("_v8" if wide else "_v1") + ending
    start(op, family, kernel + suffix, grid, shape, [rows, width, split, *args])


def rectangles(rows: int, groups: int, block: int, least: int = 1) -> tuple[int, tuple[int, int], int]:
    """(blocks, their threads across and down, how kernels find a block's place) over `groups` threads of each row.

    A block has `block` threads, of which as many as there is need for, but no fewer than `least`, share a row.
    """
    across = min(block, max(_WARP if rows == 1 else 1, least, 1 << (groups - 1).bit_length()))
    down = block // across if rows > 1 else 1
    chunks = -(-groups // across)
    split = chunks | (2**32 - 1) // chunks << 32 if chunks > 1 else 1
    return -(-rows // down) * chunks, (across, down), split
