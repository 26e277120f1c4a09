"""parity/records/wrongs.json: wrongs planted in kernels that were noticed, each under a digest of what decides that.

To plant them all takes many minutes. A wrong on record is planted again only where its text, its kernel's source, its
launcher, the cases that should notice it or the emulated GPU have changed; one in sixteen is planted all the same, and
``--replant`` plants all.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from functools import cache
from pathlib import Path

from vtlab.device.build import write_atomically
from vtlab.device.source import source_digest
from vtlab.ops.table import lookup

from . import device_cases
from .device_record import RECORDS

PATH = RECORDS / "wrongs.json"
HERE = Path(__file__).parent
_SHARED = ("device_cases.py", "device_run.py", "compare.py", "emulation.hpp", "emulation.py", "emulation_switch.hpp")
_AUDITED = 16


@cache
def _bytes(path: Path) -> bytes:
    return path.read_bytes()


@cache
def _edges() -> dict[str, Path]:
    """op -> the module that holds its edges."""
    found = {}
    for path in sorted(HERE.glob("device_edges_*.py")):
        found |= dict.fromkeys(importlib.import_module(f".{path.stem}", __package__).EDGES, path)
    return found


@cache
def _surroundings(family: str) -> bytes:
    """The digest of a family's kernels, launcher, cases and the machinery around them."""
    files = {HERE / name for name in _SHARED} | {HERE.parent / "device" / f"{family}.py"}
    for op in device_cases.device_ops():
        if lookup(op).contract.family == family:
            files.add(_edges().get(op, HERE / "device_cases.py"))
    digest = hashlib.sha256(source_digest(family).encode())
    for path in sorted(path for path in files if path.exists()):
        digest.update(path.name.encode() + b"\0" + _bytes(path))
    return digest.digest()


def key_of(family: str, wrong: tuple[str, str]) -> str:
    """What a noticed wrong is known by."""
    return hashlib.sha256(_surroundings(family) + "\0".join(wrong).encode()).hexdigest()[:16]


def recorded() -> dict[str, str]:
    """ "family: name" of every wrong on record -> its key."""
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def known(family: str, name: str, wrong: tuple[str, str], record: dict[str, str]) -> bool:
    """Whether it was noticed as it is, and is none of those that are planted all the same."""
    key = key_of(family, wrong)
    return record.get(f"{family}: {name}") == key and int(key, 16) % _AUDITED != 0


def note(noticed: dict[str, str], missed: set[str], all_names: set[str]) -> None:
    """Enter what was noticed, strike what was not and what is no longer planted."""
    kept = {name: key for name, key in (recorded() | noticed).items() if name in all_names and name not in missed}
    write_atomically(PATH, json.dumps(dict(sorted(kept.items())), indent=1).encode() + b"\n")
