"""What every launcher of the CPU tier does around its kernel: results, `kind` numbers, rows and their strides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import ml_dtypes
import numpy as np

from vtlab.ops import captured, providers
from vtlab.ops.capabilities import Capabilities
from vtlab.ops.outputs import check_form

from . import images
from .compiling import Kernel
from .threads import split

PROVIDER, PRIORITY = "numba", 0
KINDS = {np.dtype(np.float32): 0, np.dtype(ml_dtypes.bfloat16): 1, np.dtype(np.float16): 2}
"""Storage dtypes as the kernels number them."""


def installed(caps: Capabilities) -> bool:
    """Numba is there; without it the oracle serves."""
    return find_spec("numba") is not None


def provider(op: str) -> Callable[[Callable], Callable]:
    """Register a launcher as the CPU tier's provider of `op`."""
    return providers.provider(op, "cpu", PROVIDER, priority=PRIORITY, supports=installed)


class Kernels:
    """What a module of kernels holds: ``K = Kernels("norm")``; ``K.rms_norm(...)``.

    A kernel is linked from the image that an earlier process kept; else the module is imported, and the kernel
    compiled, at the first use. From then on it is the compiled function itself.
    """

    def __init__(self, module: str):
        self._module = module

    def __getattr__(self, name: str):
        found = images.load(self._module, name)
        if found is None:
            found = getattr(import_module(f"{__package__}.kernels.{self._module}"), name)
            if isinstance(found, Kernel):
                found.load()
                found = found.entry
            elif isinstance(found, int | tuple):
                images.keep(self._module, name, found)
        setattr(self, name, found)
        return found


_E = Kernels("elementwise")


def results(op: str, out: object, *forms: tuple[tuple[int, ...], object]) -> tuple[np.ndarray, ...]:
    """Contiguous arrays to write, one for each (shape, dtype): those of `out` where they serve, else fresh ones.

    ContractError, and nothing is written, where `out` has another number of arrays, another shape or dtype.
    """
    if out is None:
        return tuple([captured.empty(shape, dtype) for shape, dtype in forms])
    targets = out if isinstance(out, tuple) else (out,)
    check_form(op, targets, forms)
    return tuple([t if t.flags.c_contiguous else captured.empty(t.shape, t.dtype) for t in targets])


def delivered(out: object, made: tuple[np.ndarray, ...]):
    """What the op returns: `out`, filled where the kernel wrote beside it; else what was made."""
    if out is None:
        return made[0] if len(made) == 1 else made
    for target, source in zip(out if isinstance(out, tuple) else (out,), made):
        if target is not source:
            _move(source, target)
    return out


def _move(source, target) -> None:
    """target = source, a contiguous array; by a kernel where the target has rows."""
    if target.ndim != 2 or target.strides[1] != target.dtype.itemsize:
        target[...] = source
        return
    (rows, width), item = target.shape, target.dtype.itemsize
    split(_E.rows, rows, source.nbytes, source, target, target.strides[0], width * item)


def contiguous(array):
    """The array in C order: itself where it is."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def rows_of(array: np.ndarray) -> tuple[np.ndarray, int, int]:
    """(array, rows, elements between them) of an array seen as rows of its last axis; uneven ones are copied."""
    shape = array.shape
    if array.flags.c_contiguous:
        width = shape[-1]
        return array, (array.size // width if width else math.prod(shape[:-1])), width
    if len(shape) == 2:
        return array, shape[0], array.strides[0] // array.dtype.itemsize
    steps = [(n, s) for n, s in zip(shape[:-1], array.strides) if n > 1]
    even = all(outer[1] == inner[1] * inner[0] for outer, inner in itertools.pairwise(steps))
    if not even or not steps:
        array = np.ascontiguousarray(array)
        return array, math.prod(shape[:-1]), shape[-1]
    return array, math.prod(shape[:-1]), steps[-1][1] // array.dtype.itemsize
