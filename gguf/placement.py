"""Do the tensors fill the data section: each in its own bytes, none outside, nothing between or behind them?"""

from __future__ import annotations

from pathlib import Path

from vtlab.ops.errors import FormatError

from .cursor import shown
from .header import Header


def check_placement(header: Header, file_nbytes: int, file: str | Path) -> None:
    """Tensor i starts where tensor i-1 ends, rounded up to the alignment, in the order of offsets.

    One rule finds overlaps, holes, unaligned offsets, truncated data and bytes that belong to no tensor. Padding
    behind the last tensor may be whole, cut short or absent, as writers differ, but never as long as the alignment.

    Raises
    ------
    FormatError : naming the tensor (`tensor_infos['…'].offset`) or the section (`tensor_data`).
    """
    end = 0
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
        field = f"tensor_infos[{shown(tensor.name)}]"
        free = -(-end // header.alignment) * header.alignment
        if tensor.offset != free:
            got = "inside the tensor before it" if tensor.offset < end else f"{tensor.offset - free} bytes after it"
            want = f"{free}, the next free byte"
            raise FormatError(file, tensor.at, f"{field}.offset", f"{tensor.offset}, {got}", want)
        end = tensor.offset + tensor.nbytes
        if header.data_start + end > file_nbytes:
            want = f"at most {max(0, file_nbytes - header.data_start - tensor.offset)}, all that is left"
            raise FormatError(file, tensor.at, f"{field}.dimensions", f"{tensor.nbytes} bytes", want)
    spare = file_nbytes - header.data_start - end
    if spare >= header.alignment:
        got, want = f"{spare} bytes behind the last tensor", f"less than {header.alignment}"
        raise FormatError(file, header.data_start + end, "tensor_data", got, want)
