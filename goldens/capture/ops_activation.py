"""Activation goldens from vLLM's CPU build: the Python forms that its model path runs on x86.

python goldens/capture/ops_activation.py --out goldens/ops
"""

from __future__ import annotations

import torch
import vllm._custom_ops  # noqa: F401  registers torch.ops._C, which the layers look up
from record import Record, generator, normal, run
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul, SiluAndMulWithClamp

BF16, F32 = torch.bfloat16, torch.float32
SPECIAL = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 88.0, -88.0, 200.0, -200.0, 3e38, -3e38,
                        torch.inf, -torch.inf, torch.nan])  # fmt: skip


def gated(record: Record) -> None:
    layers = [
        ("silu_and_mul", "SiluAndMul.forward_native", SiluAndMul(), {}),
        ("gelu_and_mul", 'GeluAndMul("tanh").forward_native', GeluAndMul("tanh"), {}),
    ]
    for limit, alpha, beta in ((7.0, 1.0, 0.0), (2.5, 1.702, 1.0)):
        layer, extra = SiluAndMulWithClamp(limit, alpha, beta), {"limit": limit, "alpha": alpha, "beta": beta}
        layers.append(("silu_and_mul_clamp", "SiluAndMulWithClamp.forward_native", layer, extra))
    for dtype in (F32, BF16):
        for shape in ((4, 64), (3, 1000), (2, 3, 33)):
            x = normal(f"act{shape}", *shape[:-1], 2 * shape[-1], scale=3)
            x.view(-1, 2 * shape[-1])[0, : len(SPECIAL)] = SPECIAL
            x = x.to(dtype)
            for op, function, layer, extra in layers:
                name = "_".join([str(dtype)[6:], "x".join(map(str, shape)), *(f"{v:g}" for v in extra.values())])
                with record.attempt(f"{op} {name}"):
                    record.case(op, name, f"vllm.model_executor.layers.activation.{function}",
                                {**extra, "rounding": "vllm_native"}, {"x": x},
                                {"out": layer.forward_native(x)})  # fmt: skip


def pointwise(record: Record) -> None:
    """soft cap, the Gemma embedding scale, embedding rows, relu, residual and bias sums."""
    for dtype in (F32, BF16):
        kind = str(dtype)[6:]
        x = normal("pw", 4, 96, scale=40).to(dtype)
        for cap in (30.0, 50.0):
            record.case("soft_cap", f"{kind}_cap{cap:g}", "logits_processor.py: torch.tanh(logits / cap) * cap",
                        {"cap": cap, "rounding": "vllm_native"}, {"x": x},
                        {"out": torch.tanh(x / cap) * cap})  # fmt: skip
        for hidden in (640, 2304):
            scale = torch.tensor(hidden**0.5, dtype=dtype)
            record.case("mul_scalar", f"{kind}_sqrt{hidden}", "Gemma3Model.embed_input_ids: embeddings * normalizer",
                        {"scale": float(scale)}, {"x": x}, {"out": x * scale})  # fmt: skip
        record.case("relu", kind, "torch.nn.functional.relu", {}, {"x": x}, {"out": torch.relu(x)})
        other, bias = normal("other", 4, 96, scale=40).to(dtype), normal("bias", 96).to(dtype)
        record.case("add", f"{kind}_residual", "torch.add", {}, {"a": x, "b": other}, {"out": x + other})
        record.case("add", f"{kind}_bias", "torch.add", {}, {"a": x, "b": bias}, {"out": x + bias})
        table, ids = normal("table", 50, 33).to(dtype), torch.randint(0, 50, (9,), generator=generator("ids"))
        record.case("embedding", kind, "torch.nn.functional.embedding", {}, {"table": table, "ids": ids},
                    {"out": torch.nn.functional.embedding(ids, table)})  # fmt: skip
    wide = normal("cast", 3, 64, scale=5)
    record.case("cast_bf16", "float32", "torch.Tensor.to", {}, {"x": wide}, {"out": wide.to(BF16)})
    record.case("cast_f32", "bfloat16", "torch.Tensor.to", {}, {"x": wide.to(BF16)}, {"out": wide.to(BF16).float()})


def activation(record: Record) -> None:
    with torch.no_grad(), set_current_vllm_config(VllmConfig()):
        gated(record)
        pointwise(record)


if __name__ == "__main__":
    run("activation", __file__, activation)
