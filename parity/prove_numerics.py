"""Proves the float32 transcendental functions over every float32 and records it in parity/numerics_proof.json.

    python -m vtlab.parity.prove_numerics [--functions exp,log] [--work DIR] [--threads N]

vt_math.cuh is compiled for the host (g++, no contraction of products and sums) and all 2^32 inputs of each function
are compared with the C library's double functions, whose error is some 2^-28 of a float32 ulp. The record keeps the
worst error, evaluated again with mpmath, a digest of all results (for the device), and a digest of a sample that the
NumPy mirror must reproduce. The mirror is compared with the compiled code byte for byte on 2^24 inputs a function.
A run that is stopped continues where it was, as long as --work and the sources are the same.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mpmath as mp
import numpy as np
from rich.progress import Progress

from vtlab.ops.numerics import transcendental

ROOT = Path(__file__).parents[1]
PROBE, HEADER = ROOT / "parity" / "vt_math_probe.cu", ROOT / "device" / "cuda" / "vt_math.cuh"
RECORD = ROOT / "parity" / "numerics_proof.json"
FUNCTIONS = ("exp", "log", "log1p", "tanh", "sigmoid", "silu", "softplus", "erf", "gelu_tanh", "gelu_erf")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-shared", "-fPIC")
ALL, CHUNK, COMPARED = 1 << 32, 1 << 24, 1 << 24


class Verdict(ctypes.Structure):
    """What the probe found in a range of inputs (struct Verdict there)."""

    _fields_ = (
        ("worst", ctypes.c_double),
        ("digest", ctypes.c_uint64),
        ("worst_at", ctypes.c_uint32),
        ("unlike_at", ctypes.c_uint32),
        ("unlike", ctypes.c_uint64),
    )


def source_digest() -> str:
    """SHA-256 of vt_math.cuh without comments and white space: what the proof is about."""
    return hashlib.sha256(re.sub(r"//[^\n]*|\s+", "", HEADER.read_text()).encode()).hexdigest()


def build(folder: Path) -> ctypes.CDLL:
    """The probe, compiled for this machine."""
    library = folder / f"vt_math_probe_{source_digest()[:16]}.so"
    if not library.exists():
        subprocess.run(["g++", "-x", "c++", *FLAGS, str(PROBE), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def compiled(library: ctypes.CDLL, name: str, x: np.ndarray) -> np.ndarray:
    """The function of vt_math.cuh as compiled for the host."""
    out = np.empty_like(x)
    pointers = (ctypes.c_void_p(v.ctypes.data) for v in (x, out))
    library.vt_probe_apply(FUNCTIONS.index(name), *pointers, ctypes.c_int(x.size))
    return out


def mix(inputs: np.ndarray, results: np.ndarray) -> int:
    """The digest of (input, result) pairs, as in vt_math_probe.cu; a NaN is a NaN."""
    bits = np.where(np.isnan(results), np.uint32(0x7FC00000), results.view(np.uint32)).astype(np.uint64)
    h = (inputs.view(np.uint32).astype(np.uint64) << np.uint64(32) | bits) * np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return int(np.sum(h ^ (h >> np.uint64(32)), dtype=np.uint64))


def spread(count: int) -> np.ndarray:
    """`count` (a power of two) float32 inputs over all sign, exponent and mantissa patterns, one from each run."""
    run = ALL // count
    at = np.arange(count, dtype=np.uint64)
    return (at * np.uint64(run) + (at * np.uint64(0x9E3779B1)) % np.uint64(run)).astype(np.uint32).view(np.float32)


def exact(name: str, x: float) -> mp.mpf:
    """The function at 60 digits."""
    with mp.workdps(60):
        x = mp.mpf(x)
        sigmoid = lambda v: 1 / (1 + mp.exp(-v))
        formulas = {
            "sigmoid": sigmoid,
            "silu": lambda v: v * sigmoid(v),
            "softplus": lambda v: mp.log1p(mp.exp(v)),
            "gelu_tanh": lambda v: v * sigmoid(2 * mp.sqrt(2 / mp.pi) * (v + mp.mpf("0.044715") * v**3)),
            "gelu_erf": lambda v: v * mp.erfc(-v / mp.sqrt(2)) / 2,
        }
        return formulas[name](x) if name in formulas else getattr(mp, name)(x)


def exact_ulps(name: str, x: float, got: float) -> float:
    """|got - exact| in float32 ulps of the exact value."""
    want = exact(name, x)
    if want == 0:
        return 0.0 if got == 0 else float("inf")
    unit = mp.mpf(2) ** (max(int(mp.floor(mp.log(abs(want), 2))), -126) - 23)
    return float(abs(mp.mpf(float(got)) - want) / unit)


def prove(library: ctypes.CDLL, name: str, state: Path, threads: int, progress: Progress) -> dict:
    """All 2^32 inputs of one function."""
    done = json.loads(state.read_text()) if state.exists() else {"end": 0, "worst": 0.0, "worst_at": 0, "digest": 0}
    task = progress.add_task(name, total=ALL, completed=done["end"])

    def part(begin: int) -> Verdict:
        found = Verdict()
        ends = (ctypes.c_uint64(begin), ctypes.c_uint64(begin + CHUNK))
        library.vt_probe_prove(FUNCTIONS.index(name), *ends, ctypes.byref(found))
        return found

    with ThreadPoolExecutor(threads) as pool:
        for found in pool.map(part, range(done["end"], ALL, CHUNK)):
            if found.unlike:
                raise SystemExit(f"{name}: wrong kind (NaN, infinity, sign) at {found.unlike_at:#010x}")
            if found.worst > done["worst"]:
                done["worst"], done["worst_at"] = found.worst, found.worst_at
            done["digest"] = (done["digest"] + found.digest) % (1 << 64)
            done["end"] += CHUNK
            state.write_text(json.dumps(done))
            progress.update(task, completed=done["end"])
    return done


def record(library: ctypes.CDLL, name: str, done: dict) -> dict:
    """The entry of one function in the record: the exhaustive result and the mirror's comparison."""
    x = spread(COMPARED)
    mirror = getattr(transcendental, name)(x)
    if (differ := np.flatnonzero((y := compiled(library, name, x)).view(np.uint32) != mirror.view(np.uint32))).size:
        differ = differ[~(np.isnan(y[differ]) & np.isnan(mirror[differ]))]
    if differ.size:
        raise SystemExit(f"{name}: mirror and compiled code differ at {x[differ[0]]!r}, {differ.size} of {x.size}")
    worst = np.array([done["worst_at"]], np.uint32).view(np.float32)
    value = getattr(transcendental, name)(worst)[0]
    sample = spread(1 << 17)
    return {
        "inputs": ALL,
        "worst_ulp": round(exact_ulps(name, float(worst[0]), float(value)), 6),
        "worst_at": f"{done['worst_at']:#010x}",
        "value_there": f"{int(value.view(np.uint32)):#010x}",
        "digest": f"{done['digest']:#018x}",
        "mirror_compared": int(x.size),
        "sample_digest": f"{mix(sample, getattr(transcendental, name)(sample)):#018x}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", default=",".join(FUNCTIONS))
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "vtlab")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    library = build(options.work)
    with Progress() as progress:
        for name in options.functions.split(","):
            state = options.work / f"{name}_{source_digest()[:16]}.json"
            entry = record(library, name, prove(library, name, state, options.threads, progress))
            proof = json.loads(RECORD.read_text()) if RECORD.exists() else {}
            if proof.get("source") != source_digest():
                proof = {"source": source_digest(), "functions": {}}
            proof["functions"][name] = entry
            RECORD.write_text(json.dumps(proof, indent=1) + "\n")


if __name__ == "__main__":
    main()
