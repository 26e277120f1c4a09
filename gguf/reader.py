"""GGUF files, checked and memory-mapped: tensors stay in their block format, on disk, until somebody reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from vtlab.ops.errors import FormatError

from .header import parse_header
from .mapping import forget, map_file
from .placement import check_placement


@dataclass(frozen=True, eq=False)
class BlockTensor:
    """A tensor of a GGUF file, still in ggml's blocks.

    Attributes
    ----------
    name : as in the file. type : ggml's name of the block type, e.g. "Q4_K".
    shape : row-major (NumPy order, the reverse of ggml's `ne`); blocks run along the last axis.
    data : uint8 [*shape[:-1], bytes of a row], a read-only view of the mapped file. offset : its byte in the file.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    data: np.ndarray
    offset: int


class GGUFFile:
    """An open GGUF file.

    Attributes
    ----------
    path, version, alignment : of the file.
    metadata : key -> int, float, bool, str, NumPy array (arrays of numbers) or list (of strings, of arrays).
    tensors : name -> BlockTensor, in the order of the file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._buffer = buffer = map_file(path)
        header = parse_header(buffer, path)
        check_placement(header, len(buffer), path)
        self.version, self.metadata, self.alignment = header.version, header.metadata, header.alignment
        self.tensors: dict[str, BlockTensor] = {}
        raw = np.frombuffer(buffer, np.uint8)
        for info in header.tensors:
            start = header.data_start + info.offset
            data = raw[start : start + info.nbytes].reshape(*info.shape[:-1], info.row_nbytes)
            self.tensors[info.name] = BlockTensor(info.name, info.layout.name, info.shape, data, start)

    @property
    def arch(self) -> str:
        """`general.architecture`, e.g. "gemma3"; FormatError where a file (an adapter, a matrix) has none."""
        if "general.architecture" not in self.metadata:
            raise FormatError(self.path, None, "metadata_kv['general.architecture']", "no such key", "a string")
        return self.metadata["general.architecture"]

    def forget(self) -> None:
        """Let go of the memory that tensors read so far take; what is read again comes from the file again."""
        forget(self._buffer)

    def close(self) -> None:
        """Let go of the tensors. The file is unmapped once no array that a caller kept looks into it."""
        self.tensors, self._buffer = {}, b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def read_gguf(path: str | Path) -> Self:
    """metadata and tensors of a GGUF file, version 2 or 3, little endian; no tensor byte is read or copied.

    One part of a split model is read as the file it is.

    Raises
    ------
    FormatError : the file breaks the format or a limit of `vtlab.gguf.limits`; nothing is handed out then.
    OSError : it cannot be opened.
    Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    return GGUFFile(path)
