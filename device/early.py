"""Kernels that the driver may start before those ahead of them on the stream are over: Hopper's programmatic launches.

A kernel whose name ends with `EARLY` waits by itself, before it reads or writes anything, until all work ahead of it is
over and seen (`after_others` of cuda/early.cuh). What it saves is the way from one kernel's end to the next one's first
instruction. Where the GPU or the driver knows no such launch, it is started like any other and waits for nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np

EARLY = "_early"
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: which one, and a union of 64 bytes at a multiple of 8."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


_ATTRIBUTE = _Attribute(_PROGRAMMATIC, 0, 1)


@cache
def starter():
    """The driver's cuLaunchKernelEx, or None where it has none."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None


def start(function: int, grid: int, block: tuple[int, int], shared: int, stream: int, args: Sequence) -> int:
    """Launch on `stream` with integers of 64 bits and structures, arrays of one; the driver's error number or 0."""
    structures, numbers = [i for i, value in enumerate(args) if isinstance(value, np.ndarray)], list(args)
    for i in structures:
        numbers[i] = 0
    values = (ctypes.c_int64 * len(args))(*numbers)
    first = ctypes.addressof(values)
    places = (ctypes.c_void_p * len(args))(*range(first, first + 8 * len(args), 8))
    for i in structures:
        places[i] = args[i].ctypes.data
    launch = _Launch((grid, 1, 1), (*block, 1), shared, stream, ctypes.pointer(_ATTRIBUTE), 1)
    return starter()(ctypes.byref(launch), ctypes.c_void_p(function), places, None)
