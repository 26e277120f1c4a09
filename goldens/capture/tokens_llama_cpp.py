"""Greedy streams of llama.cpp on a GGUF file, whose weights it multiplies as blocks: what `weights="blocks"` is near.

Runs where llama-cpp-python is installed; the prompts are those of a golden of the same file:

    python goldens/capture/tokens_llama_cpp.py MODEL.gguf --like goldens/tokens/NAME_float32.json --out goldens/tokens

Writes NAME_blocks.json: 32 tokens a prompt, the ten most likely with their log-probabilities at each. Keys and values
are cached in float32, as vtlab's are, and attention is the plain one.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import platform
from pathlib import Path

import llama_cpp
import numpy as np
from about import dumps, isa_flags, script_digest
from compare_llama_cpp import plain_weights
from ggml_library import Library, installed

STEPS, TOP = 32, 10


def scores(model) -> np.ndarray:
    """float64 log-probabilities of the next token."""
    pointer = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    logits = np.ctypeslib.as_array(pointer, (model.n_vocab(),)).astype(np.float64)
    return logits - np.logaddexp.reduce(logits)


def stream(model, ids: list[int]) -> dict:
    model.reset()
    tokens, logprobs, feed = [], [], ids
    for _ in range(STEPS):
        model.eval(feed)
        values = scores(model)
        best = np.argsort(-values, kind="stable")[:TOP]
        tokens.append(int(best[0]))
        logprobs.append([[int(token), round(float(values[token]), 8)] for token in best])
        feed = [tokens[-1]]
    return {"tokens": tokens, "logprobs": logprobs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--like", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    plain_weights()
    like = json.loads(arguments.like.read_text())
    options = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "type_k": 0, "type_v": 0, "flash_attn": False}
    model = llama_cpp.Llama(str(arguments.file), verbose=False, **options)
    outputs = [stream(model, prompt["ids"]) for prompt in like["prompts"]]
    script, library = Path(__file__), installed()
    provenance = {
        "ggml": Library(library).version, "llama_cpp_python": llama_cpp.__version__,
        "library_sha256": script_digest(library / "libggml-cpu.so"), "build": "cpu", "gpu": None,
        "numpy": np.__version__, "python": platform.python_version(), "isa": isa_flags(),
        "captured": datetime.date.today().isoformat(), "script": f"goldens/capture/{script.name}",
        "script_sha256": script_digest(script), "dtype": "blocks", "gguf_file": arguments.file.name,
        "gguf_sha256": hashlib.sha256(arguments.file.read_bytes()).hexdigest(), "engine": options,
    }  # fmt: skip
    record = {"provenance": provenance, "model": like["model"], "dtype": "blocks", "prompts": like["prompts"],
              "outputs": outputs}  # fmt: skip
    target = arguments.out / f"{like['model']}_blocks.json"
    target.write_text(dumps(record), encoding="utf-8")
    target.chmod(0o644)
    print(target)


if __name__ == "__main__":
    main()
