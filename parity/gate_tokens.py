"""The gate's second half: the token streams of every golden whose checkpoint this machine has."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vtlab.goldens.tiny import write_checkpoint
from vtlab.models.block_linear import gguf_quant_compute_available
from vtlab.models.decoder import Decoder
from vtlab.models.demo import demo_installed, demo_path
from vtlab.models.loading import load_decoder
from vtlab.ops.arrays import HOST, Arrays, on
from vtlab.ops.errors import ContractError

from .goldens import FOLDER, list_goldens, token_golden
from .tokens import Verdict, token_gate

_CACHE_POSITIONS = 256
_QUANTIZED, _WEIGHTS_ALONE = "quantized:", "_weights"
BLOCKS = "blocks"
"""The "dtype" of llama.cpp's goldens: weights in their blocks, activations in eight bits; the exact values are those of
the dequantised weights in float32."""


@dataclass(frozen=True)
class Source:
    """A token golden and the GGUF file of its model; None for a tiny checkpoint, quantised or made here."""

    golden: str
    file: Path | None


@dataclass(frozen=True)
class TokenVerdict:
    """One golden's verdict, as the gate shows it."""

    golden: str
    tokens: int
    seconds: float
    verdict: Verdict

    @property
    def kind(self) -> str:
        return self.verdict.kind

    def cells(self) -> tuple[str, ...]:
        near = str(len(self.verdict.positions)) if self.verdict.positions else ""
        return self.golden, str(self.tokens), near, f"{self.verdict.max_error:.2g}", f"{self.seconds:.1f}"

    def as_dict(self) -> dict:
        return {
            "golden": self.golden, "kind": self.kind, "tokens": self.tokens,
            "max_logprob_error": self.verdict.max_error, "seconds": self.seconds,
            "positions": [vars(at) for at in self.verdict.positions],
        }  # fmt: skip


def select_tokens(models: tuple[str, ...]) -> list[Source]:
    """Goldens to run. Without a choice: every tiny checkpoint, and the demo model where it is installed.

    `models` are names of goldens or models ("gemma3", "gemma3_float32", "demo"), or GGUF files whose digest a golden
    holds. Errors: ContractError for a name that no golden has, a file that none was captured from, a model not here.
    """
    names = [entry.name for entry in list_goldens() if entry.kind == "tokens"]
    if not models:
        return [source for name in names if (source := _source(name, {})) is not None]
    chosen: list[Source] = []
    for model in models:
        files = {} if not Path(model).is_file() else {_sha256(Path(model)): Path(model)}
        found = [name for name in names if _answers(name, model, files)]
        if not found:
            raise ContractError("gate", "model", model, "a GGUF file of a golden, demo, or one of " + ", ".join(names))
        for name in found:
            source = _source(name, files)
            if source is None:
                raise ContractError("gate", "model", f"{name}, whose file is not here", "its GGUF file as --model")
            chosen.append(source)
    return chosen


def _answers(name: str, model: str, files: dict[str, Path]) -> bool:
    golden = token_golden(name)
    if files:
        return golden["provenance"].get("gguf_sha256") in files
    stem = "gemma3_270m_q4_k_m" if model == "demo" else model
    return stem in (name, golden["model"].removeprefix("tiny:").removeprefix(_QUANTIZED))


def _source(name: str, files: dict[str, Path]) -> Source | None:
    golden = token_golden(name)
    if golden["model"].startswith(("tiny:", _QUANTIZED)):
        return Source(name, None)
    digest = golden["provenance"]["gguf_sha256"]
    if digest in files:
        return Source(name, files[digest])
    if demo_installed() and demo_path().name == golden["provenance"]["gguf_file"]:
        return Source(name, demo_path())
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run_tokens(sources: list[Source], say: Callable[[str], None], device: str = "cpu") -> Iterator[TokenVerdict]:
    """Verdicts of the models on `device` as they come; `say` hears which golden is next.

    Errors: ContractError for a device that no tier serves, the tier's own for one that is not there.
    """
    arrays = on(device)
    for source in sources:
        golden = token_golden(source.golden)
        if golden["dtype"] == BLOCKS and not gguf_quant_compute_available(device):
            continue
        say(source.golden)
        start = time.perf_counter()
        verdict = _judge(golden, source.file, arrays)
        count = sum(len(output["tokens"]) for output in golden["outputs"])
        yield TokenVerdict(source.golden, count, time.perf_counter() - start, verdict)


def _judge(golden: dict, file: Path | None, arrays: Arrays) -> Verdict:
    if file is not None and golden["dtype"] == BLOCKS:
        exact = load_decoder(file, "float32", _CACHE_POSITIONS)
        kept = load_decoder(file, "float32", _CACHE_POSITIONS, weights="blocks")
        return token_gate(golden, kept.on(arrays), exact.on(arrays))
    if file is not None:
        return token_gate(golden, load_decoder(file, golden["dtype"], _CACHE_POSITIONS).on(arrays))
    if golden["model"].startswith(_QUANTIZED):
        return token_gate(golden, *(decoder.on(place) for decoder, place in zip(quantized(golden), (arrays, HOST))))
    with tempfile.TemporaryDirectory() as folder:
        name, dtype = golden["model"].removeprefix("tiny:"), golden["dtype"]
        digest = write_checkpoint(name, folder, dtype)
        if digest != golden["provenance"]["checkpoint_digest"]:
            want = f"{golden['provenance']['checkpoint_digest']}, the one vLLM ran"
            raise ContractError("token_gate", "checkpoint", f"digest {digest}", want)
        # What it was served up to: LongRoPE's factors depend on it.
        positions = golden["provenance"]["engine"]["max_model_len"]
        exact = None if dtype == "float32" else load_decoder(folder, "float32", positions)
        return token_gate(golden, load_decoder(folder, dtype, positions).on(arrays), exact)


def quantized(golden: dict) -> tuple[Decoder, Decoder]:
    """A checkpoint of goldens/quantized as its format says, and its exact values: weights and activations in float32.

    "nvfp4_weights" is "nvfp4" as vLLM serves it where nothing multiplies fp4: activations stay as they are.
    """
    name = golden["model"].removeprefix(_QUANTIZED)
    folder = FOLDER / "quantized" / name.removesuffix(_WEIGHTS_ALONE)
    digest, want = _sha256(folder / "model.safetensors"), golden["provenance"]["checkpoint_sha256"]
    if digest != want:
        raise ContractError("token_gate", "checkpoint", f"digest {digest}", f"{want}, the one vLLM ran")
    weights = "dequantized" if name.endswith(_WEIGHTS_ALONE) else "packed"
    served = load_decoder(folder, golden["dtype"], _CACHE_POSITIONS, weights)
    return served, load_decoder(folder, "float32", _CACHE_POSITIONS)
