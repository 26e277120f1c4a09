"""Capture the hidden states of Hugging Face transformers on the tiny checkpoints, layer by layer, in float32.

    python goldens/capture/hidden_states.py --out goldens/hidden

Runs in vLLM's environment, which has transformers. For each checkpoint one prompt, that of 33 ids in its token golden:
the residual stream as it enters the first layer ("embedded") and leaves each one ("layers.N"), what the head gets
("normed"), and the logits of the last position.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path

import about
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
LENGTH = 33  # longer than every window and than Phi-3's original context


def load(path: Path):
    """Import a module by path, so that vtlab need not be installed here."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def states(folder: str, ids: list[int]) -> dict[str, torch.Tensor]:
    """Every tensor of one forward, [len(ids), width] each but for the logits, by name."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    decoder = getattr(model.model, "decoder", model.model)
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, value: object) -> None:
        tensor = value[0] if isinstance(value, tuple) else value
        found[name] = tensor.detach().reshape(-1, tensor.shape[-1]).clone()

    def entering(name: str):
        return lambda module, inputs, named: keep(name, inputs[0] if inputs else named["hidden_states"])

    def leaving(name: str):
        return lambda module, inputs, output: keep(name, output)

    decoder.layers[0].register_forward_pre_hook(entering("embedded"), with_kwargs=True)
    for index, layer in enumerate(decoder.layers):
        layer.register_forward_hook(leaving(f"layers.{index}"))
    model.lm_head.register_forward_pre_hook(entering("normed"), with_kwargs=True)
    with torch.no_grad():
        out = model(torch.tensor([ids]), use_cache=False)
    return {**found, "logits": out.logits[0, -1:].clone()}


def main() -> int:
    tiny, tokens = load(HERE.parent / "tiny.py"), load(HERE / "tokens.py")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    # transformers' Mistral does not scale queries with their position.
    known = [name for name, config in tiny.CHECKPOINTS.items() if "llama_4_scaling" not in config]
    parser.add_argument("--models", nargs="+", default=known, help="tiny checkpoints")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in arguments.models:
        ids = tokens.random_prompts(name, tiny.CHECKPOINTS[name]["vocab_size"])[tokens.LENGTHS.index(LENGTH)]["ids"]
        with tempfile.TemporaryDirectory() as folder:
            source = {"checkpoint_digest": tiny.write_checkpoint(name, folder), "checkpoint_script": "goldens/tiny.py"}
            found = states(folder, ids)
        provenance = about.provenance(Path(__file__), dtype="float32", computed_by="transformers, eager attention",
                                      **source)  # fmt: skip
        record = json.dumps({"provenance": provenance, "model": f"tiny:{name}", "ids": ids})
        target = arguments.out / f"{name}.safetensors"
        save_file({key: value.contiguous() for key, value in found.items()}, target, {"vtlab": record})
        target.chmod(0o644)
        print(target, len(found), "tensors", target.stat().st_size // 1024, "KiB", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
