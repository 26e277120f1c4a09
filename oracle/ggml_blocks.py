"""ggml's blocks taken apart: integer codes and sub-block scales as integers, block scales as float32, nothing rounded.

A weight is d * s * q - dmin * m, where q is a code with its offset taken off, s and m are integers of the sub-block,
and a type that lacks one of them has None there. The i-quants store half a scale: theirs is s = 2 * stored + 1, and
their d comes with a power of two, `fold`, that ggml multiplies a finished sum by.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vtlab.ops.block_grids import grid, signs
from vtlab.ops.blocks import LAYOUTS


class Parts(NamedTuple):
    """Rows of blocks, taken apart.

    q : int32 [rows, blocks, elements]. d : float32 [rows, blocks].
    s, m : int32 [rows, blocks, sub-blocks] of equal length, or None. dmin : float32 [rows, blocks] or None; it is
    subtracted, so that Q4_1's and Q5_1's "m", which is added, stands here as its negative.
    """

    q: np.ndarray
    d: np.ndarray
    s: np.ndarray | None = None
    m: np.ndarray | None = None
    dmin: np.ndarray | None = None
    fold: float = 1.0


def blocks_of(rows: np.ndarray, quant_type: str) -> np.ndarray:
    """uint8 [rows, bytes] -> structured [rows, blocks]."""
    block = LAYOUTS[quant_type].block
    return np.ascontiguousarray(rows).reshape(-1).view(block).reshape(len(rows), rows.shape[1] // block.itemsize)


def take_apart(rows: np.ndarray, quant_type: str) -> Parts:
    """Parts of uint8 [rows, bytes]."""
    b = blocks_of(rows, quant_type)
    match quant_type:
        case "Q4_0":
            return _q4_0(b)
        case "Q4_1":
            return _q4_1(b)
        case "Q5_0":
            return _q5_0(b)
        case "Q5_1":
            return _q5_1(b)
        case "Q2_K":
            return _q2_k(b)
        case "Q3_K":
            return _q3_k(b)
        case "Q4_K":
            return _q4_k(b)
        case "Q5_K":
            return _q5_k(b)
        case "Q6_K":
            return _q6_k(b)
        case "IQ2_XXS":
            return _iq2_xxs(b)
        case "IQ3_XXS":
            return _iq3_xxs(b)
    return Parts(b["qs"].astype(np.int32), _wide(b["d"]))  # Q8_0, Q8_1, Q8_K: the codes are bytes


def _wide(field: np.ndarray) -> np.ndarray:
    return field.astype(np.float32)


def _bits(packed: np.ndarray, width: int, run: int) -> np.ndarray:
    """bytes [..., n * run] -> int32 [..., n * 8 / width * run]: of each run the lowest `width` bits, then the next."""
    *lead, length = packed.shape
    runs = packed.reshape(*lead, length // run, 1, run).astype(np.int32)
    shifts = np.arange(0, 8, width)[:, None]
    return (runs >> shifts & ((1 << width) - 1)).reshape(*lead, length * 8 // width)


def _q4_0(b: np.ndarray) -> Parts:
    return Parts(_bits(b["qs"], 4, 16) - 8, _wide(b["d"]))


def _q4_1(b: np.ndarray) -> Parts:
    return Parts(_bits(b["qs"], 4, 16), _wide(b["d"]), dmin=-_wide(b["m"]))


def _five_bits(b: np.ndarray) -> np.ndarray:
    fifth = np.unpackbits(np.ascontiguousarray(b["qh"]), axis=-1, bitorder="little").astype(np.int32)
    return _bits(b["qs"], 4, 16) | fifth << 4


def _q5_0(b: np.ndarray) -> Parts:
    return Parts(_five_bits(b) - 16, _wide(b["d"]))


def _q5_1(b: np.ndarray) -> Parts:
    return Parts(_five_bits(b), _wide(b["d"]), dmin=-_wide(b["m"]))


def _q2_k(b: np.ndarray) -> Parts:
    scales = b["scales"].astype(np.int32)
    return Parts(_bits(b["qs"], 2, 32), _wide(b["d"]), scales & 15, scales >> 4, _wide(b["dmin"]))


def _q3_k(b: np.ndarray) -> Parts:
    low, high = _bits(b["scales"][..., :8], 4, 8), _bits(b["scales"][..., 8:], 2, 4)
    q = _bits(b["qs"], 2, 32) + (_bits(b["hmask"], 1, 32) << 2) - 4
    return Parts(q, _wide(b["d"]), (low | high << 4) - 32)


def _six_bit_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """s and m of Q4_K and Q5_K; the upper two bits of the last four stand on top of the first four."""
    first, second, third = np.split(b["scales"].astype(np.int32), 3, axis=-1)
    s = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    m = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return s, m


def _q4_k(b: np.ndarray) -> Parts:
    return Parts(_bits(b["qs"], 4, 32), _wide(b["d"]), *_six_bit_scales(b), _wide(b["dmin"]))


def _q5_k(b: np.ndarray) -> Parts:
    q = _bits(b["qs"], 4, 32) | _bits(b["qh"], 1, 32) << 4
    return Parts(q, _wide(b["d"]), *_six_bit_scales(b), _wide(b["dmin"]))


def _q6_k(b: np.ndarray) -> Parts:
    q = (_bits(b["ql"], 4, 64) | _bits(b["qh"], 2, 32) << 4) - 32
    return Parts(q, _wide(b["d"]), b["scales"].astype(np.int32))


def _signed(magnitudes: np.ndarray, a: np.ndarray) -> np.ndarray:
    """magnitudes [rows, blocks, 8, 4, 8] with the signs that a [rows, blocks, 8] picks -> int32 [rows, blocks, 256]."""
    picked = signs()[a[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127]
    return (magnitudes.astype(np.int32) * picked).reshape(*a.shape[:2], 256)


def _iq2_xxs(b: np.ndarray) -> Parts:
    index, a = np.ascontiguousarray(b["qs"][..., 0]), b["qs"][..., 1]
    magnitudes = grid("IQ2_XXS")[index.view(np.uint8).reshape(*a.shape, 4)]
    return Parts(_signed(magnitudes, a), _wide(b["d"]), 2 * (a >> 28).astype(np.int32) + 1, fold=0.125)


def _iq3_xxs(b: np.ndarray) -> Parts:
    a = b["signs_scales"]
    magnitudes = grid("IQ3_XXS")[b["qs"]].reshape(*a.shape, 4, 8)
    return Parts(_signed(magnitudes, a), _wide(b["d"]), 2 * (a >> 28).astype(np.int32) + 1, fold=0.25)


def values(nx, parts: Parts) -> np.ndarray:
    """The weights [rows, elements of a row], each operation rounded: (d * s) * q - dmin * m, as `dequantize_row`."""
    rows, count, elements = parts.q.shape
    groups = 1 if parts.s is None else parts.s.shape[2]
    scale = nx.load(parts.d)[:, :, None]
    if parts.s is not None:
        scale = nx.mul(scale, nx.mul(nx.load(parts.s), parts.fold))
    out = nx.mul(scale[..., None], nx.load(parts.q.reshape(rows, count, groups, elements // groups)))
    if parts.dmin is not None:
        minimum = nx.load(parts.dmin)[:, :, None]
        if parts.m is not None:
            minimum = nx.mul(minimum, nx.load(parts.m))
        out = nx.sub(out, minimum[..., None])
    return out.reshape(rows, count * elements)
