"""Capture greedy token streams of the recurrent and hybrid tiny checkpoints from vLLM, with tokens.py's own code.

    python goldens/capture/tokens_recurrent.py --out goldens/tokens                # on a GPU: every model and dtype
    python goldens/capture/tokens_recurrent.py --out goldens/tokens --models qwen3_5 --dtypes bfloat16   # CPU build

On CUDA every model and dtype has a process of its own, all at once. One that fails is tried again with other choices
(`_AGAIN`), then named at the end; it takes no other with it. The CPU build has bfloat16 for the three with gated
delta rules and nothing for the rest; no build has Kimi Linear's latent attention in float32. Triton's products of
float32 are float32 ones here, not TensorFloat-32.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import tokens  # noqa: E402  beside this file, wherever that is

MODELS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "mamba", "mamba2", "kimi_linear")
_WRAPPED = ("qwen3_5", "qwen3_5_moe")
_LATENT = "kimi_linear"
# Where vLLM's own choices do not start.
_AGAIN = {
    **{name: {"attention_backend": "TRITON_ATTN"} for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next")},
    **{name: {"mamba_ssm_cache_dtype": "auto"} for name in ("mamba", "mamba2")},
    _LATENT: {"attention_backend": "TRITON_MLA"},
}


def capture(out: Path, name: str, dtype: str, more: dict) -> None:
    """One model in one dtype, in this process."""
    about, tiny = tokens.load(HERE / "about.py"), tokens.load(HERE.parent / "tiny.py")
    with tempfile.TemporaryDirectory() as folder:
        source = {"checkpoint_digest": tiny.write_checkpoint(name, folder, dtype),
                  "checkpoint_script": "goldens/tiny.py"}  # fmt: skip
        provenance = about.provenance(Path(__file__), dtype=dtype, **source)
        engine = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": dtype, "max_model_len": 256,
                  "enable_prefix_caching": False, "seed": 0, "max_logprobs": tokens.TOP, "max_num_seqs": 4}  # fmt: skip
        # States in float32 beside models of every dtype, as vtlab keeps them.
        engine |= {} if name == _LATENT else {"mamba_ssm_cache_dtype": "float32"}
        engine |= {"language_model_only": True} if name in _WRAPPED else {}
        if provenance["build"] == "cuda":
            # FLA's chunks: on an H200 vLLM would compile FlashInfer's, for heads of 128, at the start.
            engine |= {"kv_cache_memory_bytes": 1_000_000_000, "additional_config": {"gdn_prefill_backend": "triton"}}
        engine |= more
        sampling = {"temperature": 0.0, "max_tokens": tokens.NEW_TOKENS, "ignore_eos": True, "logprobs": tokens.TOP,
                    "detokenize": False}  # fmt: skip
        prompts = tokens.random_prompts(name, tiny.CHECKPOINTS[name]["vocab_size"])
        provenance |= {"engine": engine, "sampling": sampling, "batching": "one prompt at a time",
                       "triton_float32": os.environ["TRITON_F32_DEFAULT"]}  # fmt: skip
        outputs = tokens.streams(folder, prompts, engine, sampling)
    record = {"provenance": provenance, "model": f"tiny:{name}", "dtype": dtype, "prompts": prompts, "outputs": outputs}
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{name}_{dtype}.json"
    target.write_text(about.dumps(record))
    print(target, "distinct tokens:", [len(set(output["tokens"])) for output in outputs], flush=True)


def started(arguments: argparse.Namespace, name: str, dtype: str, more: dict, environment: dict) -> subprocess.Popen:
    command = [sys.executable, __file__, "--here", json.dumps(more), "--out", str(arguments.out)]
    return subprocess.Popen([*command, "--models", name, "--dtypes", dtype], env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"), choices=("float32", "bfloat16"))
    parser.add_argument("--here", help="capture in this process, with these arguments of the engine (the children)")
    arguments = parser.parse_args()
    if arguments.here is not None:
        capture(arguments.out, arguments.models[0], arguments.dtypes[0], json.loads(arguments.here))
        return 0

    import torch

    cuda = torch.version.cuda is not None and torch.cuda.device_count() > 0
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    environment |= {"TRITON_F32_DEFAULT": "ieee"} | ({} if cuda else {"VLLM_CPU_KVCACHE_SPACE": "1"})
    every = [(name, dtype) for name in arguments.models for dtype in arguments.dtypes]
    left = [one for one in every if one != (_LATENT, "float32")]
    for again in (False, True):
        running = []
        for name, dtype in left:
            running.append((name, dtype, started(arguments, name, dtype, _AGAIN[name] if again else {}, environment)))
            if not cuda:
                running[-1][2].wait()
        left = [(name, dtype) for name, dtype, process in running if process.wait()]
        if not left or not cuda:
            break
    if left:
        print("FAILED:", *(f"{name}_{dtype}" for name, dtype in left), file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
