"""llama.cpp's figures for one GGUF file, as a line of JSON; runs by itself wherever llama-cpp-python is installed.

python llama.py FILE --threads 2 --prompt 256 --tokens 64
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from windows import fastest, peak_rss_mb


def measured(file: str, threads: int, prompt: int, tokens: int, prefills: int = 3) -> dict:
    import llama_cpp

    plain_weights(llama_cpp)
    began = time.perf_counter()
    model = llama_cpp.Llama(
        file, n_ctx=prompt + tokens + 8, n_threads=threads, n_threads_batch=threads, n_batch=512, n_ubatch=512,
        verbose=False,
    )  # fmt: skip
    loaded = time.perf_counter() - began
    ids = np.random.Generator(np.random.PCG64(0)).integers(1000, 20000, prompt).tolist()
    model.eval(ids[:8])  # touches the weights
    seconds = []
    for _ in range(prefills):
        model.reset()
        began = time.perf_counter()
        model.eval(ids)
        token = int(np.argmax(last(llama_cpp, model)))
        seconds.append(time.perf_counter() - began)
    moments = [time.perf_counter()]
    for _ in range(tokens):
        model.eval([token])
        token = int(np.argmax(last(llama_cpp, model)))
        moments.append(time.perf_counter())
    return {
        "engine": f"llama.cpp ({llama_cpp.__version__})", "load_s": loaded, "prefill": prompt / min(seconds),
        "decode": fastest(moments), "rss_mb": peak_rss_mb(),
    }  # fmt: skip


def last(llama_cpp, model) -> np.ndarray:
    """The scores of the last token, where they lie."""
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), (model.n_vocab(),))


def plain_weights(llama_cpp) -> None:
    """Weights in the file's own layout: llama.cpp's repacked AMX ones crash where a machine traps AMX."""
    default = llama_cpp.llama_cpp.llama_model_default_params

    def parameters():
        values = default()
        values.use_extra_bufts = False
        return values

    llama_cpp.llama_cpp.llama_model_default_params = parameters


def options(text: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    for name in ("threads", "prompt", "tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    given = options(__doc__)
    print(json.dumps(measured(given.file, given.threads, given.prompt, given.tokens)))
