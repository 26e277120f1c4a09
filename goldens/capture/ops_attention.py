"""Attention goldens from vLLM's CPU build: its paged attention kernel, and Triton kernels, interpreted.

    python goldens/capture/ops_attention.py --out goldens/ops

The CPU kernel packs keys and values for the instruction set in use; the goldens hold plain [NB, BS, Hk, D] caches.
"""

from __future__ import annotations

import interpreted  # noqa: F401  before vLLM
import torch
import vllm._custom_ops  # noqa: F401  registers torch.ops._C
from ops_cuda_attention import CASES, batch, mask_name, requests
from record import Record, normal, run
from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

BF16, F32 = torch.bfloat16, torch.float32
PAGE = 32


def in_use(inputs: dict) -> dict:
    """The same caches without the blocks that no request has, their order kept: half of the bytes."""
    table = inputs["block_table"]
    used = sorted(
        {int(table[row, at]) for row, n in enumerate(inputs["seq_lens"].tolist()) for at in range(-(-n // PAGE))}
    )
    place = {block: at for at, block in enumerate(used)}
    fewer = table.clone().apply_(lambda block: place.get(block, 0))
    caches = {name: inputs[name][used].contiguous() for name in ("k_cache", "v_cache")}
    return {**inputs, **caches, "block_table": fewer}


def slots_of(inputs: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(slot of every key in use, keys, values) of plain caches."""
    slots = []
    for row, length in enumerate(inputs["seq_lens"].tolist()):
        for at in range(length):
            slots.append(int(inputs["block_table"][row, at // PAGE]) * PAGE + at % PAGE)
    index = torch.tensor(slots)
    flat = [inputs[name].flatten(0, 1)[index].contiguous() for name in ("k_cache", "v_cache")]
    return index, *flat


def cpu_kernel(inputs: dict, scale: float, causal: bool, width: int, softcap: float, sinks, slopes) -> torch.Tensor:
    """torch.ops._C.cpu_attention_with_kv_cache over a cache in its own packing; `width` counts the token itself."""
    c, isa = torch.ops._C, "vec"
    q, lens, starts = inputs["q"], inputs["seq_lens"], inputs["query_start_loc"]
    blocks, _, kv_heads, dim = inputs["k_cache"].shape
    keys, values = torch.zeros(blocks, kv_heads, 2 * PAGE, dim, dtype=q.dtype).chunk(2, dim=2)
    index, k, v = slots_of(inputs)
    c.cpu_attn_reshape_and_cache(k, v, keys, values, index, isa, 1.0, 1.0, "auto")
    plan = c.get_scheduler_metadata(
        len(lens), q.shape[1], kv_heads, dim, lens, q.dtype, starts, causal, width, isa, False, None
    )
    out = torch.zeros_like(q)
    c.cpu_attention_with_kv_cache(
        q, keys, values, out, starts, lens, scale, causal, slopes, width, inputs["block_table"], softcap, plan, sinks,
        None, 1.0, 1.0, "auto",
    )  # fmt: skip
    return out


def paged(record: Record) -> None:
    for kind, heads, dim, size, mask in CASES:
        if size != 16:
            continue  # the CPU kernel has one page size here
        large = dim == 96 or (dim == 128 and "softcap" in mask) or heads == (8, 8)
        for dtype in (BF16,) if large else (F32, BF16):  # float32 has the same masks over less
            shape = f"{str(dtype)[6:]}_{kind}_h{heads[0]}_{heads[1]}_d{dim}_bs{PAGE}"
            name = f"{shape}_{mask_name(mask)}"
            inputs = in_use(batch(shape, kind, heads, dim, PAGE, dtype))
            sinks = normal("sinks" + shape, heads[0], dtype=BF16) if mask.get("sinks") else None
            slopes = torch.tensor([2.0 ** -(i + 1) for i in range(heads[0])]) if mask.get("alibi_slopes") else None
            extra = {"sinks": None if sinks is None else sinks.to(F32), "alibi_slopes": slopes}
            scale, causal, softcap = dim**-0.5, mask.get("causal", True), mask.get("softcap", 0.0)
            window = mask.get("window")
            call = {"scale": scale, "causal": causal, "window": window and list(window), "softcap": softcap}
            with record.attempt(f"cpu {name}"):
                out = cpu_kernel(inputs, scale, causal, -1 if window is None else window[0] + 1, softcap, sinks, slopes)
                record.case("paged_attention", name, "torch.ops._C.cpu_attention_with_kv_cache", call,
                            {**inputs, **extra}, {"out": out})  # fmt: skip
            if dtype == BF16 or dim > 64 or kind != "mixed" or (window and not causal):
                continue  # a non-causal window: Triton zeroes values by their distance from its block's first query
            with record.attempt(f"triton {name}"):
                new, total = requests(kind)
                out = torch.zeros_like(inputs["q"])
                unified_attention(
                    inputs["q"], inputs["k_cache"], inputs["v_cache"], out, inputs["query_start_loc"], max(new),
                    inputs["seq_lens"], max(total), scale, causal, tuple(window or (-1, -1)), inputs["block_table"],
                    softcap, None, None, None, alibi_slopes=slopes, sinks=extra["sinks"],
                )  # fmt: skip
                record.case("paged_attention", f"{name}_triton", "unified_attention (Triton, interpreted)",
                            call, {**inputs, **extra}, {"out": out})  # fmt: skip


def merged(record: Record) -> None:
    for dim in (64, 80):
        outs = [normal(f"{side}{dim}", 7, 4, dim) for side in ("prefix", "suffix")]
        lses = [normal(f"lse{side}{dim}", 4, 7, scale=4.0) for side in ("prefix", "suffix")]
        lses[0][:, 2], lses[1][:, 3] = -torch.inf, -torch.inf
        lses[0][:, 4] = torch.inf
        lses[0][0, 5], lses[1][0, 5] = 120.0, -120.0
        lses[0][:, 6], lses[1][:, 6] = -torch.inf, -torch.inf
        with record.attempt(f"merge {dim}"):
            out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
            merge_attn_states(out, outs[0], lses[0], outs[1], lses[1], lse)
            record.case("merge_attn_states", f"float32_d{dim}", "merge_attn_states (Triton, interpreted)",
                        {"empty": "zeros"},
                        {"prefix_out": outs[0], "prefix_lse": lses[0], "suffix_out": outs[1],
                         "suffix_lse": lses[1]}, {"out": out, "lse": lse})  # fmt: skip


def attention(record: Record) -> None:
    paged(record)
    merged(record)


if __name__ == "__main__":
    run("attention", __file__, attention)
