"""The kernels of device/cuda on a host: compiled as C++ against emulation.hpp and run thread by thread.

`EmulatedRuntime` stands in for CuPy, so that launchers and kernels run whole on NumPy arrays: byte for byte what the
GPU computes (but for NaN payloads and the hardware's approximations, whose results never show), races and speed aside.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from vtlab.device.build import cache_folder
from vtlab.device.source import texts_of

HEADERS = tuple(Path(__file__).parent / name for name in ("emulation.hpp", "emulation_switch.hpp"))
FLAGS = ("-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-w")
_UNITS = ("fma", "f16c")
"""What x86-64 may lack: without it each `fma` of a kernel is a call, which took most of a product's time."""
_SIGNED_ZEROS = "-fno-tree-forwprop"
"""GCC makes one instruction of `-fma(a, b, c)`, whose zeros have the other sign."""
_PLAIN, _WRONG = "-O1", "-O0"
"""A planted wrong runs a few small cases once: there the compiler's time counts."""
_KERNEL = re.compile(r"__attribute__\(\(noinline\)\)\s+void\s+(\w+)\s*\(")


@cache
def compiler() -> str | None:
    """A C++ compiler of this machine that knows half precision, or None."""
    for name in ("g++", "clang++"):
        if shutil.which(name):
            probe = [name, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
            if (
                subprocess.run(probe, input=b"_Float16 half;\n#include <ucontext.h>\n", capture_output=True).returncode
                == 0
            ):
                return name
    return None


@cache
def flags() -> tuple[str, ...]:
    """The compiler's flags, with this processor's units for fused sums and half precision where it has them."""
    about = Path("/proc/cpuinfo")
    known = about.read_text().split() if about.exists() else ()
    return (*FLAGS, _SIGNED_ZEROS, *(f"-m{unit}" for unit in _UNITS if unit in known))


@cache
def library(family: str, mutate: tuple[str, str] | None = None) -> ctypes.CDLL:
    """The family's kernels as a library, each with a uniform entry ``emulate_<kernel>``.

    mutate: (old text, new text), old standing once in the sources, plants a wrong.
    """
    digest = hashlib.sha256(repr((flags(), mutate)).encode() + Path(__file__).read_bytes())
    for header in HEADERS:
        digest.update(header.read_bytes())
    for text in texts_of(family).values():
        digest.update(text.encode())
    made = cache_folder() / "emulation" / f"{family}-{digest.hexdigest()[:16]}.so"
    if not made.exists():
        _build(family, mutate, made)
    return ctypes.CDLL(str(made))


def kernels(family: str) -> list[str]:
    """The names of the family's kernels."""
    name = library(family).vt_kernels
    name.restype = ctypes.c_char_p
    return name().decode().split()


def _build(family: str, mutate: tuple[str, str] | None, made: Path) -> None:
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        folder = Path(scratch)
        texts = texts_of(family)
        if mutate is not None:
            places = [name for name, text in texts.items() for _ in range(text.count(mutate[0]))]
            if len(places) != 1:
                raise ValueError(f"{family}: {mutate[0]!r} stands {len(places)} times")
            texts[places[0]] = texts[places[0]].replace(*mutate)
        for name, text in texts.items():
            (folder / name).write_text(text)
        includes = (f"-I{folder}", f"-I{HEADERS[0].parent}")
        main = folder / f"{family}.cu"
        plain = _run(compiler(), "-E", "-P", *FLAGS[:1], *includes, "-x", "c++", str(main))
        names = _KERNEL.findall(plain)
        entries = f'extern "C" const char* vt_kernels() {{ return "{" ".join(names)}"; }}\n' + "".join(
            f'extern "C" void emulate_{name}(void** args) {{ emulation::call({name}, args); }}\n' for name in names
        )
        (folder / "all.cpp").write_text(plain + entries)
        library = folder / "all.so"
        level = _PLAIN if mutate is None else _WRONG
        _run(compiler(), level, *flags(), str(folder / "all.cpp"), "-o", str(library))
        library.replace(made)


def _run(*command: str) -> str:
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{run.stderr[:4000]}")
    return run.stdout


class EmulatedRuntime:
    """A `vtlab.device.runtime.Runtime` over NumPy arrays. `launched` lists the kernels that ran."""

    def __init__(self, mutate: dict[str, tuple[str, str]] | None = None):
        self._mutate = mutate or {}
        self.launched: list[str] = []
        self.in_capture = False

    def empty(self, shape, dtype):
        item = np.dtype(dtype).itemsize
        count = int(np.prod(shape, dtype=np.int64))
        raw = np.empty(count * item + 16, np.uint8)
        first = -raw.ctypes.data % 16
        return raw[first : first + count * item].view(dtype).reshape(shape)

    def pointer(self, array) -> int:
        return array.ctypes.data

    def place(self, array):
        return getattr(array, "place", 0)

    def here(self):
        return 0

    def shared_memory(self) -> int:
        return 227 << 10

    def capability(self) -> tuple[int, int]:
        return 9, 0

    def stream(self) -> int:
        return 0

    def capturing(self) -> bool:
        return self.in_capture

    def read(self, array):
        return np.array(array)

    def send(self, host):
        array = self.empty(host.shape, host.dtype)
        array[...] = host
        return array

    def wait(self) -> None:
        """Launches have run when `launch` returns."""

    def tensor_map(self, address, width, rows, stride, high):
        return np.array([address, width, rows, stride, high, *[0] * 11], np.uint64).view("V128")[0]

    def launch(self, family, kernel, grid, block, shared, args) -> None:
        self.launched.append(kernel)
        found = library(family, self._mutate.get(family))
        slots = [np.array([value], value.dtype if isinstance(value, np.generic) else np.int64) for value in args]
        addresses = (ctypes.c_void_p * len(slots))(*(slot.ctypes.data for slot in slots))
        entry = ctypes.cast(getattr(found, f"emulate_{kernel}"), ctypes.c_void_p)
        found.vt_emulate(entry, ctypes.c_uint(grid), ctypes.c_uint(block[0]), ctypes.c_uint(block[1]), addresses)


__all__ = ["EmulatedRuntime", "compiler", "kernels", "library"]
