"""Norm goldens from vLLM's CPU build: the Python forms (forward_native), and l2norm's Triton kernel, interpreted.

    python goldens/capture/ops_norm.py --out goldens/ops

The compiled CPU ops are left out: on hosts without AVX-512 they truncate float32 to bfloat16.
"""

from __future__ import annotations

import interpreted  # noqa: F401  before vLLM
import torch
from record import Record, normal, run
from vllm.ir.ops.layernorm import fused_add_rms_norm, rms_norm
from vllm.model_executor.layers.layernorm import LayerNorm, RMSNormGated
from vllm.third_party.flash_linear_attention.ops.l2norm import l2norm_fwd

BF16, F32 = torch.bfloat16, torch.float32
NATIVE = {"eps": 1e-6, "rounding": "vllm_native"}


def rows_of(name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Unit rows, but the first is large, the second tiny and the last zero."""
    x = normal(name, *shape, dtype=F32)
    x[0] *= 300
    x[1] *= 1e-3
    x[-1] = 0
    return x.to(dtype)


def rms_norms(record: Record) -> None:
    for dtype in (F32, BF16):
        for shape in ((8, 128), (4, 1000), (3, 2, 64), (3, 7)):
            name = f"{str(dtype)[6:]}_{'x'.join(map(str, shape))}"
            x, residual = rows_of("x" + name, *shape, dtype=dtype), rows_of("r" + name, *shape, dtype=dtype)
            weight = (1 + 0.2 * normal("w" + name, shape[-1])).to(dtype)
            gemma = (weight.float() - 1).to(dtype)
            for kind, stored, used in (("plain", weight, weight), ("gemma", gemma, gemma.float() + 1.0)):
                call = {**NATIVE, "gemma": kind == "gemma"}
                note = "" if kind == "plain" else ", weight.float() + 1 as GemmaRMSNorm.forward_native"
                with record.attempt(f"{kind} {name}"):
                    out = rms_norm(x, used, 1e-6)
                    record.case("rms_norm", f"{kind}_{name}", "vllm.ir.ops.layernorm.rms_norm" + note, call,
                                {"x": x, "weight": stored}, {"out": out})  # fmt: skip
                with record.attempt(f"{kind} residual {name}"):
                    out, new = fused_add_rms_norm(x, residual, used, 1e-6)
                    record.case("rms_norm", f"{kind}_residual_{name}",
                                "vllm.ir.ops.layernorm.fused_add_rms_norm" + note, call,
                                {"x": x, "residual": residual, "weight": stored},
                                {"out": out, "residual": new})  # fmt: skip


def layer_norms(record: Record) -> None:
    for dtype in (F32, BF16):
        for rows, width in ((3, 7), (4, 768), (2, 1280)):
            name = f"{str(dtype)[6:]}_{rows}x{width}"
            x = (normal("ln" + name, rows, width, scale=3) + 2).to(dtype)
            layer = LayerNorm(width, eps=1e-5)
            layer.weight.data, layer.bias.data = 1 + 0.2 * normal("lw" + name, width), normal("lb" + name, width)
            with record.attempt(f"layer_norm {name}"):
                record.case("layer_norm", f"affine_{name}", "layernorm.LayerNorm.forward", {"eps": 1e-5},
                            {"x": x, "weight": layer.weight, "bias": layer.bias}, {"out": layer(x)})  # fmt: skip
            if dtype == F32:
                out = torch.nn.functional.layer_norm(x, (width,), eps=1e-5)
                record.case("layer_norm", f"plain_{name}", "torch.nn.functional.layer_norm", {"eps": 1e-5},
                            {"x": x}, {"out": out})  # fmt: skip


def gated_norms(record: Record) -> None:
    pairs = ((F32, F32), (BF16, BF16), (F32, BF16), (BF16, F32))
    for shape in ((6, 128), (3, 2, 64), (4, 8)):
        for sigmoid in (False, True):
            for source, target in pairs if shape == (6, 128) else pairs[:2]:
                activation = "sigmoid" if sigmoid else "swish"
                name = f"{activation}_{str(source)[6:]}_{str(target)[6:]}_{'x'.join(map(str, shape))}"
                x, gate = rows_of("g" + name, *shape, dtype=source), normal("z" + name, *shape, dtype=source, scale=4)
                weight = (1 + 0.2 * normal("gw" + name, shape[-1])).to(source)
                with record.attempt(f"rms_norm_gated {name}"):
                    out = RMSNormGated.forward_static(x, gate, weight, 1e-6, target, None, True, activation)
                    record.case("rms_norm_gated", name, "layernorm.RMSNormGated.forward_static(norm_before_gate=True)",
                                {"eps": 1e-6, "sigmoid_gate": sigmoid, "out_dtype": str(target)[6:]},
                                {"x": x, "gate": gate, "weight": weight}, {"out": out})  # fmt: skip


def l2norms(record: Record) -> None:
    for shape in ((5, 128), (3, 2, 64), (4, 7)):
        name = f"float32_{'x'.join(map(str, shape))}"
        x = rows_of("l2" + name, *shape, dtype=F32)
        with record.attempt(f"l2norm {name}"):
            record.case("l2norm", name, "flash_linear_attention l2norm_fwd (Triton, interpreted)", {"eps": 1e-6},
                        {"x": x}, {"out": l2norm_fwd(x, eps=1e-6)})  # fmt: skip


def norm(record: Record) -> None:
    with torch.no_grad():
        for part in (rms_norms, layer_norms, gated_norms, l2norms):
            part(record)


if __name__ == "__main__":
    run("norm", __file__, norm)
