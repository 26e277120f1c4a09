"""Prompt ids and greedy streams of the same GGUF files from llama.cpp, for comparison; not a golden.

Runs where llama-cpp-python is installed:

    python goldens/capture/compare_llama_cpp.py prompts MODEL.gguf OUT.json       # six texts with their ids
    python goldens/capture/compare_llama_cpp.py compare MODEL.gguf GOLDEN.json    # where its arg-max leaves vLLM's

--float32-cache keeps keys and values as they are instead of in float16. A tiny checkpoint becomes a file by
`write_tiny_gguf` of parity/tiny_gguf.py, with `add_tokenizer_model("none")` and its vocabulary's size.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import llama_cpp
import numpy as np

TEXTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "Die Hauptstadt von Österreich heißt",
    "1, 1, 2, 3, 5, 8, 13,",
)


def plain_weights() -> None:
    """Keep weights in the file's own block layout: the repacked AMX ones crash where a machine traps AMX."""
    default = llama_cpp.llama_cpp.llama_model_default_params

    def parameters():
        values = default()
        values.use_extra_bufts = False
        return values

    llama_cpp.llama_cpp.llama_model_default_params = parameters


def prompts(file: str) -> dict:
    """The texts above, tokenised with BOS where the file asks for it (tokenizer.ggml.add_bos_token)."""
    model = llama_cpp.Llama(file, vocab_only=True, verbose=False)
    bos = model.metadata.get("tokenizer.ggml.add_bos_token", "false") == "true"
    rows = [{"ids": model.tokenize(text.encode(), add_bos=bos, special=False), "text": text} for text in TEXTS]
    return {"tokenizer": f"llama-cpp-python {llama_cpp.__version__}", "add_bos": bos, "prompts": rows}


def compare(file: str, golden: Path, float32_cache: bool) -> list[str]:
    """One line a prompt: the first step where llama.cpp's arg-max differs, and vLLM's gap there.

    llama.cpp is fed vLLM's own tokens, so that every step is compared on the same prefix.
    """
    plain_weights()
    cache = {"type_k": 0, "type_v": 0} if float32_cache else {}
    model = llama_cpp.Llama(file, n_ctx=256, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False, **cache)
    record = json.loads(golden.read_text())
    lines = []
    for number, (prompt, output) in enumerate(zip(record["prompts"], record["outputs"])):
        model.reset()
        model.eval(prompt["ids"] + output["tokens"][:-1])
        logits = np.array(model.scores[len(prompt["ids"]) - 1 : model.n_tokens])
        logprobs = logits - np.logaddexp.reduce(logits.astype(np.float64), axis=-1, keepdims=True)
        picks = logits.argmax(-1)
        worst = max(abs(logprobs[step, token] - value)
                    for step, row in enumerate(output["logprobs"]) for token, value in row)  # fmt: skip
        differs = [
            f"step {step}: {int(pick)} for {token}, vLLM's gap {row[0][1] - row[1][1]:.4f} nats"
            for step, (pick, token, row) in enumerate(zip(picks, output["tokens"], output["logprobs"]))
            if pick != token
        ]
        text = repr(model.detokenize(output["tokens"]).decode(errors="replace")) if "text" in prompt else "no text"
        lines.append(f"{number}: largest |logprob - vLLM's| in its top 10 {worst:.2g}; {differs or 'same'}; {text}")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("prompts", "compare"))
    parser.add_argument("file")
    parser.add_argument("json", type=Path)
    parser.add_argument("--float32-cache", action="store_true")
    arguments = parser.parse_args()
    if arguments.action == "prompts":
        arguments.json.write_text(json.dumps(prompts(arguments.file), indent=1, ensure_ascii=False) + "\n")
    else:
        print(*compare(arguments.file, arguments.json, arguments.float32_cache), sep="\n")
