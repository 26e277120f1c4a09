"""Capture hidden states, and greedy tokens, of transformers on the recurrent and hybrid tiny checkpoints, in float32.

    python goldens/capture/hidden_recurrent.py --out goldens/hidden

As hidden_states.py, for models whose layers stand elsewhere or whose configuration wraps that of the text; transformers
takes its torch-only path for them. With --tokens FILE, greedy streams of 32 tokens after every prompt of tokens.py go
there too, with their log-probabilities: an independent check where vLLM needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import about
import hidden_states
import tokens
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
MODELS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "mamba", "mamba2")


def opened(folder: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def states(model: torch.nn.Module, ids: list[int]) -> dict[str, torch.Tensor]:
    """Every tensor of one forward, [len(ids), width] each but for the logits, by name."""
    decoder = getattr(model, "backbone", None) or model.model
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


def stream(model: torch.nn.Module, ids: list[int]) -> dict:
    """The greedy stream after `ids`, each step a forward over all tokens before it: no cache, no state."""
    sofar, ranked = list(ids), []
    for _ in range(tokens.NEW_TOKENS):
        with torch.no_grad():
            scores = model(torch.tensor([sofar]), use_cache=False).logits[0, -1]
        top = torch.log_softmax(scores.float(), -1).topk(tokens.TOP)
        ranked.append([[int(i), float(f"{float(v):.9g}")] for v, i in zip(top.values, top.indices)])
        sofar.append(ranked[-1][0][0])
    return {"tokens": sofar[len(ids) :], "logprobs": ranked}


def main() -> int:
    tiny = hidden_states.load(HERE.parent / "tiny.py")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--tokens", type=Path, help="a folder for greedy streams")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in arguments.models:
        prompts = tokens.random_prompts(name, tiny.CHECKPOINTS[name]["vocab_size"])
        ids = prompts[tokens.LENGTHS.index(hidden_states.LENGTH)]["ids"]
        with tempfile.TemporaryDirectory() as folder:
            source = {"checkpoint_digest": tiny.write_checkpoint(name, folder), "checkpoint_script": "goldens/tiny.py"}
            model = opened(folder)
        provenance = about.provenance(Path(__file__), dtype="float32", computed_by="transformers, eager attention",
                                      **source)  # fmt: skip
        if arguments.tokens:
            record = {"provenance": provenance, "model": f"tiny:{name}", "dtype": "float32", "prompts": prompts,
                      "outputs": [stream(model, prompt["ids"]) for prompt in prompts]}  # fmt: skip
            (arguments.tokens / f"{name}_float32.json").write_text(about.dumps(record))
        found = states(model, ids)
        record = json.dumps({"provenance": provenance, "model": f"tiny:{name}", "ids": ids})
        target = arguments.out / f"{name}.safetensors"
        save_file({key: value.contiguous() for key, value in found.items()}, target, {"vtlab": record})
        target.chmod(0o644)
        print(target, len(found), "tensors", target.stat().st_size // 1024, "KiB", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
