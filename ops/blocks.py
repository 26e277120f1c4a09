"""The block layouts of ggml: one NumPy structured dtype a type, field for field as the bytes lie in a file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from .errors import ContractError


@dataclass(frozen=True)
class BlockLayout:
    """One ggml type: `elements` values of a row are stored together in one `block`.

    Attributes
    ----------
    name, id : ggml's name and number of the type.
    elements : values in a block (1 for plain number types).
    block : dtype of one block; a plain void of the right size for types whose fields vtlab does not decode.
    """

    name: str
    id: int
    elements: int
    block: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return self.block.itemsize

    def row_nbytes(self, length: int) -> int:
        """Bytes of a row of `length` values; `length` must be a multiple of `elements`."""
        return length // self.elements * self.nbytes


def _fields(*fields: tuple) -> np.dtype:
    return np.dtype(list(fields))


_D, _M = ("d", "<f2"), ("m", "<f2")
_D_DMIN = (_D, ("dmin", "<f2"))
_K_SCALES = ("scales", "u1", 12)

_TABLE = [
    ("F32", 0, 1, np.dtype("<f4")),
    ("F16", 1, 1, np.dtype("<f2")),
    ("Q4_0", 2, 32, _fields(_D, ("qs", "u1", 16))),
    ("Q4_1", 3, 32, _fields(_D, _M, ("qs", "u1", 16))),
    ("Q5_0", 6, 32, _fields(_D, ("qh", "u1", 4), ("qs", "u1", 16))),
    ("Q5_1", 7, 32, _fields(_D, _M, ("qh", "u1", 4), ("qs", "u1", 16))),
    ("Q8_0", 8, 32, _fields(_D, ("qs", "i1", 32))),
    ("Q8_1", 9, 32, _fields(_D, ("s", "<f2"), ("qs", "i1", 32))),
    ("Q2_K", 10, 256, _fields(("scales", "u1", 16), ("qs", "u1", 64), *_D_DMIN)),
    ("Q3_K", 11, 256, _fields(("hmask", "u1", 32), ("qs", "u1", 64), _K_SCALES, _D)),
    ("Q4_K", 12, 256, _fields(*_D_DMIN, _K_SCALES, ("qs", "u1", 128))),
    ("Q5_K", 13, 256, _fields(*_D_DMIN, _K_SCALES, ("qh", "u1", 32), ("qs", "u1", 128))),
    ("Q6_K", 14, 256, _fields(("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D)),
    ("Q8_K", 15, 256, _fields(("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16))),
    ("IQ2_XXS", 16, 256, _fields(_D, ("qs", "<u4", (8, 2)))),
    ("IQ2_XS", 17, 256, np.dtype("V74")),
    ("IQ3_XXS", 18, 256, _fields(_D, ("qs", "u1", 64), ("signs_scales", "<u4", 8))),
    ("IQ1_S", 19, 256, np.dtype("V50")),
    ("IQ4_NL", 20, 32, np.dtype("V18")),
    ("IQ3_S", 21, 256, np.dtype("V110")),
    ("IQ2_S", 22, 256, np.dtype("V82")),
    ("IQ4_XS", 23, 256, np.dtype("V136")),
    ("I8", 24, 1, np.dtype("i1")),
    ("I16", 25, 1, np.dtype("<i2")),
    ("I32", 26, 1, np.dtype("<i4")),
    ("I64", 27, 1, np.dtype("<i8")),
    ("F64", 28, 1, np.dtype("<f8")),
    ("IQ1_M", 29, 256, np.dtype("V56")),
    ("BF16", 30, 1, np.dtype("<u2")),
    ("TQ1_0", 34, 256, np.dtype("V54")),
    ("TQ2_0", 35, 256, np.dtype("V66")),
    ("MXFP4", 39, 32, np.dtype("V17")),
    ("NVFP4", 40, 64, np.dtype("V36")),
    ("Q1_0", 41, 128, np.dtype("V18")),
]

LAYOUTS: dict[str, BlockLayout] = {row[0]: BlockLayout(*row) for row in _TABLE}
LAYOUT_BY_ID: dict[int, BlockLayout] = {layout.id: layout for layout in LAYOUTS.values()}

_ACTIVATIONS = {
    "Q4_0": "Q8_0", "Q5_0": "Q8_0", "Q8_0": "Q8_0", "Q4_1": "Q8_1", "Q5_1": "Q8_1", "Q2_K": "Q8_K", "Q3_K": "Q8_K",
    "Q4_K": "Q8_K", "Q5_K": "Q8_K", "Q6_K": "Q8_K", "IQ2_XXS": "Q8_K", "IQ3_XXS": "Q8_K",
}  # fmt: skip
WEIGHT_TYPES = tuple(_ACTIVATIONS)
"""Types whose weights are multiplied as blocks."""


@dataclass(frozen=True)
class QuantTraits:
    """What a product needs to know of a block type.

    Attributes
    ----------
    elements, nbytes : values and bytes of a block.
    activation : the type that the other factor is quantised to; None where there is no product of blocks.
    has_vec_dot : whether there is one.
    """

    elements: int
    nbytes: int
    activation: str | None
    has_vec_dot: bool


@cache
def quant_traits(quant_type: str) -> QuantTraits:
    """Block size, bytes and partner of a block type; ContractError for a name that is none."""
    layout = LAYOUTS.get(quant_type)
    if layout is None or layout.elements == 1:
        raise ContractError("quant_traits", "quant_type", repr(quant_type), "a type of ggml's blocks, such as Q4_K")
    partner = _ACTIVATIONS.get(quant_type)
    return QuantTraits(layout.elements, layout.nbytes, partner, partner is not None)


def row_size_bytes(quant_type: str, length: int) -> int:
    """Bytes of a row of `length` values; ContractError unless they are whole blocks."""
    traits = quant_traits(quant_type)
    if length < 0 or length % traits.elements:
        raise ContractError("row_size_bytes", "length", length, f"a multiple of {traits.elements} for {quant_type}")
    return length // traits.elements * traits.nbytes
