"""parity/records/<gpu>.json: proof that the kernels of a source digest passed on a named GPU."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from functools import partial
from pathlib import Path

from vtlab.device.arch import serving
from vtlab.device.build import Store, write_atomically
from vtlab.device.fp4 import CHAIN
from vtlab.device.judged import by_norm, parity_of
from vtlab.device.source import families, source_digest
from vtlab.device.spills import spilling
from vtlab.ops import fusion
from vtlab.ops.table import lookup

from .device_cases import DeviceCase, device_ops, provider_names

RECORDS = Path(__file__).parent / "records"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def gpu_records() -> dict[str, dict]:
    """The committed records by GPU name."""
    found = (json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json")))
    return {record["gpu"]: record for record in found if "gpu" in record}


def path_of(gpu: str) -> Path:
    return RECORDS / (re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") + ".json")


def this_gpu() -> dict:
    """Name, compute capability's target, driver and runtime of the current GPU."""
    import cupy

    runtime = cupy.cuda.runtime
    facts = runtime.getDeviceProperties(runtime.getDevice())
    driver, cuda = (f"{v // 1000}.{v % 1000 // 10}" for v in (runtime.driverGetVersion(), runtime.runtimeGetVersion()))
    return {"gpu": facts["name"].decode(), "target": serving(facts["major"], facts["minor"]), "driver_cuda": driver,
            "runtime_cuda": cuda, "driver": _driver(), "cupy": cupy.__version__}  # fmt: skip


def _driver() -> str:
    try:
        return re.search(r"\d+\.\d+[.\d]*", Path("/proc/driver/nvidia/version").read_text())[0]
    except (OSError, TypeError):
        return "unknown"


def update(
    passed: Mapping[str, float],
    wanted: Iterable[DeviceCase],
    verdicts: Mapping[str, str],
    folder: Path = RECORDS,
    chosen: Iterable[str] | None = None,
) -> None:
    """Record the families all of whose cases passed, and the sanitizers' verdicts on every recorded present source.

    passed : case -> its largest error against truth, 0 where bytes were compared.
    What the record says of other families stays as it is; a new source starts without verdicts. chosen: the families
    that the sanitizers watched, all of them by default. Runs beside each other do not lose each other's families.
    """
    gpu = this_gpu()
    path = folder / path_of(gpu["gpu"]).name
    with _alone(path):
        _merge(path, gpu, passed, list(wanted), verdicts, set(chosen or families()))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time, where the system has such locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _merge(
    path: Path,
    gpu: dict,
    passed: Mapping[str, float],
    wanted: list[DeviceCase],
    verdicts: Mapping[str, str],
    watched: set,
) -> None:
    record = (json.loads(path.read_text()) if path.exists() else {}) | gpu
    kept = record.setdefault("families", {})
    for family in families():
        digest, own = source_digest(family), [case for case in wanted if case.family == family]
        before = kept.get(family, {})
        same = before.get("digest") == digest
        if own and passed.keys() >= set(map(str, own)):
            entry = Store().get(family, gpu["target"]).entry
            kept[family] = {
                "digest": digest, "date": date.today().isoformat(), "compiler": entry["compiler"],
                "ops": dict(sorted(Counter(case.op for case in own).items())), "parity": _parity(own),
                "max_error": max(passed[str(case)] for case in own),
                "kernels": entry["kernels"], "sanitizer": before.get("sanitizer", {}) if same else {},
            }  # fmt: skip
            same = True
        if same and family in watched:
            kept[family]["sanitizer"].update(verdicts)
    write_atomically(path, json.dumps(record, indent=1, sort_keys=True).encode() + b"\n")


def _parity(cases: list[DeviceCase]) -> str:
    """The classes by which a family's cases were judged, e.g. ``bytes`` or ``bytes, rel_l2(0.00781)``."""
    return ", ".join(sorted({str(parity_of(case.op, case.arguments() if by_norm(case.op) else {})) for case in cases}))


def built_record() -> dict[str, dict]:
    """What `vtlab build --record` noted: target -> family -> digest and the kernels' registers, memory and spills."""
    path = RECORDS / "builds.json"
    return json.loads(path.read_text())["targets"] if path.exists() else {}


def write_built(listing: Mapping[str, Mapping[str, Mapping]]) -> None:
    """Note a manifest of all targets and families in the committed record."""
    targets = {
        target: {name: {key: entry[key] for key in ("digest", "compiler", "kernels")} for name, entry in made.items()}
        for target, made in listing.items()
    }
    text = json.dumps({"date": date.today().isoformat(), "targets": targets}, indent=1, sort_keys=True)
    write_atomically(RECORDS / "builds.json", text.encode() + b"\n")


def verified(op: str, record: Mapping, family: str | None = None) -> bool:
    """Whether the kernels of an op, or of the recipe whose `family` is given, passed on the record's GPU.

    From their present source, and with all sanitizers silent.
    """
    family = family or lookup(op).contract.family
    entry = record["families"].get(family)
    if entry is None or entry["digest"] != source_digest(family) or op not in entry["ops"]:
        return False
    return all(entry["sanitizer"].get(tool) == "0 errors" for tool in TOOLS)


def built(target: str, op: str, made: Mapping[str, Mapping], family: str | None = None) -> bool:
    """Whether the present source of an op or recipe compiled for a target with no spill but declared ones."""
    family = family or lookup(op).contract.family
    entry = made.get(family)
    if entry is None or entry["digest"] != source_digest(family):
        return False
    return not spilling(target, entry["kernels"])


def recipes_of(op: str) -> tuple[str, ...]:
    """The recipes that serve an op which a GPU runs as a chain: with a residual or without, scales in rows or tiles."""
    names = [recipe.name for recipe in fusion.catalog()]
    return tuple(name for name in names if name.removeprefix("fused_add_").removesuffix("_swizzled") == op)


def device_claims() -> list[tuple]:
    """(GPU or target, "verified" or "built", (op, record, family=None) -> bool, record) of everything on record."""
    claims = [(gpu, "verified", verified, record) for gpu, record in gpu_records().items()]
    return claims + [(target, "built", partial(built, target), made) for target, made in built_record().items()]


def device_states(claims: list[tuple], ops: tuple[str, ...], chains: tuple[str, ...] = ()) -> dict[str, str]:
    """GPU name -> "verified" and target -> "built", where that is true of all ops and recipes; "partial" of some."""
    with_kernel = set(device_ops())
    served = {op: recipes_of(op) if CHAIN in provider_names(op) else () for op in ops}
    states = {}
    for name, word, holds, record in claims:
        found = [
            holds(op, record)
            if op in with_kernel
            else bool(parts) and all(holds(name, record, family=name) for name in parts)
            for op, parts in served.items()
        ]
        found += [holds(chain, record, family=chain) for chain in chains]
        if any(found):
            states[name] = word if all(found) else "partial"
    return states
