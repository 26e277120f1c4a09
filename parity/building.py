"""`vtlab build`: the kernels for every architecture, with the compiler's report; no GPU is needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vtlab.device import aot
from vtlab.device.arch import ARCHS, lookup
from vtlab.device.build import Store, build_all, manifest
from vtlab.device.compiler import compiler
from vtlab.device.source import families, source_digest, text_of
from vtlab.ops.errors import ContractError

from .device_record import built_record, write_built
from .screen import build_table, show


def unrecorded() -> Callable[[str, str], bool]:
    """Whether a family was not compiled for a target, from this source by this compiler: parity/records/builds.json.

    Each family is compiled for one of the targets all the same, its digest says which.
    """
    record, here = built_record(), compiler()

    def needed(family: str, target: str) -> bool:
        digest = source_digest(family)
        entry = record.get(target, {}).get(family, {})
        audited = ARCHS[int(digest, 16) % len(ARCHS)].name == target
        return audited or (entry.get("digest"), entry.get("compiler")) != (digest, here)

    return needed


def run_build(
    archs: tuple[str, ...],
    names: tuple[str, ...],
    folder: Path | None,
    *,
    record: bool,
    as_json: bool,
    changed: bool = False,
) -> int:
    """Build, show what came out, and return the exit status: 1 if a kernel spills registers.

    folder: where the cubins go, with a ``manifest.json`` beside them; by default the user's cache, where the loader
    looks. changed: only what is `unrecorded`. Raises ContractError for an unknown arch or family, DeviceError where
    nothing can compile.
    """
    if changed and (record or folder is not None):
        raise ContractError("build", "changed", "a part of the builds", "all of them for --record and --out")
    if record and (archs or names):
        raise ContractError("build", "record", "a part of the builds", "all of them, without --arch or families")
    targets = [lookup(name).name for name in archs] or [arch.name for arch in ARCHS]
    for name in names:
        text_of(name)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        needed = unrecorded() if changed else lambda family, target: True
        total = sum(needed(family, target) for target in targets for family in names or families())
        task = progress.add_task("compiling", total=total)
        builds = build_all(
            targets, Store(folder), names,
            lambda build: progress.update(
                task, advance=1, description=f"compiled {build.entry['family']} for {build.entry['target']}"
            ),
            needed,
        )  # fmt: skip
    listing = manifest(builds)
    if folder is not None:
        aot.write(folder, listing)
    if record:
        write_built(listing)
    spilling = [(build, name) for build in builds for name in build.spilling]
    if as_json:
        json.dump(listing, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show(build_table(builds))
        for build, name in spilling:
            show(f"[bold red]{name}[/] spills for {build.entry['target']}")
    return int(bool(spilling))


def run_verify(archs: tuple[str, ...], folder: Path | None, *, as_json: bool) -> int:
    """Check a tree of builds and return the exit status.

    Raises ContractError without a folder, DeviceError that says what is missing, stale, damaged or too much.
    """
    if folder is None:
        raise ContractError("build", "out", "no folder", "the tree to verify")
    found = aot.verify(folder, archs)
    if as_json:
        json.dump(found, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        for target, count in found.items():
            show(f"{target}: {count} families, whole and of the present sources")
    return 0
