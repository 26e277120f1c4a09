"""vtlab's figures for one GGUF file, as a line of JSON.

python -m vtlab.benches.cpu.engine FILE --threads 2 --prompt 256 --tokens 64
"""

from __future__ import annotations

import json
import time

import numpy as np

from .llama import options
from .windows import fastest, peak_rss_mb


def measured(file: str, threads: int, prompt: int, tokens: int, prefills: int = 3) -> dict:
    from vtlab.device.cpu import threads as team
    from vtlab.models import SamplingParams, load

    with team.using(threads):
        began = time.perf_counter()
        engine = load(file)
        loaded = time.perf_counter() - began
        ids = np.random.Generator(np.random.PCG64(0)).integers(1000, 20000, prompt).tolist()
        engine.generate([ids[:8]], SamplingParams(max_tokens=2, ignore_eos=True))  # compiles, touches the weights
        seconds, one = [], SamplingParams(max_tokens=1, ignore_eos=True)
        for _ in range(prefills):
            began = time.perf_counter()
            engine.generate([ids], one)
            seconds.append(time.perf_counter() - began)
        moments = [
            time.perf_counter() for _ in engine.stream(ids, SamplingParams(max_tokens=tokens + 1, ignore_eos=True))
        ]
    return {
        "engine": "vtlab", "load_s": loaded, "prefill": prompt / min(seconds), "decode": fastest(moments),
        "rss_mb": peak_rss_mb(),
    }  # fmt: skip


if __name__ == "__main__":
    given = options(__doc__)
    print(json.dumps(measured(given.file, given.threads, given.prompt, given.tokens)))
