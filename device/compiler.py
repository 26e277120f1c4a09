"""Compile one family for one target: NVRTC where its Python bindings are installed, else nvcc. Needs no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from .errors import DeviceError
from .source import FLAGS, FOLDER, text_of

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


@dataclass(frozen=True)
class Usage:
    """What the assembler says about one kernel; `spills` are bytes stored and loaded for want of registers."""

    registers: int
    shared: int
    stack: int
    spills: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Compiled:
    """A cubin (or PTX, for a ``compute_`` target), the compiler that made it, and its kernels' usage by name."""

    image: bytes
    compiler: str
    kernels: dict[str, Usage]


def compile_family(family: str, target: str) -> Compiled:
    """Compile the family's source for ``sm_…`` into a cubin, or for ``compute_…`` into PTX.

    Raises ContractError for an unknown family, DeviceError where there is no compiler or it refuses the source.
    """
    _, run = _compiler()
    image, log = run(f"{family}.cu", text_of(family), target)
    return Compiled(image, compiler(), usages(log))


def compiler() -> str:
    """Which compiler is used here, e.g. ``nvrtc 13.0``; DeviceError where there is none."""
    return _compiler()[0]


@cache
def _compiler() -> tuple[str, Callable[[str, str, str], tuple[bytes, str]]]:
    try:
        from cuda.bindings import nvrtc

        error, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):  # the bindings without the library raise RuntimeError
        pass
    else:
        if int(error) == 0:
            return f"nvrtc {major}.{minor}", _nvrtc
    if shutil.which("nvcc"):
        text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
        return f"nvcc {re.search(r'release ([0-9.]+)', text)[1]}", _nvcc
    raise DeviceError("no CUDA compiler: install cuda-bindings and nvidia-cuda-nvrtc, or put nvcc on the PATH")


def _nvrtc(name: str, source: str, target: str) -> tuple[bytes, str]:
    from cuda.bindings import nvrtc

    def call(function, *arguments):
        error, *values = function(*arguments)
        return int(error), (values[0] if values else None)

    def text(size, read, program) -> bytes:
        length = call(size, program)[1]
        buffer = b" " * (length + 1)  # never one byte alone: Python shares those, and NVRTC writes into this one
        call(read, program, buffer)
        return buffer[:length]

    _, program = call(nvrtc.nvrtcCreateProgram, source.encode(), name.encode(), 0, [], [])
    flags = [*FLAGS, f"-arch={target}", f"-I{FOLDER}", "-default-device", "--ptxas-options=-v", "-diag-suppress=177"]
    try:
        error, _ = call(nvrtc.nvrtcCompileProgram, program, len(flags), [flag.encode() for flag in flags])
        log = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode().rstrip("\0 \n")
        if error:
            raise DeviceError(f"{name} does not compile for {target}:\n{log}")
        if target.startswith("compute_"):
            return text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program), log
        return text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvcc(name: str, source: str, target: str) -> tuple[bytes, str]:
    kind = "-ptx" if target.startswith("compute_") else "-cubin"
    with tempfile.TemporaryDirectory() as folder:
        made, path = Path(folder) / "made", Path(folder) / name
        path.write_text(source)
        command = ["nvcc", kind, f"-arch={target}", *FLAGS, f"-I{FOLDER}", "-Xptxas=-v", "-diag-suppress=177"]
        run = subprocess.run([*command, str(path), "-o", str(made)], capture_output=True, text=True)
        if run.returncode:
            raise DeviceError(f"{name} does not compile for {target}:\n{run.stderr}")
        return made.read_bytes() + b"\0" * (kind == "-ptx"), run.stderr


def usages(log: str) -> dict[str, Usage]:
    """The kernels' usage out of what ``ptxas -v`` printed, through either compiler."""
    found: dict[str, Usage] = {}
    name, stack, spills = None, 0, 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name = entry[1]
        elif counts := _SPILLS.search(line):
            stack, spills = int(counts[1]), int(counts[2]) + int(counts[3])
        elif (used := _USED.search(line)) and name is not None:
            found[name] = Usage(int(used[1]), int(used[2] or 0), stack, spills)
            name = None
    return dict(sorted(found.items()))
