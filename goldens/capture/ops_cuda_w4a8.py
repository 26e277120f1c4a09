"""Op-level goldens from vLLM's CUDA build: CUTLASS's grouped product of e4m3 activations with experts of 4-bit weights.

    python goldens/capture/ops_cuda_w4a8.py --out goldens/ops

Runs on a Hopper GPU, in vLLM's own environment. The layout of an expert's words is captured over words whose nibbles
spell the digits of their own index, so that every nibble's new place, and its expert, can be read off.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from record import Record, generator, normal, run_cuda

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
GROUP = 128


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in row-major order, FP8 codes as bytes, once everything that writes it is done."""
    torch.cuda.synchronize()
    tensor = tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def words(codes: torch.Tensor) -> torch.Tensor:
    """Codes [E, N, K] of 4 bits, packed along K: int32 [E, N, K / 8]."""
    places = torch.arange(0, 32, 4, dtype=torch.int64)
    packed = (codes.long().reshape(*codes.shape[:-1], -1, 8) << places).sum(-1)
    return torch.where(packed < 2**31, packed, packed - 2**32).int()


def layout(record: Record) -> None:
    """Two experts of 32 columns, every one of their nibbles in its place: digit by digit of 16 ** 4 places."""
    from vllm import _custom_ops as ops

    experts, n, k = 2, 32, 256
    index = torch.arange(experts * n * k).reshape(experts, n, k)
    for place in range(4):
        plain = words(index >> 4 * place & 15)
        with record.attempt(f"cutlass_encode_and_reorder_int4b_grouped {place}"):
            out, _ = ops.cutlass_encode_and_reorder_int4b_grouped(plain.cuda())
            for e, (before, after) in enumerate(zip(plain, bits(out))):
                record.case("cutlass_encode_and_reorder_int4b", f"grouped_digit{place}_expert{e}",
                            "cutlass_encode_and_reorder_int4b_grouped", {}, {"b": before.t()},
                            {"out": after.t()})  # fmt: skip


def products(record: Record) -> None:
    """The same experts' weights for batches of rows: a few, a tile of them, more than a tile; experts without any."""
    from vllm import _custom_ops as ops

    n, k = 256, 256
    for counts in ((1, 0, 2), (0, 20, 13), (70, 1, 0)):
        experts, rows = len(counts), sum(counts)
        codes = torch.randint(0, 16, (experts, n, k), generator=generator("w4a8 experts"))
        group = (torch.rand(experts, k // GROUP, n, generator=generator("w4a8 groups")) * 2 + 0.5).to(FP8).cuda()
        channel = (torch.rand(experts, n, 1, generator=generator("w4a8 channels")) * 0.016 + 0.004).cuda()
        token = (torch.rand(rows, 1, generator=generator(f"w4a8 tokens {rows}")) * 0.016 + 0.004).cuda()
        a = normal(f"w4a8 rows {rows}", rows, k, scale=4).to(FP8).cuda()
        ends = torch.tensor(counts).cumsum(0)
        offsets = ends - torch.tensor(counts)
        sizes = torch.tensor([(n, count, k) for count in counts], dtype=torch.int32)  # operands change places
        with record.attempt(f"cutlass_w4a8_moe_mm {counts}"):
            own, strides_b = ops.cutlass_encode_and_reorder_int4b_grouped(words(codes).cuda())
            table = ops.cutlass_pack_scale_fp8(group)
            strides_a = torch.full((experts,), k, dtype=torch.int64, device="cuda")
            strides_c = torch.full((experts,), n, dtype=torch.int64, device="cuda")
            strides_s = torch.zeros(experts, 2, dtype=torch.int64, device="cuda")
            strides_s[:, 0] = n
            out = torch.zeros(rows, n, dtype=BF16, device="cuda")
            ops.cutlass_w4a8_moe_mm(out, a, own, token, channel, table, GROUP, offsets.cuda(), sizes.cuda(), strides_a,
                                    strides_b, strides_c, strides_s)  # fmt: skip
            record.case("cutlass_w4a8_moe_mm", "_".join(map(str, counts)), "cutlass_w4a8_moe_mm", {},
                        {"a_tensors": bits(a), "b_tensors": bits(own), "a_scales": token.reshape(-1),
                         "b_scales": channel.reshape(experts, n),
                         "b_group_scales": bits(table).reshape(experts, k // GROUP, n, 8),
                         "expert_offsets": offsets, "problem_sizes": sizes}, {"out": bits(out)})  # fmt: skip


def w4a8_experts(record: Record) -> None:
    for part in (layout, products):
        with record.attempt(part.__name__):
            part(record)


FAMILIES = {"w4a8_experts": w4a8_experts}


if __name__ == "__main__":
    run_cuda(FAMILIES, __file__, __doc__)
