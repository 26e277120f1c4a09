"""`vtlab generate`: a model, a prompt, a stream of text."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from vtlab.models import Engine, SamplingParams, load_model
from vtlab.models.demo import demo_path


def stream_text(
    model: str, prompt: str, settings: dict, dtype: str, write: Callable[[str], None] | None
) -> dict[str, object]:
    """Generate from `prompt`; pieces of text go to `write` as they come. Returns text, ids, and speeds."""
    console = Console(stderr=True)
    with console.status(f"loading {model}"):
        path = demo_path() if model == "demo" else Path(model)
        loaded = load_model(path, dtype=dtype)
    engine = Engine(loaded)
    start = time.perf_counter()
    first, text, ids = None, "", []
    for piece in engine.stream(prompt, SamplingParams(**settings)):
        first = first or time.perf_counter()
        text += piece.text
        ids.append(piece.token)
        if write is not None:
            write(piece.text)
    end = time.perf_counter()
    decode = (len(ids) - 1) / (end - first) if first and len(ids) > 1 else None
    return {"model": str(path), "prompt": prompt, "text": text, "tokens": ids,
            "seconds_to_first_token": (first or end) - start, "tokens_per_second": decode}  # fmt: skip
