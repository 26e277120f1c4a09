"""Capture greedy token streams and their top-10 log-probabilities from vLLM.

Runs in vLLM's own environment, CPU or CUDA build, from any directory:

    python goldens/capture/tokens.py --out goldens/tokens --dtype float32            # the tiny checkpoints
    python goldens/capture/tokens.py --out goldens/tokens --dtype float32 \
        --checkpoint FOLDER --prompts goldens/tokens/prompts_NAME.json --name NAME   # a real model

Prompts go in one at a time: vLLM is not batch-invariant. Each model has a process of its own; on CUDA all
start at once, each with a fixed KV cache, because memory profiling of neighbours would collide.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LENGTHS = (1, 2, 7, 16, 17, 33, 64, 100, 130)
NEW_TOKENS, TOP = 32, 10


def load(path: Path):
    """Import a module by path, so that vtlab need not be installed here."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_prompts(name: str, vocab: int) -> list[dict]:
    """Prompts of the lengths above, ids uniform over the vocabulary from one PCG64 stream per checkpoint."""
    import numpy as np

    stream = np.random.PCG64(int.from_bytes(name.encode(), "little"))
    return [{"ids": [int(i) for i in stream.random_raw(length) % np.uint64(vocab)]} for length in LENGTHS]


def streams(folder: str, prompts: list[dict], engine: dict, sampling: dict) -> list[dict]:
    """Greedy streams of every prompt: {"tokens": [...], "logprobs": [[[id, logprob], ...], ...]}."""
    from vllm import LLM, SamplingParams

    llm = LLM(folder, **engine)
    greedy = SamplingParams(**sampling)
    results = []
    for prompt in prompts:
        out = llm.generate({"prompt_token_ids": prompt["ids"]}, greedy, use_tqdm=False)[0].outputs[0]
        steps = [sorted(step.items(), key=lambda item: item[1].rank) for step in out.logprobs]
        # Nine significant digits hold a float32 exactly.
        ranked = [[[token, float(f"{entry.logprob:.9g}")] for token, entry in step[:TOP]] for step in steps]
        results.append({"tokens": list(out.token_ids), "logprobs": ranked})
    return results


def capture(arguments: argparse.Namespace, name: str) -> None:
    """One model, in this process."""
    about = load(HERE / "about.py")
    tiny = load(HERE.parent / "tiny.py")
    dtype = arguments.dtype
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.checkpoint is None:
            model, folder = f"tiny:{name}", scratch
            source = {
                "checkpoint_digest": tiny.write_checkpoint(name, scratch, dtype),
                "checkpoint_script": "goldens/tiny.py",
            }
            prompts = random_prompts(name, tiny.CHECKPOINTS[name]["vocab_size"])
        else:
            model, folder = name, arguments.checkpoint
            source = json.loads((Path(folder) / "provenance.json").read_text())
            prompts = json.loads(Path(arguments.prompts).read_text())["prompts"]
        provenance = about.provenance(Path(__file__), dtype=dtype, **source)
        engine = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": dtype, "max_model_len": 256,
                  "enable_prefix_caching": False, "seed": 0, "max_logprobs": TOP}  # fmt: skip
        if provenance["build"] == "cuda":
            engine["kv_cache_memory_bytes"] = 1_000_000_000
        if arguments.attention_backend:
            engine["attention_backend"] = arguments.attention_backend
        sampling = {
            "temperature": 0.0,
            "max_tokens": NEW_TOKENS,
            "ignore_eos": True,
            "logprobs": TOP,
            "detokenize": False,
        }
        provenance |= {"engine": engine, "sampling": sampling, "batching": "one prompt at a time"}
        outputs = streams(folder, prompts, engine, sampling)
    record = {"provenance": provenance, "model": model, "dtype": dtype, "prompts": prompts, "outputs": outputs}
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"{name}_{dtype}.json"
    target.write_text(about.dumps(record))
    print(target, "distinct tokens:", [len(set(output["tokens"])) for output in outputs], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--models", nargs="+", default=["llama", "qwen3", "gemma3"], help="tiny checkpoints")
    parser.add_argument("--checkpoint", help="folder of a Hugging Face checkpoint with a provenance.json")
    parser.add_argument("--prompts", help='JSON file with {"prompts": [{"ids": [...], "text": "..."}]}')
    parser.add_argument("--name", help="name of the golden of --checkpoint")
    parser.add_argument("--attention-backend", help="vLLM's attention backend, where its own choice does not start")
    parser.add_argument("--here", action="store_true", help="capture in this process (used for the children)")
    arguments = parser.parse_args()
    if arguments.checkpoint and not (arguments.prompts and arguments.name):
        parser.error("--checkpoint needs --prompts and --name")
    names = [arguments.name] if arguments.checkpoint else arguments.models
    if arguments.here:
        capture(arguments, names[0])
        return 0

    import torch

    cuda = torch.version.cuda is not None and torch.cuda.device_count() > 0
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    environment |= {} if cuda else {"VLLM_CPU_KVCACHE_SPACE": "1"}
    running: list[tuple[str, subprocess.Popen]] = []
    failed = []
    for name in names:
        command = [sys.executable, __file__, "--here", "--out", str(arguments.out), "--dtype", arguments.dtype]
        command += (["--checkpoint", arguments.checkpoint, "--prompts", arguments.prompts, "--name", name]
                    if arguments.checkpoint else ["--models", name])  # fmt: skip
        command += ["--attention-backend", arguments.attention_backend] if arguments.attention_backend else []
        running.append((name, subprocess.Popen(command, env=environment)))
        if not cuda:
            running[-1][1].wait()
    for name, process in running:
        if process.wait():
            failed.append(name)
    if failed:
        print("FAILED:", *failed, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
