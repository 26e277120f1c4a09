"""`vtlab generate`: a model, a prompt, a stream of text."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from vtlab.models.demo import demo_path
from vtlab.models.loading import load
from vtlab.models.sampling_params import SamplingParams
from vtlab.ops import arrays
from vtlab.ops.errors import ContractError


def generate(
    model: str,
    prompt: str,
    settings: dict,
    dtype: str,
    device: str,
    write: Callable[[str], None] | None,
    kv_dtype: str | None = None,
) -> dict[str, object] | None:
    """Continue `prompt`: streamed to `write` as it comes, or without one returned with its tokens and times.

    Errors: ContractError for a setting or a model that is none, DeviceError for a device that is not there.
    """
    params = SamplingParams(**settings)
    if dtype not in ("float32", "bfloat16"):
        raise ContractError("generate", "dtype", dtype, "float32 or bfloat16")
    place = arrays.on(device)
    with Console(stderr=True).status(f"loading {model}"):
        path = demo_path() if model == "demo" else Path(model)
        if not path.exists():
            raise ContractError("generate", "model", model, "an existing GGUF file, a folder, or demo")
        engine = load(path, dtype, kv_dtype=kv_dtype, device=place)
    if write is not None:
        for text in engine.stream_text(prompt, params):
            write(text)
        return None
    start = time.perf_counter()
    output = engine.generate([prompt], params)[0]
    seconds = round(time.perf_counter() - start, 3)
    return {
        "model": str(path), "dtype": dtype, "device": device, "prompt": prompt, "text": output.text,
        "tokens": list(output.tokens), "finish_reason": output.finish_reason, "seconds": seconds,
    }  # fmt: skip
