"""Make the tiny quantised checkpoints of goldens/quantized with the tools that people make theirs with.

Runs in an environment of the tools, on a CPU: llmcompressor 0.13.0, compressed-tensors 0.18.0, gptqmodel 7.7.0,
nvidia-modelopt 0.47.0, transformers 5.14.1, torch 2.11.0:

    GPTQMODEL_CPU_WORKERS=2 python goldens/capture/quantize.py --out goldens/quantized [NAME ...]

Every model has one layer, a vocabulary of 64 and weights of tiny.py's streams in bfloat16. Each checkpoint is made in a
process of its own. What the tools write beside config.json, hf_quant_config.json and the tensors is not kept.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
VOCABULARY, CALIBRATION, LENGTH = 64, 16, 128
BASE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 192,
    "num_hidden_layers": 1, "vocab_size": VOCABULARY, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": True, "rope_theta": 10000.0,
}  # fmt: skip
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MODELS = {
    "gptq_act_order": {**QWEN2, "num_key_value_heads": 2},
    "gptq_asym": {},
    "awq": {"num_key_value_heads": 2},
    "ct_w4a16": {"tie_word_embeddings": False},
    "ct_int8_dynamic": {"intermediate_size": 128},
    "ct_int8_static": {"intermediate_size": 128},
    "ct_fp8_dynamic": {"intermediate_size": 128, "tie_word_embeddings": False},
    "fp8_block": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 128},
    "modelopt_fp8": {"intermediate_size": 128},
    "nvfp4": {},
    "modelopt_nvfp4": {},
    "mxfp4": {},
}


def load(path: Path):
    """Import a module by path, so that vtlab need not be installed here."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_source(name: str, folder: Path) -> None:
    """The checkpoint before it is quantised, with a tokenizer that the tools want to see."""
    tiny = load(HERE.parent / "tiny.py")
    recipes = sys.modules["vtlab_goldens_recipes"]
    config = BASE | MODELS[name]
    family = recipes.qwen if config["model_type"] == "qwen2" else recipes.llama
    shapes = family.RECIPES["qwen2" if config["model_type"] == "qwen2" else "llama"].shapes
    tiny._RECIPES[name] = recipes.recipe.Recipe(config, shapes, embedding=0.05, final_norm=8.0)
    tiny.CHECKPOINTS[name] = config
    tiny.write_checkpoint(name, folder, "bfloat16")

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2", pad_token="t3").save_pretrained(
        folder
    )


def calibration() -> list[list[int]]:
    import torch

    random = torch.Generator().manual_seed(0)
    return [torch.randint(4, VOCABULARY, (LENGTH,), generator=random).tolist() for _ in range(CALIBRATION)]


def model(source: Path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)


def gptqmodel(source: Path, out: Path, **settings) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    settings = {key: value for key, value in settings.items() if value is not None}
    quantised = GPTQModel.load(str(source), QuantizeConfig(bits=4, device="cpu", offload_to_disk=False, **settings))
    quantised.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in calibration()], batch_size=1)
    quantised.save(str(out))


def llmcompressor(source: Path, out: Path, modifier, calibrated: bool) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoTokenizer

    compressed, more = model(source), {}
    if calibrated:
        rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in calibration()]
        more = {"dataset": Dataset.from_list(rows), "num_calibration_samples": CALIBRATION, "max_seq_length": LENGTH,
                "pipeline": "basic", "shuffle_calibration_samples": False}  # fmt: skip
    oneshot(model=compressed, recipe=modifier, tokenizer=AutoTokenizer.from_pretrained(source), **more)
    compressed.save_pretrained(out, save_compressed=True)


def modelopt(source: Path, out: Path, settings: str) -> None:
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    samples = [torch.tensor([ids]) for ids in calibration()]
    quantised = mtq.quantize(model(source), getattr(mtq, settings), lambda each: [each(ids) for ids in samples])
    with torch.inference_mode():
        export_hf_checkpoint(quantised, export_dir=str(out))


def transformers_fp8(source: Path, out: Path) -> None:
    """transformers' own conversion; its quantiser of whole models wants a GPU."""
    from types import SimpleNamespace

    from safetensors.torch import save_file
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    settings = FineGrainedFP8Config(weight_block_size=(128, 128), modules_to_not_convert=["lm_head"])
    convert = Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert
    tensors = {}
    for name, data in model(source).state_dict().items():
        linear = data.ndim == 2 and "embed" not in name
        tensors |= convert({name: data}) if linear else {name: data}
    tensors.pop("lm_head.weight", None)
    out.mkdir()
    save_file({name: data.contiguous() for name, data in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    written = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
               "modules_to_not_convert": ["lm_head"]}  # fmt: skip
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": written}))


def modifier(scheme: str | None = None, gptq: bool = False, **groups):
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    kind = GPTQModifier if gptq else QuantizationModifier
    if scheme is not None:
        return kind(targets="Linear", scheme=scheme, ignore=["lm_head"])
    return kind(ignore=["lm_head"], config_groups={"group_0": {"targets": ["Linear"], **groups}})


def make(name: str, source: Path, out: Path) -> str:
    """Make one checkpoint; the name of the tool."""
    if name == "gptq_act_order":
        gptqmodel(source, out, group_size=32, sym=True, desc_act=True)
    elif name == "gptq_asym":
        gptqmodel(source, out, group_size=64, sym=False, desc_act=False)
    elif name == "awq":
        from gptqmodel.quantization import FORMAT, METHOD

        gptqmodel(source, out, group_size=64, sym=False, desc_act=False, quant_method=METHOD.AWQ, format=FORMAT.GEMM)
    elif name == "ct_w4a16":
        weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32,
                   "actorder": "static"}  # fmt: skip
        llmcompressor(source, out, modifier(gptq=True, weights=weights), True)
    elif name == "ct_int8_static":
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor"}
        given = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor", "dynamic": False}
        llmcompressor(source, out, modifier(weights=weights, input_activations=given), True)
    elif name in ("modelopt_fp8", "modelopt_nvfp4"):
        modelopt(source, out, "FP8_DEFAULT_CFG" if name == "modelopt_fp8" else "NVFP4_DEFAULT_CFG")
    elif name == "fp8_block":
        transformers_fp8(source, out)
        return "transformers"
    else:
        scheme = {"ct_int8_dynamic": "INT8", "ct_fp8_dynamic": "FP8_DYNAMIC", "nvfp4": "NVFP4", "mxfp4": "MXFP4A16"}
        llmcompressor(source, out, modifier(scheme[name]), name == "nvfp4")
    return "gptqmodel" if name in ("gptq_act_order", "gptq_asym", "awq") else (
        "nvidia-modelopt" if name.startswith("modelopt") else "llmcompressor")  # fmt: skip


def keep(made: Path, target: Path, tool: str) -> None:
    """Config and tensors, in small; and where they are from."""
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((made / "config.json").read_text())
    quantization = config.get("quantization_config", {})
    quantization.get("meta", {}).pop("offload_to_disk_path", None)
    config.pop("_name_or_path", None)
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if (made / "hf_quant_config.json").exists():
        (target / "hf_quant_config.json").write_text((made / "hf_quant_config.json").read_text())
    (target / "model.safetensors").write_bytes((made / "model.safetensors").read_bytes())
    about = load(HERE / "about.py")
    versions = {package: importlib.metadata.version(package) for package in ("torch", "transformers")}
    try:
        versions[tool] = importlib.metadata.version(tool)
    except importlib.metadata.PackageNotFoundError:
        versions[tool] = importlib.import_module(tool).__version__
    record = {"tool": tool, **versions, "script": f"goldens/capture/{Path(__file__).name}",
              "script_sha256": about.script_digest(Path(__file__))}  # fmt: skip
    (target / "provenance.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--here", action="store_true", help="in this process (used for the children)")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    if arguments.here:
        (name,) = arguments.names
        with tempfile.TemporaryDirectory() as scratch:
            source, made = Path(scratch) / "source", Path(scratch) / "made"
            write_source(name, source)
            keep(made, arguments.out / name, make(name, source, made))
        return 0
    failed = []
    for name in arguments.names or MODELS:
        done = subprocess.run([sys.executable, __file__, "--out", str(arguments.out), "--here", name])
        failed += [name] if done.returncode else []
    print("FAILED:" if failed else "all made", *failed, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
