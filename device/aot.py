"""Builds made ahead of time and nothing else: a tree that is verified whole, and a store that never compiles.

``vtlab build --out FOLDER --arch sm_90a`` makes a tree, ``vtlab build --verify --out FOLDER`` checks it, and with
``VTLAB_AOT=FOLDER`` kernels come from it alone: one that it lacks is an error, never a compilation at run time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from .arch import lookup
from .build import Build, Store, write_atomically
from .errors import DeviceError
from .source import FLAGS, families, source_digest

MANIFEST = "manifest.json"


def verify(folder: Path, targets: Iterable[str] = ()) -> dict[str, int]:
    """Check a tree against the sources that are here; how many families each target (by default: of the tree) has.

    Errors: DeviceError for a tree or a target that is missing, other families than the sources have, a build of
    another source, header or flag, a file that is missing or not what the manifest says, kernels beside those of the
    manifest; ContractError for a target that does not exist.
    """
    listing = read_manifest(folder)
    wanted = [lookup(name).name for name in targets] or sorted(listing)
    for target in wanted:
        if target not in listing:
            raise DeviceError(f"{folder}: no tree for {target}, only for {', '.join(sorted(listing)) or 'none'}")
        entries = listing[target]
        if set(entries) != set(families()):
            odd = sorted(set(entries) ^ set(families()))
            raise DeviceError(f"{folder}: families of {target} are not those of the sources: {', '.join(odd)}")
        for family, entry in entries.items():
            _check(folder, target, family, entry)
        present = {path.name for path in (folder / target).glob("*.cubin")}
        extra = present - {_file(family, entry) for family, entry in entries.items()}
        if extra:
            raise DeviceError(f"{folder}: {target} holds what no manifest lists: {', '.join(sorted(extra))}")
    return {target: len(listing[target]) for target in wanted}


def read_manifest(folder: Path) -> dict[str, dict]:
    """Target -> family -> entry; DeviceError where there is none."""
    try:
        listing = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise DeviceError(f"{folder}: no tree of builds ({error})") from None
    if not isinstance(listing, dict) or not all(isinstance(entries, dict) for entries in listing.values()):
        raise DeviceError(f"{folder / MANIFEST}: not a manifest")
    return listing


def _check(folder: Path, target: str, family: str, entry: dict) -> None:
    where = f"{folder}: {family} for {target}"
    if entry.get("digest") != source_digest(family) or tuple(entry.get("flags", ())) != FLAGS:
        raise DeviceError(f"{where} is stale: built from {entry.get('digest')}, the source is {source_digest(family)}")
    path = folder / target / _file(family, entry)
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DeviceError(f"{where} is missing ({error})") from None
    if found != entry.get("sha256"):
        raise DeviceError(f"{where} is damaged: {path.name} is not what the manifest lists")


def write(folder: Path, listing: dict[str, dict]) -> None:
    """Make a folder of builds a tree: the manifest, and away with builds that it does not list."""
    for target, entries in listing.items():
        kept = {_file(family, entry) for family, entry in entries.items()}
        for path in (folder / target).glob("*-*.cubin"):
            if path.name not in kept:
                path.unlink()
                path.with_suffix(".json").unlink(missing_ok=True)
    write_atomically(folder / MANIFEST, json.dumps(listing, indent=1, sort_keys=True).encode() + b"\n")


def _file(family: str, entry: dict) -> str:
    return f"{family}-{entry.get('digest')}.cubin"


class Tree(Store):
    """A folder of builds from which kernels are taken, and to which none is added."""

    def make(self, family: str, target: str) -> Build:
        raise DeviceError(
            f"{self.folder} (VTLAB_AOT) has no whole build of the present {family} for {target}, and nothing is "
            "compiled in its place"
        )


def store() -> Store:
    """Where this process takes kernels from: the tree that VTLAB_AOT names, verified, else the user's cache."""
    named = os.environ.get("VTLAB_AOT")
    if not named:
        return Store()
    verify(Path(named))
    return Tree(Path(named))
