"""Runs every float32 through vt_math.cuh on the GPU and compares the digests with those of the exhaustive proof.

    python -m vtlab.parity.prove_numerics_device   # seconds; needs CuPy and a GPU; writes the GPU's name in the record

A digest sums a mix of each (input, result) pair, so that equal digests mean equal bytes for all 2^32 inputs (but for
a chance of 2^-64). With the mirror's comparison in the record this makes MIRROR, host C++ and device one function.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path

import cupy

from .prove_numerics import ALL, PROBE, RECORD, source_digest

FLAGS = ("-O3", "-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
BLOCKS, THREADS = 132 * 16, 256


def build() -> cupy.cuda.function.Module:
    """The probe as a cubin, from nvcc: CuPy's own compilation always adds -ftz=true, which drops subnormals."""
    capability = cupy.cuda.Device().compute_capability
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "vt_math_probe.cubin"
        subprocess.run(["nvcc", "-cubin", f"-arch=sm_{capability}", *FLAGS, str(PROBE), "-o", str(cubin)], check=True)
        module = cupy.cuda.function.Module()
        module.load(cubin.read_bytes())
    return module


def digest(module: cupy.cuda.function.Module, name: str) -> int:
    """The digest of all 2^32 inputs of one function, computed on the device."""
    total = cupy.zeros(1, cupy.uint64)
    arguments = (cupy.uint64(0), cupy.uint64(ALL), total)
    module.get_function(f"digest_{name}")((BLOCKS,), (THREADS,), arguments)
    return int(total.get()[0])


def main() -> None:
    module = build()
    gpu = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    proof = json.loads(RECORD.read_text())
    if proof["source"] != source_digest():
        raise SystemExit("the record is about another vt_math.cuh: run vtlab.parity.prove_numerics first")
    wrong = []
    for name, entry in proof["functions"].items():
        began = time.perf_counter()
        same = digest(module, name) == int(entry["digest"], 16)
        rate = ALL / (time.perf_counter() - began) / 1e9
        print(f"{name:10s} {'all 2^32 results equal' if same else 'DIFFERS'} on {gpu}, {rate:.0f} G/s")
        entry["devices"] = sorted({*entry.get("devices", ()), gpu} if same else {*entry.get("devices", ())} - {gpu})
        wrong += [] if same else [name]
    RECORD.write_text(json.dumps(proof, indent=1) + "\n")
    if wrong:
        raise SystemExit(f"device and host differ: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
