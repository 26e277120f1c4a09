"""One family's op-level goldens: cases collected in memory, then one safetensors file.

Tensors with equal bytes are stored once. What failed to run is kept by name in the file's metadata ("errors"),
and never takes the other cases with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import about
import torch
from safetensors.torch import save_file


def generator(name: str) -> torch.Generator:
    """A CPU random stream of one case, a function of its name alone."""
    return torch.Generator("cpu").manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little"))


def normal(name: str, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Unit-variance values times `scale`, rounded once to `dtype`; drawn on the CPU wherever they go later."""
    return (torch.randn(*shape, generator=generator(name)) * scale).to(dtype)


class Record:
    """Cases of one family. `case` takes tensors by the argument and result names of vtlab's op."""

    def __init__(self, family: str, script: str):
        self.family, self.script = family, Path(script)
        self.cases: list[dict] = []
        self.errors: dict[str, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._keys: dict[tuple, str] = {}

    def _store(self, name: str, tensor: torch.Tensor) -> str:
        tensor = tensor.detach().cpu().contiguous().clone()
        raw = tensor.view(torch.uint8) if tensor.dim() and tensor.numel() else tensor
        content = (str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(raw.numpy().tobytes()).digest())
        if content not in self._keys:
            self._keys[content] = name
            self._tensors[name] = tensor
        return self._keys[content]

    def case(self, op: str, name: str, function: str, arguments: Mapping, inputs: Mapping, outputs: Mapping) -> None:
        """Store a case. Call it before anything overwrites `inputs`, or pass clones."""
        if any(case["op"] == op and case["name"] == name for case in self.cases):
            raise ValueError(f"{op}: two cases are called {name}")
        key = f"{op}.{name}"
        self.cases.append({
            "op": op, "name": name, "function": function, "arguments": dict(arguments),
            "inputs": {part: self._store(f"{key}.{part}", t) for part, t in inputs.items() if t is not None},
            "outputs": {part: self._store(f"{key}.{part}.out", t) for part, t in outputs.items()},
        })  # fmt: skip

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Run a block; where it raises, note the error under `name` and go on."""
        try:
            yield
        except Exception as error:
            self.errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
            print(f"{self.family}: {name} failed", traceback.format_exc(limit=3), flush=True)

    def save(self, folder: Path, **more: object) -> Path:
        """Write <family>.<build>.safetensors."""
        provenance = about.provenance(self.script, **more)
        text = json.dumps({"provenance": provenance, "cases": self.cases, "errors": self.errors})
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{self.family}.{provenance['build']}.safetensors"
        save_file(self._tensors, target, {"vtlab": text})
        target.chmod(0o644)
        print(
            f"{target}: {len(self.cases)} cases, {len(self.errors)} errors, {target.stat().st_size / 1e6:.2f} MB",
            flush=True,
        )
        return target


def run(family: str, script: str, capture: Callable[[Record], None], **more: object) -> None:
    """The command line of an ops_<family>.py: `--out FOLDER`; exits 1 where a case failed."""
    parser = argparse.ArgumentParser(description=f"Op-level goldens of vLLM's CPU build: {family}")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    record = Record(family, script)
    capture(record)
    record.save(arguments.out, **more)
    raise SystemExit(1 if record.errors else 0)


def run_cuda(families: Mapping[str, Callable[[Record], None]], script: str, about_script: str) -> None:
    """The command line of an ops_cuda_<what>.py: `--out FOLDER [--families …]`; prints how many cases failed."""
    parser = argparse.ArgumentParser(description=about_script, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", nargs="+", default=list(families), choices=list(families))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C

    missing = 0
    for family in arguments.families:
        record = Record(family, script)
        with record.attempt("the family as a whole"):
            families[family](record)
        record.save(arguments.out)
        missing += len(record.errors)
    print("cases that failed:", missing)
