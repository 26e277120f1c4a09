"""One token a row of the gated delta rule: Qwen3.5-27B's 16 key and 48 value heads of 128, bfloat16, states float32."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_empty, torch_normal
from .bench import Bench

ROWS = (1, 16, 64)
HK, HV, D = 16, 48, 128
WIDTH = (2 * HK + HV) * D


def benches() -> Iterator[Bench]:
    for B in ROWS:
        yield packed_decode(B)
    yield decode(64)


def slots(count: int):
    """Rows against slots 1 ..., on the device; slot 0 is null to the peers."""
    import cupy

    return cupy.arange(1, count + 1, dtype=cupy.int32)


def torch_slots(count: int):
    import torch

    return torch.arange(1, count + 1, dtype=torch.int32, device="cuda")


def packed_decode(B: int) -> Bench:
    def make():
        gates = cupy_normal(B, HV), cupy_normal(B, HV), cupy_normal(HV, dtype=F32), cupy_normal(HV)
        state = cupy_normal(B + 1, HV, D, D, dtype=F32)
        return (cupy_normal(B, WIDTH), *gates, state, slots(B)), {"scale": D**-0.5}, cupy_empty(B, HV, D)

    def fla():
        from vllm.third_party.flash_linear_attention.ops.fused_recurrent import (
            fused_recurrent_gated_delta_rule_packed_decode as packed,
        )

        mixed, a, b = torch_normal(B, WIDTH), torch_normal(B, HV), torch_normal(B, HV)
        A_log, bias = torch_normal(HV, dtype="float32"), torch_normal(HV)
        state, out = torch_normal(B + 1, HV, D, D, dtype="float32"), torch_empty(B, 1, HV, D)
        where = torch_slots(B)
        return lambda: packed(mixed, a, b, A_log, bias, D**-0.5, state, out, where, True)

    size = 8 * B * HV * D * D + 2 * B * (WIDTH + HV * D)
    return Bench(
        "gdn", f"gdn_packed_decode {B}", ours("gdn_packed_decode", make), {"fla": fla}, size, 7 * B * HV * D * D
    )


def decode(B: int) -> Bench:
    def make():
        keys = cupy_normal(B, HK, D, dtype=F32) / 11
        gates = -abs(cupy_normal(B, HV, dtype=F32)), abs(cupy_normal(B, HV, dtype=F32)) / 4
        state = cupy_normal(B + 1, HV, D, D, dtype=F32)
        arguments = (keys, keys, cupy_normal(B, HV, D, dtype=F32), *gates, state, slots(B))
        return arguments, {"scale": D**-0.5}, cupy_empty(B, HV, D, dtype=F32)

    size = 8 * B * HV * D * D + 4 * B * (2 * HK + 2 * HV) * D
    return Bench("gdn", f"gdn_decode {B} float32", ours("gdn_decode", make), {}, size, 7 * B * HV * D * D)
