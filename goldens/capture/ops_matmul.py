"""GEMM goldens from vLLM's CPU build: torch.nn.functional.linear, its unquantised GEMM.

python goldens/capture/ops_matmul.py --out goldens/ops
"""

from __future__ import annotations

import torch
from record import Record, normal, run

SHAPES = ((1, 64, 128), (5, 33, 257), (17, 96, 512), (3, 16, 4096), (2, 3, 1), (64, 32, 64))


def matmul(record: Record) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype)[6:]
        for m, n, k in SHAPES:
            name = f"{kind}_{m}x{n}x{k}"
            a, b = normal("a" + name, m, k, dtype=dtype), normal("b" + name, n, k, dtype=dtype)
            record.case("matmul_bt", name, "torch.nn.functional.linear", {}, {"a": a, "b": b},
                        {"out": torch.nn.functional.linear(a, b)})  # fmt: skip
        a, b = normal("ma" + kind, 5, 70, dtype=dtype), normal("mb" + kind, 70, 33, dtype=dtype)
        record.case("matmul", f"{kind}_5x33x70", "torch.matmul", {}, {"a": a, "b": b}, {"out": a @ b})
        a, b = normal("ba" + kind, 4, 3, 64, dtype=dtype), normal("bb" + kind, 4, 64, 17, dtype=dtype)
        record.case("batched_matmul", f"{kind}_4x3x17x64", "torch.bmm", {}, {"a": a, "b": b}, {"out": torch.bmm(a, b)})


if __name__ == "__main__":
    with torch.no_grad():
        run("matmul", __file__, matmul)
