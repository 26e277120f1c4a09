"""Compiled kernels without their compiler: the objects that Numba made, kept in the cache folder and linked from there.

Numba and LLVM take some 120 MB and half a second of a process that only runs what an earlier one compiled. An image is
one kernel's ELF object as LLVM wrote it (x86-64, large code model: absolute addresses only); linking it is putting its
sections into memory and adding addresses. Elsewhere than on Linux on x86-64, or where memory may not be made
executable, there are none, and Numba loads what it kept itself.

Source: System V ABI, AMD64 supplement, chapter 4 (object files).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import platform
import struct
import sys
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path

from .natives import Native, letters_of, natives

_SECTION, _SYMBOL, _RELOCATION = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ"), struct.Struct("<QQq")
_ALLOCATED, _NOBITS, _RELA, _SYMTAB = 2, 8, 4, 2
_UNDEFINED, _COMMON = 0, 0xFFF2
_ABSOLUTE_64 = 1  # R_X86_64_64
_ENTRY, _ENVIRONMENT = "_ZN7cpython", "_ZN08NumbaEnv"
_CHECK = 32  # bytes of the digest before an object: a file that is damaged is not run
_KEYWORDS = 3  # METH_VARARGS | METH_KEYWORDS, as Numba's wrappers are called
_NEVER = {
    "numba_runtime_build_excinfo_struct", "numba_unpickle", "numba_do_raise", "numba_gil_ensure", "numba_gil_release",
    "NRT_Free",
}  # fmt: skip
"""What the wrappers would raise an exception of the kernel's with. Kernels raise none."""
_kept: list[object] = []


class _Method(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p),
    )  # fmt: skip


class Unlinkable(ValueError):
    """An object that holds something else than kernels do."""


def available() -> bool:
    """Whether this process can use and leave images."""
    return _digest() is not None


def load(module: str, name: str) -> object | None:
    """The entry point of a kernel, or the constant, that an earlier process kept; None where there is none."""
    folder = _folder()
    if folder is None:
        return None
    with contextlib.suppress(OSError, Unlinkable):
        data = (folder / f"{module}.{name}.o").read_bytes()
        image = data[_CHECK:]
        if hashlib.sha256(image).digest() == data[:_CHECK]:
            return linked(image, name)
    with contextlib.suppress(OSError, ValueError):
        value = json.loads((folder / f"{module}.{name}.json").read_text())
        return tuple(value) if isinstance(value, list) else value
    return None


def keep(module: str, name: str, found: object) -> None:
    """Leave a kernel's object (bytes), or a constant (a number, a tuple of them or of strings), to later processes."""
    folder = _folder()
    if folder is None:
        return
    if isinstance(found, bytes):
        suffix, data = ".o", hashlib.sha256(found).digest() + found
    else:
        suffix, data = ".json", json.dumps(found).encode()
    target = folder / f"{module}.{name}{suffix}"
    with contextlib.suppress(OSError):  # a folder that cannot be written costs Numba's import, no more
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            aside = target.with_suffix(f"{suffix}.{os.getpid()}")
            aside.write_bytes(data)
            aside.replace(target)


def _folder() -> Path | None:
    """Where the images lie that fit; None where there are none."""
    from ..build import cache_folder

    digest = _digest()
    return None if digest is None else cache_folder() / "cpu" / digest


@cache
def _digest() -> str | None:
    """A digest of this processor, this Python and the sources of all kernels."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.implementation.name != "cpython":
        return None
    from .compiling import source_digest

    try:
        processor = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        versions = [metadata.version(package) for package in ("numba", "llvmlite", "numpy")]
    except (OSError, metadata.PackageNotFoundError):
        return None
    stable = ("vendor_id", "cpu family", "model", "stepping", "flags")
    identity = [line for line in processor if line.split("\t")[0].strip() in stable]
    identity += [*versions, sys.version, os.environ.get("VTLAB_CPU_TIER", "auto") or "auto", source_digest()]
    return hashlib.sha256("\n".join([*identity, Path(__file__).read_text()]).encode()).hexdigest()[:16]


def linked(image: bytes, name: str) -> Callable:
    """The kernel of an object, ready to be called.

    Errors: Unlinkable for a relocation or a symbol that no kernel has; OSError where memory cannot be executed.
    """
    sections, symbols = _read(image)
    at, size = {}, 0
    for index, (_, kind, flags, _, _, length, _, _, align, _) in enumerate(sections):
        if flags & _ALLOCATED and length:
            if kind == _NOBITS:
                raise Unlinkable("a section of zeros")
            size = -(-size // max(align, 1)) * max(align, 1)
            at[index], size = size, size + length
    commons = {symbol: size + 16 + 8 * i for i, symbol in enumerate(s for s, where, _ in symbols if where == _COMMON)}
    memory = mmap.mmap(-1, size + 16 + 8 * len(commons))
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    addresses, entry, code = [], None, {}
    for symbol, where, value in symbols:
        if where == _COMMON:
            address = base + commons[symbol]
            if not symbol.startswith(_ENVIRONMENT):
                raise Unlinkable(symbol)
            memory[commons[symbol] : commons[symbol] + 8] = struct.pack("<Q", ctypes.addressof(_environment()))
        elif where == _UNDEFINED:
            address = _outside(symbol) if symbol else 0
        else:
            address = base + at[where] + value if where in at else 0
        addresses.append(address)
        if where in at:
            code[symbol] = address
        if symbol.startswith(_ENTRY) and where in at:
            entry = symbol
    for index, offset in at.items():
        start, length = sections[index][4:6]
        memory[offset : offset + length] = image[start : start + length]
    for section in sections:
        if section[1] == _RELA and section[7] in at and not _unwinding(image, sections, section[7]):
            for place, info, addend in _RELOCATION.iter_unpack(image[section[4] : section[4] + section[5]]):
                if info & 0xFFFFFFFF != _ABSOLUTE_64:
                    raise Unlinkable(f"relocation {info & 0xFFFFFFFF}")
                struct.pack_into("<Q", memory, at[section[7]] + place, addresses[info >> 32] + addend)
    if entry is None or "_ZN" + entry.removeprefix(_ENTRY) not in code:
        raise Unlinkable("no entry point")
    if _protect()(base, len(memory), mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "memory cannot be made executable")
    method = _Method(name.encode(), code[entry], _KEYWORDS, None)
    _kept.append((memory, method))
    made = _new_function()(ctypes.byref(method), None, None)
    natives[made] = Native(letters_of(entry), code["_ZN" + entry.removeprefix(_ENTRY)])
    return made


def _read(image: bytes) -> tuple[list[tuple], list[tuple[str, int, int]]]:
    """Section headers, and (name, section, value) of the symbols."""
    if len(image) < 64 or image[:7] != b"\x7fELF\x02\x01\x01" or image[16:20] != b"\x01\x00\x3e\x00":
        raise Unlinkable("no relocatable ELF object of x86-64")
    start, count = struct.unpack_from("<Q", image, 40)[0], struct.unpack_from("<H", image, 60)[0]
    sections = [_SECTION.unpack_from(image, start + _SECTION.size * i) for i in range(count)]
    table = next((section for section in sections if section[1] == _SYMTAB), None)
    if table is None:
        raise Unlinkable("no symbols")
    names = sections[table[6]]
    symbols = []
    for name, _, _, where, value, _ in _SYMBOL.iter_unpack(image[table[4] : table[4] + table[5]]):
        begin = names[4] + name
        symbols.append((image[begin : image.index(b"\0", begin)].decode(), where, value))
    return sections, symbols


def _unwinding(image: bytes, sections: list[tuple], index: int) -> bool:
    """Whether a section is read by unwinders and debuggers only, which do not know of these kernels."""
    begin = sections[struct.unpack_from("<H", image, 62)[0]][4] + sections[index][0]
    return image[begin : image.index(b"\0", begin)] == b".eh_frame"


@cache
def _outside(symbol: str) -> int:
    if symbol in _NEVER:
        symbol = "abort"
    library = ctypes.pythonapi if symbol.startswith(("Py", "_Py")) else ctypes.CDLL(None)
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(library, symbol))
    except ValueError:
        raise Unlinkable(symbol) from None


@cache
def _environment() -> ctypes.Array:
    """What stands for Numba's environment of constants, which kernels have none of: memory that is not null."""
    return (ctypes.c_char * 256)()


@cache
def _protect() -> Callable:
    function = ctypes.CDLL(None, use_errno=True).mprotect
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


@cache
def _new_function() -> Callable:
    function = ctypes.pythonapi.PyCFunction_NewEx
    function.restype, function.argtypes = ctypes.py_object, (ctypes.c_void_p,) * 3
    return function
