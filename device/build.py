"""Cubins ahead of time: a folder of builds keyed by source digest, each beside the JSON that proves what it is."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vtlab.ops.numerics.threads import cores

from .compiler import compile_family
from .source import FLAGS, families, source_digest
from .spills import spilling


def cache_folder() -> Path:
    """Where cubins are kept: ``$VTLAB_CACHE``, else ``vtlab`` in the user's cache folder."""
    if own := os.environ.get("VTLAB_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vtlab"


@dataclass(frozen=True)
class Build:
    """One family compiled for one target. `entry` is its line of the manifest."""

    image: bytes
    entry: dict

    @property
    def spilling(self) -> list[str]:
        """Kernels that spill registers and do not declare it: a failure of the build."""
        return spilling(self.entry["target"], self.entry["kernels"])


class Store:
    """Builds under a folder: ``<target>/<family>-<digest>.cubin`` and, beside it, ``.json`` with the cubin's sha256.

    A build is whole or absent: both files are written elsewhere and renamed, the JSON last. Several processes may
    share a folder.
    """

    def __init__(self, folder: Path | None = None):
        self._folder = folder

    @cached_property
    def folder(self) -> Path:
        return self._folder or cache_folder()

    def find(self, family: str, target: str) -> Build | None:
        """The build of the family's present source for `target`, or None; a damaged one counts as none."""
        image, entry = self._paths(family, target)
        try:
            facts, data = json.loads(entry.read_text()), image.read_bytes()
        except (OSError, ValueError):
            return None
        whole = isinstance(facts, dict) and facts.get("sha256") == hashlib.sha256(data).hexdigest()
        return Build(data, facts) if whole and facts.get("digest") == source_digest(family) else None

    def make(self, family: str, target: str) -> Build:
        """Compile and keep; where the folder cannot be written to, compile only."""
        made = compile_family(family, target)
        build = Build(made.image, {
            "family": family, "target": target, "digest": source_digest(family), "flags": list(FLAGS),
            "compiler": made.compiler, "sha256": hashlib.sha256(made.image).hexdigest(),
            "kernels": {name: usage.as_dict() for name, usage in made.kernels.items()},
        })  # fmt: skip
        image, entry = self._paths(family, target)
        try:
            write_atomically(image, build.image)
            write_atomically(entry, json.dumps(build.entry, indent=1).encode() + b"\n")
        except OSError:
            pass
        return build

    def get(self, family: str, target: str) -> Build:
        """`find`, else `make`."""
        return self.find(family, target) or self.make(family, target)

    def _paths(self, family: str, target: str) -> tuple[Path, Path]:
        stem = self.folder / target / f"{family}-{source_digest(family)}"
        return stem.with_suffix(".cubin"), stem.with_suffix(".json")


def write_atomically(path: Path, data: bytes) -> None:
    """The file appears whole or not at all, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def build_all(
    targets: Iterable[str],
    store: Store,
    names: Iterable[str] = (),
    done: Callable[[Build], None] = lambda build: None,
    needed: Callable[[str, str], bool] = lambda family, target: True,
) -> list[Build]:
    """Build the families (by default all) for every target, a thread a core, calling `done` after each in order.

    What is there is kept; what is not `needed`, of a family and a target, is left out.
    """
    wanted = [(name, target) for target in targets for name in tuple(names) or families() if needed(name, target)]
    builds = []
    with ThreadPoolExecutor(cores()) as pool:  # compilers work outside of the interpreter's lock
        try:
            for build in pool.map(lambda one: store.get(*one), wanted):
                builds.append(build)
                done(build)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return builds


def manifest(builds: Iterable[Build]) -> dict:
    """Target -> family -> what was built: digest, compiler, sha256, and the kernels' registers, memory and spills."""
    found: dict[str, dict] = {}
    for build in builds:
        kept = {key: value for key, value in build.entry.items() if key not in ("target", "family")}
        found.setdefault(build.entry["target"], {})[build.entry["family"]] = kept
    return found
