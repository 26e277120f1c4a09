"""parity/records/<gpu>.json: proof that the kernels of a source digest passed on a named GPU."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path

from vtlab.device.arch import serving
from vtlab.device.build import Store, write_atomically
from vtlab.device.source import families, source_digest
from vtlab.ops.table import lookup, table

from .device_cases import DeviceCase, device_ops

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
    passed: Iterable[str], wanted: Iterable[DeviceCase], verdicts: Mapping[str, str], folder: Path = RECORDS
) -> None:
    """Record the families all of whose cases passed, and the sanitizers' verdicts on every recorded present source.

    What the record says of other families stays as it is; a new source starts without verdicts.
    """
    gpu = this_gpu()
    path = folder / path_of(gpu["gpu"]).name
    record = (json.loads(path.read_text()) if path.exists() else {}) | gpu
    kept = record.setdefault("families", {})
    done, wanted = set(passed), list(wanted)
    for family in families():
        digest, own = source_digest(family), [case for case in wanted if case.family == family]
        before = kept.get(family, {})
        same = before.get("digest") == digest
        if own and done.issuperset(map(str, own)):
            entry = Store().get(family, gpu["target"]).entry
            kept[family] = {
                "digest": digest, "date": date.today().isoformat(), "compiler": entry["compiler"],
                "ops": dict(sorted(Counter(case.op for case in own).items())), "parity": "bytes", "max_error": 0.0,
                "kernels": entry["kernels"], "sanitizer": before.get("sanitizer", {}) if same else {},
            }  # fmt: skip
            same = True
        if same:
            kept[family]["sanitizer"].update(verdicts)
    write_atomically(path, json.dumps(record, indent=1, sort_keys=True).encode() + b"\n")


def op_states(record: dict) -> dict[str, str]:
    """Per op with a kernel: "verified" (its present source passed on this GPU, sanitizers silent) or "built"."""
    states = {}
    for op in device_ops():
        family = lookup(op).contract.family
        entry = record["families"].get(family)
        clean = entry and set(entry["sanitizer"]) == set(TOOLS) and set(entry["sanitizer"].values()) == {"0 errors"}
        passed = entry and entry["digest"] == source_digest(family) and op in entry["ops"]
        states[op] = "verified" if passed and clean else "built"
    return states


def row_state(row: str, record: dict) -> str:
    """ "verified" where every op of the row is, "built" where every op has a kernel, else "partial" or "absent"."""
    ops = [name for name, found in table().items() if found.contract.row == row]
    states = [op_states(record).get(op, "absent") for op in ops]
    if not states or set(states) == {"absent"}:
        return "absent"
    if "absent" in states:
        return "partial"
    return "built" if "built" in states else "verified"
