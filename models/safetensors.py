"""safetensors files, checked and memory-mapped: one file, or the shards of a checkpoint as one mapping."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

import ml_dtypes
import numpy as np

from vtlab.gguf.mapping import map_file
from vtlab.ops.errors import FormatError

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "U8": np.dtype("u1"),
        "I8": np.dtype("i1"),
        "U16": np.dtype("<u2"),
        "I16": np.dtype("<i2"),
        "U32": np.dtype("<u4"),
        "I32": np.dtype("<i4"),
        "U64": np.dtype("<u8"),
        "I64": np.dtype("<i8"),
        "F16": np.dtype("<f2"),
        "F32": np.dtype("<f4"),
        "F64": np.dtype("<f8"),
        "C64": np.dtype("<c8"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    }
)

MAX_HEADER = 100_000_000  # bytes; the format's own cap
MAX_INDEX = 100_000_000
MAX_ITEMS = 1 << 20  # commas in a JSON text: about 150,000 tensors, and at most some 200 MB of Python objects
MAX_AXES = 64  # NumPy's


class Safetensors(Mapping):
    """Tensors by name, as read-only NumPy views of mapped files; opened by `read_safetensors`.

    Attributes
    ----------
    tensors : name -> array. metadata : the `__metadata__` of the files, joined (the first file's word counts).
    files : the paths, in the order in which they were read.
    """

    def __init__(self, files: list[Path]):
        self.files = files
        self.tensors: dict[str, np.ndarray] = {}
        self.metadata: dict[str, str] = {}
        self._owner: dict[str, Path] = {}
        for file in files:
            tensors, metadata = _read_file(file)
            for name in tensors.keys() & self.tensors.keys():
                raise FormatError(file, None, name, f"also in {self._owner[name].name}", "a tensor in one file only")
            self.tensors |= tensors
            self.metadata = metadata | self.metadata
            self._owner |= dict.fromkeys(tensors, file)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def file_of(self, name: str) -> Path:
        """The file that holds tensor `name`."""
        return self._owner[name]

    def close(self) -> None:
        """Let go of the tensors. A file is unmapped once no array that a caller kept looks into it."""
        self.tensors = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def read_safetensors(path: str | Path) -> Safetensors:
    """name -> array for a `.safetensors` file, a `.safetensors.index.json`, or a folder that holds either.

    A folder is read by `model.safetensors` if it has one, else by its index, else by all its `.safetensors` files.
    Arrays are views of the mapped files in their stored dtype (`DTYPES`; bf16 and fp8 through ml_dtypes), never copies.

    Raises
    ------
    FormatError : a header, index or shard breaks the format, or shards and index disagree; nothing is handed out then.
    OSError : the path cannot be opened.
    Source: https://github.com/huggingface/safetensors README, "Format".
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    return _read_index(path) if path.name.endswith(".index.json") else Safetensors([path])


def _read_folder(folder: Path) -> Safetensors:
    whole, index = folder / "model.safetensors", sorted(folder.glob("*.safetensors.index.json"))
    if whole.exists():
        return Safetensors([whole])
    if len(index) > 1:
        raise FormatError(folder, None, "index", ", ".join(file.name for file in index), "one index")
    if index:
        return _read_index(index[0])
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FormatError(folder, None, "folder", "no .safetensors file", "at least one")
    return Safetensors(files)


def _read_index(path: Path) -> Safetensors:
    raw = map_file(path)
    if len(raw) > MAX_INDEX:
        raise FormatError(path, None, "index", f"{len(raw)} bytes", f"at most {MAX_INDEX}")
    index = _parse_json(path, raw[:], 0, "index")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(path, None, "weight_map", type(weight_map).__name__, "an object: tensor -> file name")
    for name, file in weight_map.items():
        field = f"weight_map[{name[:80]!r}]"
        if not isinstance(file, str) or not file.endswith(".safetensors") or set(file) & set("/\\:\0"):
            want = "the bare name of a .safetensors file beside the index"
            raise FormatError(path, None, field, repr(file)[:80], want)
        if not os.path.isfile(path.parent / file):  # unlike Path.is_file, no error for a name too long
            raise FormatError(path, None, field, f"{file[:80]}, which is missing", "a file beside the index")
    found = Safetensors([path.parent / file for file in sorted(set(weight_map.values()))])
    for name in found.keys() | weight_map.keys():
        stated, held = weight_map.get(name, "nothing"), found.file_of(name).name if name in found else "no file"
        if stated != held:
            raise FormatError(path, None, f"weight_map[{name[:80]!r}]", stated, f"{held}, which holds the tensor")
    return found


def _read_file(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    buffer = map_file(path)
    if len(buffer) < 8:
        raise FormatError(path, 0, "header length", f"a file of {len(buffer)} bytes", "8 bytes that say it, or more")
    length, room = int.from_bytes(buffer[:8], "little"), len(buffer) - 8
    if length > min(MAX_HEADER, room):
        want = f"at most {MAX_HEADER}" if length > MAX_HEADER else f"at most {room}, all that is left: the file is cut"
        raise FormatError(path, 0, "header length", length, want)
    text = buffer[8 : 8 + length]
    if text[:1] != b"{":
        raise FormatError(path, 8, "header", text[:1], b"{")
    header = _parse_json(path, text, 8, "header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(path, 8, "__metadata__", type(metadata).__name__, "an object of strings")
    data = np.frombuffer(buffer, np.uint8)[8 + length :]
    entries = {name: _check_entry(path, name, entry) for name, entry in header.items()}
    _check_placement(path, entries, len(data), 8 + length)
    return {name: _view(path, name, data, 8 + length, *entry) for name, entry in entries.items()}, metadata


def _parse_json(path: Path, text: bytes, at: int, field: str) -> dict:
    """A JSON object whose keys are unique at every level; numbers are finite, text is well-formed Unicode."""

    def unique(pairs: list[tuple[str, object]]) -> dict:
        for text in itertools.chain.from_iterable(pairs):
            if isinstance(text, str):
                text.encode()  # refuses lone surrogates, which JSON can spell and UTF-8 cannot
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise FormatError(path, at, field, f"key {twice[:80]!r} twice", "every key once")
        return result

    def refuse(constant: str) -> None:
        raise FormatError(path, at, field, constant, "JSON")

    if (items := text.count(b",")) > MAX_ITEMS:
        raise FormatError(path, at, field, f"{items} commas", f"at most {MAX_ITEMS}")
    try:
        value = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except FormatError:
        raise
    except (ValueError, RecursionError) as problem:
        raise FormatError(path, at, field, problem, "a JSON object in UTF-8") from None
    if not isinstance(value, dict):
        raise FormatError(path, at, field, type(value).__name__, "a JSON object")
    return value


def _check_entry(path: Path, name: str, entry: object) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """dtype, shape, begin and end of one header entry; shape and bytes agree."""
    field = repr(name[:80])
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        got = ", ".join(entry)[:80] if isinstance(entry, dict) else type(entry).__name__
        raise FormatError(path, 8, field, got, "dtype, shape, data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise FormatError(path, 8, f"{field}.dtype", repr(entry["dtype"])[:80], ", ".join(DTYPES))
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or len(shape) > MAX_AXES or math.prod(n or 1 for n in shape) * dtype.itemsize >= 1 << 63:
        want = f"at most {MAX_AXES} integers of 0 or more, product below 2^63"
        raise FormatError(path, 8, f"{field}.shape", repr(shape)[:80], want)
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise FormatError(path, 8, f"{field}.data_offsets", repr(offsets)[:80], "[begin, end], integers of 0 or more")
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        got, want = f"{offsets[1] - offsets[0]} bytes", f"{nbytes} bytes for {entry['dtype']} {shape}"
        raise FormatError(path, 8, f"{field}.data_offsets", got, want)
    return dtype, tuple(shape), *offsets


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_placement(path: Path, entries: Mapping[str, tuple], nbytes: int, start: int) -> None:
    """The tensors tile the data: each begins where the one before it ends, the last ends with the file."""
    end = 0
    for name, (_, _, begin, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if begin != end:
            got = f"begin {begin}, {'inside another tensor' if begin < end else 'behind a hole'}"
            raise FormatError(path, start + end, f"{name[:80]!r}.data_offsets", got, f"begin {end}")
        end = stop
    if end != nbytes:
        raise FormatError(path, start + min(end, nbytes), "data", f"{nbytes} bytes", f"{end} bytes, as the header says")


def _view(path: Path, name: str, data: np.ndarray, start: int, dtype: np.dtype, shape: tuple, begin: int, end: int):
    raw = data[begin:end]
    if dtype == np.bool_ and raw.size and raw.max() > 1:
        at = int(np.argmax(raw > 1))
        raise FormatError(path, start + begin + at, repr(name[:80]), f"a bool of {raw[at]}", "0 or 1")
    return raw.view(dtype).reshape(shape)
