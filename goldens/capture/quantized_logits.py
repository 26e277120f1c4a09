"""Logits of goldens/quantized by the tools' own dequantisers: their weights in float32, in transformers' model.

Runs in the environment that made the checkpoints (quantize.py):

    python goldens/capture/quantized_logits.py --out goldens/quantized

What is kept in goldens/quantized/logits.safetensors: "<name>.ids" int32 [17] and "<name>.logits" float32 [17, V];
activations are not quantised.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
LENGTH = 17


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gptq(tensors: dict, settings: dict) -> torch.Tensor:
    """gptqmodel's torch kernel, with the file's scales in float32: each weight is rounded once."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    rows, columns = tensors["scales"].shape[1], len(tensors["g_idx"])
    kernel = TorchLinear(bits=settings["bits"], group_size=settings["group_size"], sym=settings["sym"],
                         desc_act=settings["desc_act"], in_features=columns, out_features=rows, bias=False,
                         pack_dtype=torch.int32, register_buffers=True)  # fmt: skip
    kernel.load_state_dict({name: tensors[name] for name in ("qweight", "qzeros", "scales", "g_idx")}, strict=False)
    convert_gptq_v1_to_v2_format_module(kernel, bits=settings["bits"], pack_dtype=torch.int32)
    kernel.post_init()
    kernel.scales = kernel.scales.float()
    kernel.dequant_dtype = torch.int32
    return kernel.dequantize_weight().float().T


def awq(tensors: dict, settings: dict) -> torch.Tensor:
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    scales = tensors["scales"].float()
    return dequantize_gemm(tensors["qweight"], tensors["qzeros"], scales, settings["bits"], settings["group_size"]).T


def compressed(tensors: dict, settings: dict) -> torch.Tensor:
    """compressed-tensors, in float32; its decompressor of NVFP4, which rounds to bfloat16, in two steps."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    (group,) = settings["config_groups"].values()
    scheme = QuantizationScheme.model_validate(group)
    if group["format"] == "nvfp4-pack-quantized":
        rows, half = tensors["weight_packed"].shape
        codes = unpack_fp4_from_uint8(tensors["weight_packed"], rows, 2 * half, torch.float32)
        return dequantize(codes, tensors["weight_scale"].float(), global_scale=tensors["weight_global_scale"],
                          dtype=torch.float32)  # fmt: skip
    kept = {key: data.float() if data.dtype == torch.bfloat16 else data for key, data in tensors.items()}
    return BaseCompressor.get_value_from_registry(group["format"]).decompress(kept, scheme)["weight"].float()


def fp8(tensors: dict, settings: dict) -> torch.Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    dequantize = Fp8Dequantize(SimpleNamespace(quantization_config=settings))
    return dequantize._dequantize_one(tensors["weight"], tensors["weight_scale_inv"], torch.float32)


def modelopt(tensors: dict, settings: dict) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    weight = tensors["weight"]
    if settings["quant_algo"] == "FP8":
        kept = FP8QTensor(weight.shape, torch.float32, weight)
        return kept.dequantize(torch.float32, scale=tensors["weight_scale"], block_sizes=None)
    shape = torch.Size([weight.shape[0], 2 * weight.shape[1]])
    scales = {"scale": tensors["weight_scale"], "double_scale": tensors["weight_scale_2"], "block_sizes": {-1: 16}}
    return NVFP4QTensor(shape, torch.float32, weight).dequantize(torch.float32, **scales).reshape(shape)


METHODS = {"gptq": gptq, "awq": awq, "compressed-tensors": compressed, "fp8": fp8, "modelopt": modelopt}


def dequantised(folder: Path) -> dict[str, torch.Tensor]:
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    found, linears = {}, {}
    for name, data in load_file(folder / "model.safetensors").items():
        module, _, suffix = name.rpartition(".")
        if suffix == "bias" or (suffix == "weight" and data.dtype == torch.bfloat16):
            found[name] = data.float()
        else:
            linears.setdefault(module, {})[suffix] = data
    for module, tensors in linears.items():
        found[f"{module}.weight"] = METHODS[settings["quant_method"]](tensors, settings).contiguous()
    return found


def logits_of(folder: Path) -> dict[str, torch.Tensor]:
    tokens = load(HERE / "tokens_quantized.py")
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, surplus = model.load_state_dict(dequantised(folder), strict=False)
    assert not surplus and set(missing) <= {"lm_head.weight"}, (missing, surplus)
    model.tie_weights()
    ids = torch.tensor(tokens.prompts_of(folder.name)[3]["ids"][:LENGTH])
    with torch.inference_mode():
        logits = model(ids[None]).logits[0]
    print(folder.name, logits.shape, float(logits.std()))
    return {f"{folder.name}.ids": ids.int(), f"{folder.name}.logits": logits.contiguous()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the checkpoints")
    out, found = parser.parse_args().out, {}
    for config in sorted(out.glob("*/config.json")):
        found |= logits_of(config.parent)
    digest = load(HERE / "about.py").script_digest(Path(__file__))
    record = {"script": f"goldens/capture/{Path(__file__).name}", "script_sha256": digest}
    save_file(found, out / "logits.safetensors", record)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
