"""Capture the token streams of models all of whose layers slide, on vLLM's CPU build.

    python goldens/capture/tokens_window.py --out goldens/tokens --models mistral phi3

As tokens.py does, but with one choice of vLLM 0.26.0 overruled. Where no layer attends fully, its KV cache takes the
smallest block that the CPU attention backend names, 16, and that backend's kernel then stops: it wants multiples of
32. Here the backend names 32. The engine runs inside this process, so that it sees the change; no arithmetic differs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OVERRULED = "CPUAttentionBackend.get_supported_kernel_block_sizes: multiples of 32 instead of 16"


def load(name: str):
    """Import a neighbour by path, so that vtlab need not be installed here."""
    spec = importlib.util.spec_from_file_location(f"capture_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", required=True, help="tiny checkpoints")
    given = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_LOGGING_LEVEL": "WARNING"}  # fmt: skip
    if len(given.models) > 1:
        # One model a process: an engine in this process leaves its parallel groups behind.
        codes = [os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, "--out", str(given.out),
                                                       "--models", name]) for name in given.models]  # fmt: skip
        return max(codes)

    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda: [MultipleOf(32)])
    tokens, about, name = load("tokens"), load("about"), given.models[0]
    arguments = argparse.Namespace(out=given.out, dtype="float32", checkpoint=None, attention_backend=None)
    tokens.capture(arguments, name)
    target = given.out / f"{name}_float32.json"
    record = json.loads(target.read_text())
    record["provenance"] |= {
        "script": f"goldens/capture/{Path(__file__).name}", "script_sha256": about.script_digest(Path(__file__)),
        "overruled": OVERRULED,
    }  # fmt: skip
    target.write_text(about.dumps(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
