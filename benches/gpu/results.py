"""One run's figures: measured, kept in a JSON file beside the GPU's name, and merged by bench when a part is rerun."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path

from .bench import Bench

FOLDER = Path(__file__).parent
_ABSENT = (ImportError, AttributeError, NotImplementedError)
_IN_CACHE = 1 << 26
"""Larger operands are cold whatever one does."""
_LEAST_COPY = 1 << 20
"""Bytes from which on a copy of as many is timed beside a call that moves them for most of its time."""


def measure(bench: Bench, ceilings: Mapping[str, float], clean: Callable[[], None]) -> dict:
    """One row: times of ours and of the peers that are here, warm and cold, and the share of the roofline.

    The roofline's time is the larger of bytes over the copy bandwidth and flops over their peak, both measured in the
    same run. Where that is the bytes', "copy us" is what a copy of as many takes.
    """
    from . import measure as clock

    flush = {"ours": (clock.cupy_time, clock.cupy_flush), "peer": (clock.torch_time, clock.torch_flush)}

    def both(prepare, side: str) -> dict[str, float]:
        time, make_flush = flush[side]
        call = prepare()
        found = {"us": clock.warm(time, call, bench.calls)}
        if bench.bytes < _IN_CACHE:
            found["cold us"] = clock.cold(time, call, make_flush())
        return {key: round(value, 3) for key, value in found.items()}

    ours = both(bench.ours, "ours")
    clean()
    peers = {}
    sides = [("ours", item) for item in bench.others.items()] + [("peer", item) for item in bench.peers.items()]
    for side, (name, prepare) in sides:
        try:
            peers[name] = both(prepare, side)
        except _ABSENT:
            continue
        finally:
            clean()
    moved, computed = bench.bytes / ceilings["GB/s"] / 1e3, bench.flops / ceilings[bench.unit] / 1e6
    copy = {}
    if bench.bytes >= _LEAST_COPY and moved > computed:
        copy["copy us"] = round(clock.copy_time(bench.bytes, bench.calls), 3)
        clean()
    floor = max(moved, computed)
    return {
        "family": bench.family, "bench": bench.name, **ours, **copy, "bytes": bench.bytes, "flops": bench.flops,
        "unit": bench.unit, "GB/s": round(bench.bytes / ours["us"] / 1e3), "% of roofline":
        round(100 * floor / ours["us"], 1), "peers": peers, "ceilings": {k: round(v, 1) for k, v in ceilings.items()},
        "date": date.today().isoformat(),
    }  # fmt: skip


def load(path: Path) -> dict:
    """{"about": …, "rows": [row, …]} as `save` wrote it."""
    return json.loads(path.read_text())


def save(path: Path, about: Mapping[str, str], rows: list[dict]) -> None:
    """Merge the rows into the file: a bench that is there already is replaced, others stay."""
    from vtlab.device.build import write_atomically

    kept = {row["bench"]: row for row in (load(path)["rows"] if path.exists() else [])}
    kept |= {row["bench"]: row for row in rows}
    whole = {"about": dict(about), "rows": list(kept.values())}
    write_atomically(path, json.dumps(whole, indent=1).encode() + b"\n")
