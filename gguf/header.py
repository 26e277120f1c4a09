"""From the bytes of a GGUF file to its metadata and a checked list of where each tensor lies."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path

from vtlab.ops.blocks import LAYOUT_BY_ID, BlockLayout

from . import limits
from .cursor import Cursor, shown
from .metadata import STRING, UINT32, read_value

MAGIC = 0x46554747  # "GGUF"
VERSIONS = (2, 3)
_LEAST_PAIR, _LEAST_INFO = 14, 25  # bytes of the shortest metadata pair and tensor info


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the header describes it: row-major `shape`, `offset` into the data, `at` its info in the file."""

    name: str
    layout: BlockLayout
    shape: tuple[int, ...]
    offset: int
    at: int

    @property
    def row_nbytes(self) -> int:
        return self.layout.row_nbytes(self.shape[-1] if self.shape else 1)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_nbytes


@dataclass(frozen=True)
class Header:
    """A parsed header; tensor `offset`s count from byte `data_start` of the file."""

    version: int
    metadata: dict[str, object]
    tensors: list[TensorInfo]
    alignment: int
    data_start: int


def parse_header(buffer: mmap.mmap | bytes, file: str | Path) -> Header:
    """Read and check everything before the tensor data; the data itself is not touched.

    Raises
    ------
    FormatError : with the offset and the field of the first fault.
    Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    cursor = Cursor(buffer, file)
    version = _read_version(cursor)
    tensor_count = _count(cursor, "tensor_count", limits.TENSORS, _LEAST_INFO)
    pair_count = _count(cursor, "metadata_kv_count", limits.METADATA_PAIRS, _LEAST_PAIR)
    metadata, alignment = _read_metadata(cursor, pair_count)
    tensors = _read_tensor_infos(cursor, tensor_count)
    data_start = -(-cursor.position // alignment) * alignment
    return Header(version, metadata, tensors, alignment, data_start)


def _read_version(cursor: Cursor) -> int:
    magic = cursor.u32("magic")
    if magic != MAGIC:
        raise cursor.error("magic", bytes(cursor.buffer[:4]), b"GGUF", 0)
    version = cursor.u32("version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        got = f"version {swapped} in big-endian order" if swapped in VERSIONS else f"version {version}"
        raise cursor.error("version", got, "version 2 or 3, little endian", 4)
    return version


def _count(cursor: Cursor, field: str, most: int, least_nbytes: int) -> int:
    """A count that the rest of the file could hold: checked before anything loops over it."""
    count = cursor.u64(field)
    room = (cursor.limit - cursor.position) // least_nbytes
    if count > min(most, room):
        want = f"at most {most}" if most <= room else f"at most {room}, as many as the file has bytes for"
        raise cursor.error(field, count, want, cursor.position - 8)
    return count


def _read_metadata(cursor: Cursor, count: int) -> tuple[dict[str, object], int]:
    metadata: dict[str, object] = {}
    alignment = limits.DEFAULT_ALIGNMENT
    for index in range(count):
        start = cursor.position
        key = cursor.name(f"metadata_kv[{index}].key", limits.KEY_BYTES)
        if key in metadata:
            raise cursor.error(f"metadata_kv[{index}].key", f"{shown(key)} twice", "every key once", start)
        field = f"metadata_kv[{shown(key)}].value"
        value_type = cursor.u32(f"{field}_type")
        value_at = cursor.position
        metadata[key] = read_value(cursor, value_type, field)
        if key == "general.alignment":
            alignment = metadata[key]
            if value_type != UINT32 or alignment not in limits.ALIGNMENTS:
                got = f"{shown(str(alignment))} (value type {value_type})"
                raise cursor.error(field, got, "a UINT32 power of two from 8 to 65536", value_at)
        if key == "general.architecture" and value_type != STRING:
            raise cursor.error(f"{field}_type", value_type, f"{STRING} (STRING)", value_at - 4)
    return metadata, alignment


def _read_tensor_infos(cursor: Cursor, count: int) -> list[TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for index in range(count):
        start = cursor.position
        name = cursor.name(f"tensor_infos[{index}].name", limits.NAME_BYTES)
        if name in tensors:
            raise cursor.error(f"tensor_infos[{index}].name", f"{shown(name)} twice", "every tensor once", start)
        tensors[name] = _read_tensor_info(cursor, name, start)
    return list(tensors.values())


def _read_tensor_info(cursor: Cursor, name: str, start: int) -> TensorInfo:
    field = f"tensor_infos[{shown(name)}]"
    rank = cursor.u32(f"{field}.n_dimensions")
    if rank > limits.DIMENSIONS:
        raise cursor.error(f"{field}.n_dimensions", rank, f"at most {limits.DIMENSIONS}", cursor.position - 4)
    at = cursor.position
    dimensions = [cursor.u64(f"{field}.dimensions[{axis}]") for axis in range(rank)]
    if 0 in dimensions:  # too large a product cannot wrap in Python, and never fits the file
        raise cursor.error(f"{field}.dimensions", dimensions, "dimensions of 1 or more", at)
    type_id = cursor.u32(f"{field}.type")
    layout = LAYOUT_BY_ID.get(type_id)
    if layout is None:
        raise cursor.error(f"{field}.type", type_id, "a ggml type that vtlab knows", cursor.position - 4)
    row = dimensions[0] if dimensions else 1
    if row % layout.elements:
        want = f"rows of a multiple of {layout.elements} for {layout.name}"
        raise cursor.error(f"{field}.dimensions[0]", row, want, at)
    offset = cursor.u64(f"{field}.offset")
    return TensorInfo(name, layout, tuple(reversed(dimensions)), offset, start)
