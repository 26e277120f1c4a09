"""The kernels' sources: .cu files and generated ones, what they include, and the digest a build or record is about."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from vtlab.ops.errors import ContractError

FOLDER = Path(__file__).parent / "cuda"
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)

FLAGS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
"""What MIRROR's bytes ask for: no contraction, subnormals kept, divisions and roots rounded correctly."""

_generated: dict[str, tuple[Callable[[], str], bool]] = {}


def generate(family: str, text: Callable[[], str], *, ahead: bool) -> None:
    """Add a family whose source is `text()`, the same at every call; ahead: it is built and recorded with the others.

    Raises ContractError where the name is that of a .cu file.
    """
    if (FOLDER / f"{family}.cu").exists():
        raise ContractError("build", "family", repr(family), f"a name other than that of cuda/{family}.cu")
    _generated[family] = (text, ahead)


def families() -> tuple[str, ...]:
    """The families that are built ahead of time and recorded: one .cu file, or generated source, each."""
    ahead = {family for family, (_, listed) in _generated.items() if listed}
    return tuple(sorted(ahead.union(path.stem for path in FOLDER.glob("*.cu"))))


def text_of(family: str) -> str:
    """The family's source; ContractError with those that exist."""
    if family in _generated:
        return _generated[family][0]()
    if family not in families():
        raise ContractError("build", "family", repr(family), "one of " + ", ".join(families()))
    return (FOLDER / f"{family}.cu").read_text()


def texts_of(family: str) -> dict[str, str]:
    """File name -> text of the source, ``<family>.cu``, and of every header it includes, directly or not."""
    main = f"{family}.cu"
    found: dict[str, str] = {}
    waiting = [main]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = text_of(family) if name == main else (FOLDER / name).read_text()
        waiting += [name for name in _INCLUDE.findall(found[name]) if (FOLDER / name).exists()]
    return dict(sorted(found.items()))


@cache
def source_digest(family: str) -> str:
    """Digest of everything that decides what the family's kernels compute: sources, headers, flags."""
    digest = hashlib.sha256("\0".join(FLAGS).encode())
    for name, text in texts_of(family).items():
        digest.update(b"\0" + name.encode() + b"\0" + text.encode())
    return digest.hexdigest()[:16]
