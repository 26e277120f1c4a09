"""A file as read-only memory, and one rule for what may be mapped."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from vtlab.ops.errors import FormatError


def map_file(path: str | Path) -> mmap.mmap | bytes:
    """bytes of `path`, mapped read-only: nothing is read before it is touched.

    The mapping lives as long as any array made over it. An empty file cannot be mapped and gives `b""`. A file must
    not be cut while it is mapped: reading what is gone ends the process (SIGBUS), as with every memory map.

    Raises
    ------
    OSError : the file cannot be opened.
    FormatError : it is no regular file (opening a pipe would wait for ever).
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise FormatError(path, None, "file", "a " + ("directory" if stat.S_ISDIR(mode) else "special file"), "a file")
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def forget(buffer: mmap.mmap | bytes) -> None:
    """Let the pages of a mapped file go, where the system can: the next touch brings them back."""
    if isinstance(buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        buffer.madvise(mmap.MADV_DONTNEED)
