"""Products with weights that stay in GGML blocks on a GPU: launchers of cuda/ggml_matmul.cu."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.blocks import quant_traits

from .codes import spread
from .ggml import reachable
from .launch import MULTIPROCESSORS, PROVIDER, as_rows, check_places, kind, results, start, vectors
from .runtime import current
from .scratch import scratch

_FAMILY = "ggml_matmul"
_BLOCK, _WARPS = 256, 8
_FEW = 4
"""Rows of a that meet the weights at once, where there are several."""
_MOST = 1 << 35
"""Values of a that are coded at once: kernels count 16-byte pieces of codes in 32 bits."""
_LANES = ("Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Types whose sums run in eight lanes."""


@providers.provider("matmul_bt_quant", "cuda", PROVIDER)
def matmul_bt_quant(a, b, *, quant_type, out_dtype=None, out=None):
    """oracle.ggml_matmul.matmul_bt_quant.

    Each row of a becomes codes once, in scratch; weights are read as they lie, once for every four rows of a.
    """
    op, traits = "matmul_bt_quant", quant_traits(quant_type)
    (rows, depth), columns = a.shape, b.shape[0]
    target, out_stride = _target(op, out, (a, b), (rows, columns), np.dtype(out_dtype or np.float32))
    if not target.size:
        return target
    b, stride = reachable(b, traits.nbytes)
    a, _, a_stride = as_rows(op, "a", a)
    if not traits.has_vec_dot:
        args = [columns, depth, a, a_stride, kind(a), b, stride, target, out_stride, kind(target)]
        spread(op, _FAMILY, "ggml_q8_k", target.size, args)
        return target
    if rows == 1 and _decode(op, a, target, b, stride, quant_type, traits):
        return target
    at_once = max(1, _MOST // max(depth, 1))
    for first in range(0, rows, at_once):
        few = (a, target) if rows <= at_once else (a[first : first + at_once], target[first : first + at_once])
        _product(op, *few, a_stride, b, stride, out_stride, quant_type, traits)
    return target


_ONE_WARPS, _TILE = 16, 8
_IN_PAIRS = {"Q4_0": (18, 4, 2), "Q8_0": (34, 2, 1), "Q4_1": (20, 3, 2), "Q5_0": (22, 3, 2), "Q5_1": (24, 3, 2)}
_IN_TILES = {
    "Q4_K": (144, 5, 9, 8), "Q5_K": (176, 4, 9, 8), "Q6_K": (210, 3, 8, 0), "Q3_K": (110, 6, 8, 0), "Q2_K": (84, 6, 1, 16),
    "IQ2_XXS": (66, 6, 1, 0), "IQ3_XXS": (98, 6, 1, 0),
}  # fmt: skip


def _shared(quant_type: str, depth: int, team: int) -> int:
    if quant_type in _IN_PAIRS:
        nbytes, ring, streams = _IN_PAIRS[quant_type]
        return _ONE_WARPS * (ring * 128 * nbytes + _TILE * 68 * 4) + depth // 32 * (8 + streams * nbytes)
    nbytes, stages, terms, sums = _IN_TILES[quant_type]
    aligned = nbytes % 16 == 0
    pieces = team * nbytes // 16 if aligned else (team * nbytes + 30) // 16
    pitch = 16 * (pieces + (2 - pieces & 3) if aligned else pieces | 1)
    ring = _ONE_WARPS // team * stages * 16 * pitch
    rest = _ONE_WARPS * 2 * 16 * terms * 4 + 1024 * quant_type.startswith("IQ")
    return ring + rest + depth + depth // 256 * (4 + 2 * sums)


def _team(columns: int, blocks: int, grid: int) -> int:
    def turns(team):
        rows = -(-columns // (grid * (_ONE_WARPS // team)))
        return -(-rows // 16) * -(-blocks // team), -team

    return min((4, 8, 16), key=turns)


def _decode(op: str, a, target, b, stride: int, quant_type: str, traits) -> bool:
    """Whether a kernel for one row of a could be launched."""
    depth, columns = a.shape[1], b.shape[0]
    if not depth or columns > 1 << 30:
        return False
    tiles = _IN_TILES.get(quant_type)
    if tiles is None and (b.shape[1] % 16 or stride % 16 or current().pointer(b) % 16):
        return False
    if stride >= 1 << 26:
        return False
    grid = min(MULTIPROCESSORS, -(-columns // 8))
    team = _team(columns, depth // 256, grid) if tiles else 0
    shared = _shared(quant_type, depth, team)
    if shared > current().shared_memory():
        return False
    args = [columns, depth, a, kind(a), b, stride, target, kind(target), grid, team]
    start(op, _FAMILY, f"ggml_{quant_type.lower()}_row", grid, (32 * _ONE_WARPS, 1), args, shared)
    return True


def _target(op: str, out, inputs: tuple, shape: tuple[int, int], dtype: np.dtype) -> tuple[object, int]:
    """(the array to write, elements from one of its rows to the next): columns of a wider result are taken, too."""
    if out is not None and out.shape == shape and out.dtype == dtype and not out.flags.c_contiguous:
        stride, rest = divmod(out.strides[0], dtype.itemsize)
        if out.strides[1] == dtype.itemsize and not rest and stride >= shape[1]:
            check_places(op, current(), [*inputs, out])
            return out, stride
    return results(op, out, inputs, (shape, dtype))[0], shape[1]


def _product(op: str, a, target, a_stride: int, b, stride: int, out_stride: int, quant_type: str, traits) -> None:
    (rows, depth), columns = a.shape, b.shape[0]
    units, blocks = depth // 32, depth // traits.elements
    size, scales = rows * -(-units // 32) * 1024, rows * blocks * 4
    codes = current().pointer(scratch.take("ggml activations", size + scales + rows * units * 4))
    beside = codes, codes + size, codes + size + scales
    wide = int(vectors(depth, (a, a_stride)))
    count = rows * blocks
    lanes = 32 if traits.elements == 256 else 4
    args = [count, blocks, a, a_stride, kind(a), wide, *beside, int(quant_type in _LANES)]
    start(op, _FAMILY, f"ggml_codes_{traits.elements}", -(-count * lanes // _BLOCK), (_BLOCK, 1), args)
    each = 1 if rows == 1 else _FEW
    args = [rows, columns, units, b, stride, *beside, target, out_stride, kind(target)]
    grid = -(-columns // _WARPS) * -(-rows // each)
    start(op, _FAMILY, f"ggml_{quant_type.lower()}_{each}", grid, (_BLOCK, 1), args)
