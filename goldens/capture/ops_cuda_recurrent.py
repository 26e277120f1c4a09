"""Recurrent goldens from vLLM's CUDA build: gdn, kda and ssm; with --time how fast those kernels are.

    python goldens/capture/ops_cuda_recurrent.py --out goldens/ops [--families gdn kda ssm] [--time [--budget 50]]

Runs on a GPU, in vLLM's own environment, unattended: a process for each family side by side, then the timings. Every
case stands alone: one that fails is listed under "errors" in its family's file and at the end. The figures go to
recurrent_times.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

FAMILIES = ("gdn", "kda", "ssm")


def capture(family: str, out: Path) -> int:
    """One family's goldens, from one small configuration of each kernel. Returns how many cases failed."""
    import recurrent_tuning  # noqa: F401  before vLLM's kernels
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C
    from record import Record

    record = Record(family, __file__)
    with record.attempt("the family as a whole"):
        if family == "gdn":
            import recurrent_gdn as gdn

            gdn.capture(record, "cuda", (gdn.BF16, gdn.F32), (gdn.BF16, gdn.F16, gdn.F32))
        elif family == "kda":
            import recurrent_kda as kda

            kda.capture(record, "cuda", kda.KINDS)
        else:
            import recurrent_conv as conv
            import recurrent_ssd as ssd

            conv.capture(record, "cuda", conv.KINDS)
            ssd.capture(record, "cuda", ssd.KINDS)
    record.save(out, dtype="bfloat16 and float32")
    for name, error in record.errors.items():
        print(f"FAILED {family}: {name}: {error}", flush=True)
    return len(record.errors)


def time_all(out: Path, budget: float) -> None:
    import recurrent_tuning
    import torch
    import vllm._custom_ops
    import vllm.model_executor.layers.mamba.ops.ssd_combined
    import vllm.third_party.flash_linear_attention.ops.kda  # noqa: F401  all kernels are there now
    from about import provenance

    recurrent_tuning.tune_all()
    import recurrent_times

    found = {"gpu": torch.cuda.get_device_name(0), "times": recurrent_times.times(budget)}
    found["provenance"] = provenance(Path(__file__))
    (out / "recurrent_times.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--time", action="store_true", help="after the goldens, time the kernels")
    parser.add_argument("--budget", type=float, default=50, help="seconds after which no further timing starts")
    parser.add_argument("--only", choices=[*FAMILIES, "time"], help="one part, in this process")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        parser.error("needs a GPU; the CPU build's goldens come from ops_gdn.py, ops_kda.py and ops_ssm.py")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.only == "time":
        time_all(arguments.out, arguments.budget)
        return 0
    if arguments.only:
        return capture(arguments.only, arguments.out) > 0
    command = [sys.executable, __file__, "--out", str(arguments.out), "--budget", str(arguments.budget), "--only"]
    running = {family: subprocess.Popen([*command, family]) for family in arguments.families}
    failed = [family for family, process in running.items() if process.wait()]
    if arguments.time and subprocess.run([*command, "time"]).returncode:
        failed.append("time")
    print("families with failed cases:", ", ".join(failed) or "none", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
