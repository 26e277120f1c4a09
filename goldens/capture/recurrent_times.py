"""How fast vLLM's recurrent kernels are on this GPU: medians of CUDA graphs of ten calls, in microseconds a call.

Kernels that tune themselves try all of their configurations first. Cases are in order of weight; once the budget of
seconds is used up, the rest are listed as skipped.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator

import torch
from record import normal
from recurrent_conv import programs
from recurrent_inputs import BF16, F32, starts, unit
from recurrent_ssd import pieces

CALLS, REPLAYS = 10, 30


def on_gpu(name: str, *shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Normal data, repeated where it is large: drawing it would take longer than all timings."""
    rows = max(1, min(shape[0], (1 << 20) // max(1, torch.Size(shape[1:]).numel())))
    block = normal(name, rows, *shape[1:], dtype=dtype).cuda()
    return block.repeat(-(-shape[0] // rows), *[1] * (len(shape) - 1))[: shape[0]].contiguous()


def measure(call: Callable[[], object]) -> dict[str, float]:
    """Median and minimum of a graph of calls; of plain calls where they cannot be captured."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        run, how = graph.replay, "graph"
    except Exception:
        torch.cuda.synchronize()
        run, how = (lambda: [call() for _ in range(CALLS)]), "calls"
    run()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return {"us": round(statistics.median(times), 2), "min_us": round(min(times), 2), "how": how}


def decode_cases() -> Iterator[tuple[str, Callable]]:
    """One token a sequence: Qwen3.5-27B's GDN, Kimi-Linear's KDA, the convolution, Mamba-2's step."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update
    from vllm.third_party.flash_linear_attention.ops.fused_recurrent import (
        fused_recurrent_gated_delta_rule_packed_decode as packed,
    )
    from vllm.third_party.flash_linear_attention.ops.kda import fused_recurrent_kda

    for rows in (1, 16, 64):
        slots = torch.arange(1, rows + 1, dtype=torch.int32, device="cuda")

        def gdn(rows=rows, slots=slots):
            mixed, a, b = (
                on_gpu("m", rows, 10240, dtype=BF16),
                on_gpu("a", rows, 48, dtype=BF16),
                on_gpu("b", rows, 48, dtype=BF16),
            )
            A_log, bias = on_gpu("A", 48), on_gpu("d", 48, dtype=BF16)
            state, out = on_gpu("s", rows + 1, 48, 128, 128), torch.empty(rows, 1, 48, 128, dtype=BF16, device="cuda")
            return lambda: packed(mixed, a, b, A_log, bias, 128**-0.5, state, out, slots, True)

        def kda(rows=rows, slots=slots):
            q, k, v = (on_gpu(part, rows, 32, 128, dtype=BF16)[None] for part in "qkv")
            g, beta = -on_gpu("g", rows, 32, 128)[None].abs(), on_gpu("b", rows, 32)[None].sigmoid()
            state, cu = on_gpu("s", rows + 1, 32, 128, 128), torch.arange(rows + 1, dtype=torch.int32, device="cuda")
            return lambda: fused_recurrent_kda(
                q, k, v, g, beta, 128**-0.5, state, cu_seqlens=cu, ssm_state_indices=slots
            )

        def conv(rows=rows, slots=slots):
            x, weight = on_gpu("x", rows, 10240, dtype=BF16), on_gpu("w", 10240, 4, dtype=BF16)
            state = on_gpu("s", rows + 1, 10240, 3, dtype=BF16)
            return lambda: causal_conv1d_update(x, state, weight, None, "silu", slots)

        def mamba2(rows=rows, slots=slots):
            x = on_gpu("x", rows, 128, 64, dtype=BF16)
            dt = on_gpu("t", rows, 128, dtype=BF16)[:, :, None].expand(-1, -1, 64)
            A, D, bias = (
                (-on_gpu("A", 128).exp())[:, None, None].expand(-1, 64, 128),
                on_gpu("D", 128),
                on_gpu("d", 128),
            )
            B, C = on_gpu("B", rows, 8, 128, dtype=BF16), on_gpu("C", rows, 8, 128, dtype=BF16)
            state, out = on_gpu("s", rows + 1, 128, 64, 128), torch.empty_like(x)
            wide = [t[:, None].expand(-1, 64) for t in (D, bias)]
            return lambda: selective_state_update(state, x, dt, A, B, C, *wide, None, True, slots, out=out)

        yield f"gdn_packed_decode B{rows} Hk16 Hv48 D128 bf16, state f32", gdn
        yield f"kda_decode B{rows} H32 D128 bf16, state f32", kda
        yield f"causal_conv1d_update B{rows} C10240 K4 bf16", conv
        yield f"selective_state_update B{rows} H128 P64 N128 G8 bf16, state f32", mamba2


def prefill_cases() -> Iterator[tuple[str, Callable]]:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_scan_fn
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen
    from vllm.third_party.flash_linear_attention.ops import chunk_gated_delta_rule
    from vllm.third_party.flash_linear_attention.ops.kda import chunk_kda_with_fused_gate

    def conv(tokens):
        x, weight = on_gpu("x", tokens, 10240, dtype=BF16).t(), on_gpu("w", 10240, 4, dtype=BF16)
        state, plan = on_gpu("s", 2, 10240, 3, dtype=BF16), programs([tokens])
        lists = {key: t.cuda() if isinstance(t, torch.Tensor) else t for key, t in plan.nums_dict[8].items()}
        plan.batch_ptr, plan.token_chunk_offset_ptr = lists["mlist"], lists["offsetlist"]
        plan.nums_dict = {
            8: lists | {"batch_ptr": plan.batch_ptr, "token_chunk_offset_ptr": plan.token_chunk_offset_ptr}
        }
        slot, fresh = torch.ones(1, dtype=torch.int32, device="cuda"), torch.ones(1, dtype=torch.bool, device="cuda")
        cu = starts([tokens], "cuda")
        return lambda: causal_conv1d_fn(x, weight, None, state, cu, slot, fresh, "silu", metadata=plan)

    def scan(tokens):
        u, delta = on_gpu("u", 8192, tokens, dtype=BF16), on_gpu("t", 8192, tokens, dtype=BF16)
        A, D = -on_gpu("A", 8192, 16).exp(), on_gpu("D", 8192)
        B, C, z = on_gpu("B", 1, 16, tokens, dtype=BF16), on_gpu("C", 1, 16, tokens, dtype=BF16), torch.zeros_like(u)
        state, slot = on_gpu("s", 2, 8192, 16), torch.ones(1, dtype=torch.int32, device="cuda")
        fresh, cu = torch.ones(1, dtype=torch.bool, device="cuda"), starts([tokens], "cuda")
        return lambda: selective_scan_fn(u, state, delta, A, B, C, D, z, D, True, cu, slot, fresh)

    def gdn(tokens):
        q, k = (unit(part, 64, 16, 128, dtype=BF16).cuda().repeat(tokens // 64, 1, 1)[None] for part in "qk")
        v, g = on_gpu("v", tokens, 48, 128, dtype=BF16)[None], -on_gpu("g", tokens, 48)[None].abs() / 8
        beta, state, cu = (
            on_gpu("b", tokens, 48)[None].sigmoid(),
            on_gpu("s", 1, 48, 128, 128),
            starts([tokens], "cuda"),
        )
        return lambda: chunk_gated_delta_rule(q, k, v, g, beta, 128**-0.5, state, True, cu)

    def ssd(tokens):
        x, dt = on_gpu("x", tokens, 128, 64, dtype=BF16), on_gpu("t", tokens, 128, dtype=BF16)
        A, D, bias = -on_gpu("A", 128).exp(), on_gpu("D", 128), on_gpu("d", 128)
        B, C = on_gpu("B", tokens, 8, 128, dtype=BF16), on_gpu("C", tokens, 8, 128, dtype=BF16)
        cut, ends, owner = (torch.tensor(t, dtype=torch.int32, device="cuda") for t in pieces([tokens], 256))
        state, out, cu = on_gpu("s", 1, 128, 64, 128), torch.empty_like(x), starts([tokens], "cuda")
        return lambda: mamba_chunk_scan_combined_varlen(
            x, dt, A, B, C, 256, cu, cut, ends, owner, out, D=D, dt_bias=bias, initial_states=state,
            dt_softplus=True, state_dtype=F32,
        )  # fmt: skip

    def kda(tokens):
        q, k = (unit(part, 64, 32, 128, dtype=BF16).cuda().repeat(tokens // 64, 1, 1)[None] for part in "qk")
        v, g1 = on_gpu("v", tokens, 32, 128, dtype=BF16)[None], on_gpu("g", tokens, 32, 128, dtype=BF16)[None]
        beta, state, cu = (
            on_gpu("b", tokens, 32)[None].sigmoid(),
            on_gpu("s", 1, 32, 128, 128),
            starts([tokens], "cuda"),
        )
        A_log, bias = on_gpu("A", 32), on_gpu("d", 4096)
        return lambda: chunk_kda_with_fused_gate(q, k, v, g1, beta, A_log, bias, 128**-0.5, state, True, False, cu)

    for name, make, sizes in (
        ("causal_conv1d_fwd T{} C10240 K4 bf16", conv, (1024, 8192)),
        ("selective_scan T{} dim8192 N16 bf16", scan, (2048,)),
        ("gdn_chunk_prefill T{} Hk16 Hv48 D128 bf16", gdn, (1024, 8192)),
        ("ssd_chunk_prefill T{} H128 P64 N128 G8 Q256 bf16", ssd, (1024, 8192)),
        ("kda_chunk_prefill T{} H32 D128 bf16", kda, (1024, 8192)),
    ):
        for tokens in sizes:
            yield name.format(tokens), lambda make=make, tokens=tokens: make(tokens)


def times(budget: float) -> dict[str, dict]:
    """Name of the case -> its figures, or why there are none."""
    found, begin = {}, time.monotonic()
    with torch.no_grad():
        for cases in (decode_cases, prefill_cases):
            for name, make in cases():
                if time.monotonic() - begin > budget:
                    found[name] = {"skipped": f"more than {budget:g} s were used up"}
                    continue
                try:
                    found[name] = measure(make())
                except Exception as error:
                    found[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
                    print(name, traceback.format_exc(limit=4), flush=True)
                print(name, found[name], f"after {time.monotonic() - begin:.0f} s", flush=True)
    return found
