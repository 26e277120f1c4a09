"""Capture greedy token streams of the checkpoints in goldens/quantized from vLLM.

Runs in vLLM's own environment, CPU or CUDA build, unattended; a process for each checkpoint, on CUDA all at once:

    python goldens/capture/tokens_quantized.py --out goldens/tokens                 # what this build serves

vLLM 0.26.0 serves no asymmetric GPTQ. The CPU build has GPTQ, AWQ, int8 and weights of 4 bits. An NVFP4 checkpoint is
captured twice where there are no matrix products of fp4: with vLLM's emulation of them, activations quantised, and as
`nvfp4_weights` with the Marlin kernels that it takes by itself, which leave activations as they are.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CPU = ("gptq_act_order", "awq", "ct_w4a16", "ct_int8_dynamic", "ct_int8_static")
CUDA = ("ct_fp8_dynamic", "fp8_block", "modelopt_fp8", "nvfp4", "nvfp4_weights", "modelopt_nvfp4", "mxfp4")
LENGTHS = (1, 2, 7, 17, 33, 64)
VOCABULARY = 64


def load(name: str):
    """Import a script beside this one, so that vtlab need not be installed here."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompts_of(name: str) -> list[dict]:
    """Ids uniform over what the checkpoints were calibrated with."""
    import numpy as np

    stream = np.random.PCG64(int.from_bytes(name.encode(), "little"))
    return [{"ids": [int(i) for i in stream.random_raw(size) % np.uint64(VOCABULARY - 4) + 4]} for size in LENGTHS]


def capture(out: Path, name: str) -> None:
    about, tokens = load("about"), load("tokens")
    folder = HERE.parent / "quantized" / name.removesuffix("_weights")
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    provenance = about.provenance(Path(__file__), dtype="bfloat16", checkpoint_sha256=digest)
    engine = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 256,
              "enable_prefix_caching": False, "seed": 0, "max_logprobs": tokens.TOP}  # fmt: skip
    if provenance["build"] == "cuda":
        engine["kv_cache_memory_bytes"] = 1_000_000_000
        engine["gpu_memory_utilization"] = 0.05  # engines beside one another: each looks for this share at its start
    if "nvfp4" in name and not name.endswith("_weights"):
        engine["linear_backend"] = "emulation"
    sampling = {"temperature": 0.0, "max_tokens": tokens.NEW_TOKENS, "ignore_eos": True, "logprobs": tokens.TOP,
                "detokenize": False}  # fmt: skip
    provenance |= {"engine": engine, "sampling": sampling, "batching": "one prompt at a time"}
    prompts = prompts_of(name)
    outputs = tokens.streams(str(folder), prompts, engine, sampling)
    record = {"provenance": provenance, "model": f"quantized:{name}", "dtype": "bfloat16", "prompts": prompts,
              "outputs": outputs}  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"quantized_{name}_bfloat16.json"
    target.write_text(about.dumps(record))
    print(target, "distinct tokens:", [len(set(output["tokens"])) for output in outputs], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--here", action="store_true", help="in this process (used for the children)")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    if arguments.here:
        capture(arguments.out, arguments.names[0])
        return 0

    import torch

    cuda = torch.version.cuda is not None and torch.cuda.device_count() > 0
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
                   "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip
    # The CPU build's own habit is to quantise activations that meet weights of 4 bits.
    environment |= {} if cuda else {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_INT4_W4A8": "0"}
    arguments.out.mkdir(parents=True, exist_ok=True)
    running, failed, start = [], [], time.perf_counter()
    for name in arguments.names or (CUDA if cuda else CPU):
        command = [sys.executable, __file__, "--out", str(arguments.out), "--here", name]
        with (arguments.out / f"{name}.log").open("w") as log:
            running.append((name, subprocess.Popen(command, env=environment, stdout=log, stderr=log)))
        if not cuda:
            running[-1][1].wait()
    for name, process in running:
        failed += [name] if process.wait() else []
    print(f"{time.perf_counter() - start:.0f} s", "FAILED:" if failed else "all captured", *failed, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
