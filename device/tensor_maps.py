"""Tensor maps: what Hopper's copy engine is told of a matrix, made by the driver on the host and passed by value."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

import numpy as np

from .errors import DeviceError

WIDTH = 128
"""Bytes of a tile's rows."""
MOST_ROWS = 256
"""Rows of a tile at most."""
_UINT8, _PLAIN, _SWIZZLE_128B, _PROMOTE_256B, _ZEROS = 0, 0, 3, 3, 0  # CU_TENSOR_MAP_*


@cache
def _encode():
    """The driver's cuTensorMapEncodeTiled; DeviceError where the driver has none."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise DeviceError(f"the CUDA driver makes no tensor maps: {error}") from None


@lru_cache(4096)
def tensor_map(address: int, width: int, rows: int, stride: int, high: int) -> np.void:
    """The map of `rows` rows of `width` bytes, `stride` apart, for tiles of `high` rows by 128 bytes.

    address, stride : multiples of 16; the tile's 16-byte vectors change places as `place` of wgmma.cuh has it.
    Errors: DeviceError where the driver refuses.
    """
    return _map(address, width, rows, stride, (WIDTH, high), _SWIZZLE_128B)


@lru_cache(4096)
def strip_map(address: int, width: int, rows: int, stride: int, high: int) -> np.void:
    """The same for tiles as wide as the rows, 256 bytes at most, whose vectors stay where they are."""
    return _map(address, width, rows, stride, (width, high), _PLAIN)


def _map(address: int, width: int, rows: int, stride: int, tile: tuple[int, int], order: int) -> np.void:
    room = (ctypes.c_uint64 * 24)()  # 128 bytes at a multiple of 64
    first = ctypes.addressof(room)
    made = first + -first % 64
    status = _encode()(
        ctypes.c_void_p(made), _UINT8, 2, ctypes.c_void_p(address), (ctypes.c_uint64 * 2)(width, rows),
        (ctypes.c_uint64 * 1)(stride), (ctypes.c_uint32 * 2)(*tile), (ctypes.c_uint32 * 2)(1, 1),
        _PLAIN, order, _PROMOTE_256B, _ZEROS,
    )  # fmt: skip
    if status:
        raise DeviceError(f"cuTensorMapEncodeTiled: error {status} for {rows} x {width} bytes, {stride} apart")
    return np.frombuffer(ctypes.string_at(made, 128), "V128")[0]
