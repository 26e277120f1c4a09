"""Op-level goldens from vLLM's CUDA build: FP8 quantisers, and norms and SiLU-and-mul that quantise their result.

    python goldens/capture/ops_cuda_quant.py --out goldens/ops [--families quant_fp8 norm_quant]

Runs on a GPU, in vLLM's own environment. Every case stands alone: one that fails is listed under "errors" in its
family's file. Codes are kept as bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from record import Record, normal

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.float8_e4m3fn
INF, NAN = float("inf"), float("nan")
SMALL = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 2.0**-10, -(2.0**-9), 3e-6, 1.0, -1.0, 447.0, 449.0, 464.0, 465.0])
SPECIAL = torch.tensor([0.0, -0.0, 1e-40, INF, -INF, NAN, 448.0, -448.0, 3e38, -3e38, 1e-9])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in row-major order, FP8 codes as bytes, once everything that writes it is done."""
    torch.cuda.synchronize()
    tensor = tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def kind(dtype: torch.dtype) -> str:
    return str(dtype)[6:]


def planted(name: str, rows: int, width: int, dtype: torch.dtype, values: torch.Tensor, scale: float = 1.0):
    """Normal rows, the first of which begins with `values`."""
    x = normal(name, rows, width, scale=scale)
    count = min(width, len(values))
    x[0, :count] = values[:count]
    return x.to(dtype)


def static(record: Record) -> None:
    """Per tensor with a scale that is given; every bfloat16 at scale 1; what a NaN and infinities become."""
    shapes = ((1, 1), (7, 17), (3, 1024), (5, 1026), (1, 5137))
    cases = [(f"bfloat16_{m}x{k}", planted(f"s{m}{k}", m, k, BF16, SMALL, 2), 0.0321) for m, k in shapes]
    cases += [(f"{kind(d)}_7x128", planted("s7", 7, 128, d, SMALL, 2), 0.0321) for d in (F32, F16)]
    cases += [(f"scale{s:g}", planted("sx", 8, 256, BF16, SMALL, 3), s) for s in (0.01, 0.5, 0.035, 10.0)]
    cases += [(f"special_{kind(d)}", planted("sp", 2, 64, d, SPECIAL), 1.0) for d in (BF16, F32)]
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    cases.append(("every_bfloat16", every.where(~every.isnan(), torch.zeros_like(every)).view(256, 256), 1.0))
    for name, x, value in cases:
        with record.attempt(f"quant_fp8_static {name}"):
            scale, out = torch.tensor([value], dtype=F32), torch.empty(x.shape, dtype=FP8, device="cuda")
            torch.ops._C.static_scaled_fp8_quant(out, x.cuda(), scale.cuda(), None)
            record.case("quant_fp8_static", name, "torch.ops._C.static_scaled_fp8_quant", {"rounding": "vllm"},
                        {"x": x, "scale": scale}, {"out": bits(out)})  # fmt: skip


def per_tensor(record: Record) -> None:
    """One scale, found from the whole tensor."""
    cases = [(f"bfloat16_{m}x{k}", normal(f"t{m}{k}", m, k, dtype=BF16, scale=3))
             for m, k in ((1, 1), (7, 17), (3, 1024), (20, 128), (1, 5137))]  # fmt: skip
    cases += [(f"{kind(d)}_7x128", normal("t7", 7, 128, dtype=d)) for d in (F32, F16)]
    cases.append(("zeros", torch.zeros(3, 64, dtype=BF16)))
    cases.append(("power_of_two", planted("tp", 4, 64, BF16, torch.tensor([448.0 * 4, 2.0**-8]), 20)))
    cases.append(("special", planted("ts", 2, 64, BF16, torch.tensor([NAN, -0.0, 3e38, 1e-40]))))
    for name, x in cases:
        with record.attempt(f"dynamic_scaled_fp8_quant {name}"):
            out, scale = torch.empty(x.shape, dtype=FP8, device="cuda"), torch.empty(1, dtype=F32, device="cuda")
            torch.ops._C.dynamic_scaled_fp8_quant(out, x.cuda(), scale)
            record.case("dynamic_scaled_fp8_quant", name, "torch.ops._C.dynamic_scaled_fp8_quant",
                        {"rounding": "vllm"}, {"x": x}, {"out": bits(out), "scale": bits(scale)})  # fmt: skip


def per_token(record: Record) -> None:
    """One scale a row, with and without an upper bound."""
    rows = [(f"bfloat16_{m}x{k}", normal(f"p{m}{k}", m, k, dtype=BF16, scale=3))
            for m, k in ((1, 1), (7, 17), (3, 1024), (40, 128), (1, 5137), (4, 1026))]  # fmt: skip
    rows += [(f"{kind(d)}_7x128", normal("p7", 7, 128, dtype=d)) for d in (F32, F16)]
    edges = normal("pe", 6, 64, scale=2)
    edges[0], edges[1], edges[2, 0], edges[3, 0], edges[4, :2] = (
        0.0,
        edges[1] * 1e-7,
        448.0,
        3e38,
        torch.tensor([NAN, -0.0]),
    )
    rows.append(("edges", edges.to(BF16)))
    for name, x in rows:
        for bound in (None, 1.25):
            full = name + ("" if bound is None else f"_ub{bound:g}")
            with record.attempt(f"dynamic_per_token_scaled_fp8_quant {full}"):
                out = torch.empty(x.shape, dtype=FP8, device="cuda")
                scale = torch.empty(len(x), 1, dtype=F32, device="cuda")
                limit = None if bound is None else torch.tensor([bound], dtype=F32)
                torch.ops._C.dynamic_per_token_scaled_fp8_quant(
                    out, x.cuda(), scale, None if limit is None else limit.cuda()
                )
                record.case("dynamic_per_token_scaled_fp8_quant", full,
                            "torch.ops._C.dynamic_per_token_scaled_fp8_quant", {"rounding": "vllm"},
                            {"x": x, "scale_ub": limit}, {"out": bits(out), "scale": bits(scale)})  # fmt: skip


def per_group(record: Record) -> None:
    """One scale for each 128 or 64 neighbours, row- and column-major, with scales of powers of two."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    edges = normal("ge", 4, 512, scale=2)
    edges[0, :128], edges[1, :128] = 0.0, edges[1, :128] * 1e-12
    edges[2, 0], edges[2, 128], edges[3, 0] = 448.0 * 2.0**-4, 448.0 * 2.0**-4 * (1 + 2.0**-7), NAN
    cases = [(f"{kind(d)}_{m}x{k}", normal(f"g{m}{k}", m, k, dtype=d, scale=3))
             for m, k, d in ((1, 128, BF16), (5, 256, BF16), (3, 1024, BF16), (40, 128, BF16), (1, 5120, BF16),
                             (6, 384, F32), (6, 384, F16))]  # fmt: skip
    cases.append(("edges", edges.to(BF16)))
    for name, x in cases:
        for group, ue8m0, column in ((128, False, False), (128, True, False), (128, False, True), (64, True, True)):
            full = f"{name}_g{group}" + "_ue8m0" * ue8m0 + "_column" * column
            with record.attempt(f"per_token_group_quant_fp8 {full}"):
                out, scale = per_token_group_quant_fp8(
                    x.cuda(), group, column_major_scales=column, use_ue8m0=ue8m0, dtype=FP8
                )
                record.case("per_token_group_quant_fp8", full, "fp8_utils.per_token_group_quant_fp8 (CUDA)",
                            {"group_size": group, "ue8m0": ue8m0, "column_major": column, "rounding": "vllm"},
                            {"x": x}, {"out": bits(out), "scale": bits(scale)})  # fmt: skip


def quant_fp8(record: Record) -> None:
    static(record)
    per_tensor(record)
    per_token(record)
    per_group(record)


def rows_and_weight(rows: int, width: int, dtype: torch.dtype):
    """(x, residual, weight) of a norm, the first row larger than the others."""
    name = f"{kind(dtype)}_{rows}x{width}"
    x, residual = normal("x" + name, rows, width, dtype=dtype), normal("r" + name, rows, width, dtype=dtype)
    x[0, ::3] *= 30
    return name, x, residual, (1 + 0.2 * normal("w" + name, width)).to(dtype)


def norm_static(record: Record) -> None:
    """rms_norm into static codes, with and without a residual."""
    c, eps = torch.ops._C, {"eps": 1e-6, "rounding": "vllm"}
    for rows, width, dtype in ((1, 64, BF16), (7, 128, BF16), (3, 1000, BF16), (2, 1024, BF16), (1, 5120, BF16),
                               (60, 128, BF16), (7, 128, F16), (7, 128, F32), (3, 100, BF16)):  # fmt: skip
        name, x, residual, weight = rows_and_weight(rows, width, dtype)
        scale = torch.tensor([0.0321], dtype=F32)
        with record.attempt(f"rms_norm_quant_fp8 {name}"):
            out = torch.empty(rows, width, dtype=FP8, device="cuda")
            c.rms_norm_static_fp8_quant(out, x.cuda(), weight.cuda(), scale.cuda(), 1e-6)
            record.case("rms_norm_quant_fp8", name, "torch.ops._C.rms_norm_static_fp8_quant", eps,
                        {"x": x, "weight": weight, "scale": scale}, {"out": bits(out)})  # fmt: skip
        with record.attempt(f"rms_norm_quant_fp8 residual_{name}"):
            out, rd = torch.empty(rows, width, dtype=FP8, device="cuda"), residual.cuda()
            c.fused_add_rms_norm_static_fp8_quant(out, x.cuda(), rd, weight.cuda(), scale.cuda(), 1e-6)
            record.case("rms_norm_quant_fp8", f"residual_{name}", "torch.ops._C.fused_add_rms_norm_static_fp8_quant",
                        eps, {"x": x, "weight": weight, "scale": scale, "residual": residual},
                        {"out": bits(out), "residual": rd})  # fmt: skip


def norm_per_token(record: Record) -> None:
    """rms_norm into codes with a scale for each token: FP8 and int8, residual, upper bound."""
    from vllm._custom_ops import rms_norm_dynamic_per_token_quant

    for rows, width, dtype in ((1, 64, BF16), (7, 128, BF16), (2, 1024, BF16), (1, 5120, BF16), (60, 128, BF16),
                               (7, 128, F16), (7, 128, F32), (3, 1002, BF16)):  # fmt: skip
        name, x, residual, weight = rows_and_weight(rows, width, dtype)
        x[-1] = 0 if rows > 1 else x[-1]
        for quant, add, bound in ((FP8, False, None), (FP8, True, None), (FP8, False, 1.25), (torch.int8, False, None),
                                  (torch.int8, True, None)):  # fmt: skip
            full = f"{kind(quant)}_{name}" + "_residual" * add + ("" if bound is None else f"_ub{bound:g}")
            with record.attempt(f"rms_norm_dynamic_per_token_quant {full}"):
                limit = None if bound is None else torch.tensor([bound], dtype=F32)
                rd = residual.cuda() if add else None
                out, scale = rms_norm_dynamic_per_token_quant(
                    x.cuda(), weight.cuda(), 1e-6, quant, None if limit is None else limit.cuda(), rd
                )
                results = {"out": bits(out), "scale": bits(scale)} | ({"residual": rd} if add else {})
                record.case("rms_norm_dynamic_per_token_quant", full, "_custom_ops.rms_norm_dynamic_per_token_quant",
                            {"eps": 1e-6, "quant_dtype": kind(quant), "rounding": "vllm"},
                            {"x": x, "weight": weight, "scale_ub": limit, "residual": residual if add else None},
                            results)  # fmt: skip


def norm_per_block(record: Record) -> None:
    """rms_norm into codes with a scale for each group of neighbours."""
    from vllm._custom_ops import rms_norm_per_block_quant

    for rows, width, dtype in ((1, 128, BF16), (7, 256, BF16), (2, 1024, BF16), (1, 5120, BF16), (60, 128, BF16),
                               (7, 256, F16), (7, 256, F32)):  # fmt: skip
        name, x, residual, weight = rows_and_weight(rows, width, dtype)
        x[-1] = 0 if rows > 1 else x[-1]
        for group, add, bound, column in ((128, False, None, False), (64, True, None, False), (128, True, None, True),
                                          (64, False, 1.25, True)):  # fmt: skip
            full = (
                f"{name}_g{group}" + "_residual" * add + "_column" * column + ("" if bound is None else f"_ub{bound:g}")
            )
            with record.attempt(f"rms_norm_per_block_quant {full}"):
                limit = None if bound is None else torch.tensor([bound], dtype=F32)
                rd = residual.cuda() if add else None
                out, scale = rms_norm_per_block_quant(
                    x.cuda(), weight.cuda(), 1e-6, FP8, [1, group], None if limit is None else limit.cuda(), rd, column
                )
                results = {"out": bits(out), "scale": bits(scale)} | ({"residual": rd} if add else {})
                record.case("rms_norm_per_block_quant", full, "_custom_ops.rms_norm_per_block_quant",
                            {"eps": 1e-6, "group_size": group, "column_major": column, "rounding": "vllm"},
                            {"x": x, "weight": weight, "scale_ub": limit, "residual": residual if add else None},
                            results)  # fmt: skip


def silu_static(record: Record) -> None:
    """silu_and_mul into static codes; widths that 16-byte loads divide, as the op asks for."""
    for rows, width, dtype in ((4, 64, BF16), (3, 1000, BF16), (1, 5120, BF16), (33, 128, BF16), (4, 64, F16)):
        name = f"{kind(dtype)}_{rows}x{width}"
        x = planted(
            "a" + name, rows, 2 * width, dtype, torch.tensor([0.0, -0.0, 20.0, -20.0, 88.0, -88.0, INF, NAN]), 3
        )
        scale = torch.tensor([0.0321], dtype=F32)
        with record.attempt(f"silu_and_mul_quant {name}"):
            out = torch.empty(rows, width, dtype=FP8, device="cuda")
            torch.ops._C.silu_and_mul_quant(out, x.cuda(), scale.cuda())
            record.case("silu_and_mul_quant", name, "torch.ops._C.silu_and_mul_quant", {"rounding": "vllm"},
                        {"x": x, "scale": scale}, {"out": bits(out)})  # fmt: skip


def silu_per_block(record: Record) -> None:
    """silu_and_mul into codes with a scale for each group of neighbours."""
    from vllm._custom_ops import silu_and_mul_per_block_quant

    for rows, width, dtype in ((1, 128, BF16), (5, 256, BF16), (3, 1024, BF16), (1, 5120, BF16), (5, 256, F16)):
        name = f"{kind(dtype)}_{rows}x{width}"
        x = normal("b" + name, rows, 2 * width, dtype=dtype, scale=3)
        x[-1, :128] = 0 if rows > 1 else x[-1, :128]
        for group, bound, column in ((128, None, False), (64, None, False), (128, None, True), (64, 0.004, True)):
            full = f"{name}_g{group}" + "_column" * column + ("" if bound is None else f"_ub{bound:g}")
            with record.attempt(f"silu_and_mul_per_block_quant {full}"):
                limit = None if bound is None else torch.tensor([bound], dtype=F32)
                out, scale = silu_and_mul_per_block_quant(
                    x.cuda(), group, FP8, None if limit is None else limit.cuda(), column
                )
                record.case("silu_and_mul_per_block_quant", full, "_custom_ops.silu_and_mul_per_block_quant",
                            {"group_size": group, "column_major": column, "rounding": "vllm"},
                            {"x": x, "scale_ub": limit}, {"out": bits(out), "scale": bits(scale)})  # fmt: skip


def norm_quant(record: Record) -> None:
    norm_static(record)
    norm_per_token(record)
    norm_per_block(record)
    silu_per_block(record)
    silu_static(record)


FAMILIES = {"quant_fp8": quant_fp8, "norm_quant": norm_quant}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU; the CPU build's goldens come from ops_quant_fp8.py")
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C

    missing = 0
    for family in arguments.families:
        record = Record(family, __file__)
        with record.attempt("the family as a whole"):
            FAMILIES[family](record)
        record.save(arguments.out)
        missing += len(record.errors)
    print("cases that failed:", missing)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
