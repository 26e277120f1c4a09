"""The .cu files: where they are, what they include, and the digest that a build or a record is about."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

from vtlab.ops.errors import ContractError

FOLDER = Path(__file__).parent / "cuda"
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)

FLAGS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
"""What MIRROR's bytes ask for: no contraction, subnormals kept, divisions and roots rounded correctly."""


def families() -> tuple[str, ...]:
    """The families that have kernels: one .cu file each."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.cu")))


def path_of(family: str) -> Path:
    """The family's .cu file; ContractError with those that exist."""
    if family not in families():
        raise ContractError("build", "family", repr(family), "one of " + ", ".join(families()))
    return FOLDER / f"{family}.cu"


def files_of(family: str) -> tuple[Path, ...]:
    """The .cu file and every header it includes, directly or not, by name."""
    found: dict[str, Path] = {}
    waiting = [path_of(family)]
    while waiting:
        path = waiting.pop()
        if path.name in found:
            continue
        found[path.name] = path
        waiting += [FOLDER / name for name in _INCLUDE.findall(path.read_text()) if (FOLDER / name).exists()]
    return tuple(found[name] for name in sorted(found))


@cache
def source_digest(family: str) -> str:
    """Digest of everything that decides what the family's kernels compute: sources, headers, flags."""
    digest = hashlib.sha256("\0".join(FLAGS).encode())
    for path in files_of(family):
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
