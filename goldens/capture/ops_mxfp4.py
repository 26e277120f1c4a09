"""MXFP4 goldens from compressed-tensors, which vLLM loads its checkpoints with: scales, codes, Hadamard matrices.

python goldens/capture/ops_mxfp4.py --out goldens/ops

Codes come from vLLM's `cast_to_fp4`, packed by compressed-tensors. vLLM's own quantisers of MXFP4 need a Blackwell GPU.
"""

from __future__ import annotations

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix
from record import Record, normal, run
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import cast_to_fp4

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def inputs() -> list[tuple[str, torch.Tensor]]:
    found = [(f"{str(dtype)[6:]}_{m}x{k}", normal(f"mx{m}{k}", m, k, dtype=dtype, scale=3))
             for dtype in (BF16, F16, F32) for m, k in ((1, 64), (37, 128), (9, 2048))]  # fmt: skip
    edges = normal("mxedges", 16, 32)
    edges[:, 7] = torch.tensor([1.75, 1.7499999, 1.7500001, 1.0, 2.0, 3.5, 3.4999998, 6.0]).repeat(2) * 4
    edges[8:] *= 2.0**-20
    return [*found, ("float32_edges", edges), ("float32_small", normal("mxsmall", 3, 64, scale=1e-30))]


def capture(record: Record) -> None:
    for name, x in inputs():
        with record.attempt(f"mxfp4_quant {name}"):
            grouped = x.float().reshape(x.shape[0], -1, 32)
            byte = generate_mx_scales(grouped.abs().amax(-1, keepdim=True))
            value = (grouped / torch.exp2(byte - 127)).clamp(-6, 6).reshape(x.shape)
            record.case("mxfp4_quant", name, "generate_mx_scales, cast_to_fp4, pack_fp4_to_uint8",
                        {"rounding": "vllm_native"}, {"x": x},
                        {"out": pack_fp4_to_uint8(cast_to_fp4(value)), "scale": byte[..., 0].to(torch.uint8)},
                        )  # fmt: skip
    for n in (1, 2, 16, 32, 64, 128):
        with record.attempt(f"hadamard {n}"):
            out = (deterministic_hadamard_matrix(n, torch.float64) * n**-0.5).to(BF16)
            record.case("hadamard", str(n), "deterministic_hadamard_matrix", {"n": n}, {}, {"out": out})


if __name__ == "__main__":
    run("mxfp4", __file__, capture)
