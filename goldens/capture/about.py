"""Provenance of a golden, and the one way in which goldens are written to disk."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
from pathlib import Path


def script_digest(script: Path) -> str:
    """SHA-256 of a capture script's bytes: goldens and the script that made them go together."""
    return hashlib.sha256(script.read_bytes()).hexdigest()


def isa_flags() -> list[str]:
    """The vector extensions of this CPU that decide which kernels a CPU build picks."""
    info = Path("/proc/cpuinfo")
    words = info.read_text().split() if info.exists() else []
    return sorted({word for word in words if word.startswith(("avx", "amx", "fma"))})


def provenance(script: Path, **more: object) -> dict:
    """What made a golden: versions, build, machine, script. `more` adds dtype, checkpoint digest and the like."""
    import numpy
    import torch
    import transformers
    import vllm
    from vllm import _version

    cuda = torch.version.cuda is not None and torch.cuda.device_count() > 0
    return {
        "vllm": vllm.__version__, "vllm_commit": getattr(_version, "__commit_id__", None),
        "build": "cuda" if cuda else "cpu", "gpu": torch.cuda.get_device_name(0) if cuda else None,
        "cuda": torch.version.cuda, "torch": torch.__version__, "transformers": transformers.__version__,
        "numpy": numpy.__version__, "python": platform.python_version(), "isa": isa_flags(),
        "threads": os.environ.get("OMP_NUM_THREADS"), "captured": datetime.date.today().isoformat(),
        "script": f"goldens/capture/{script.name}", "script_sha256": script_digest(script), **more,
    }  # fmt: skip


def dumps(record: dict) -> str:
    """JSON with one prompt or output a line: small, yet diffs stay readable."""
    lines = []
    for key, value in record.items():
        if key in ("prompts", "outputs"):
            rows = ",\n  ".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in value)
            lines.append(f"{json.dumps(key)}: [\n  {rows}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"
