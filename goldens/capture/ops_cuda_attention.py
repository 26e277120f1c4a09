"""Attention goldens from vLLM's CUDA build: FlashAttention 2 and 3, Triton unified attention, merging of states.

Imported by ops_cuda.py. All calls go over the same paged caches [NB, BS, Hk, D]; a case's name ends in its kernel.
Unused page tails are zero here: FlashAttention multiplies masked values by a zero probability.
"""

from __future__ import annotations

import torch
from record import Record, generator, normal

BF16, F32 = torch.bfloat16, torch.float32


def requests(kind: str) -> tuple[list[int], list[int]]:
    """(query lengths, sequence lengths) of one batch."""
    return {
        "mixed": ([1, 7, 0, 40], [5, 33, 0, 71]),
        "decode": ([1, 1, 1, 1], [1, 16, 17, 90]),
        "prefill": ([3, 18], [3, 18]),
    }[kind]


def batch(name: str, kind: str, heads: tuple[int, int], dim: int, size: int, dtype: torch.dtype = BF16) -> dict:
    """Arguments of paged_attention but the mask: shuffled pages, garbage in the unused table entries."""
    new, total = requests(kind)
    pages = [-(-length // size) for length in total]
    blocks = sum(pages) + 2
    order = torch.randperm(blocks, generator=generator("pages" + name)).tolist()
    table = torch.full((len(new), max(pages) + 1), blocks - 1, dtype=torch.int32)
    k_cache = torch.zeros(blocks, size, heads[1], dim, dtype=dtype)
    v_cache = torch.zeros_like(k_cache)
    for row, (count, length) in enumerate(zip(pages, total)):
        mine = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(mine, dtype=torch.int32)
        for part, cache in (("k", k_cache), ("v", v_cache)):
            data = normal(f"{part}{row}{name}", length, heads[1], dim, dtype=dtype)
            for at in range(0, length, size):
                cache[mine[at // size], : min(size, length - at)] = data[at : at + size]
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    return {"q": normal("q" + name, sum(new), heads[0], dim, dtype=dtype), "k_cache": k_cache, "v_cache": v_cache,
            "block_table": table, "seq_lens": torch.tensor(total, dtype=torch.int32),
            "query_start_loc": starts}  # fmt: skip


CASES: tuple[tuple[str, tuple[int, int], int, int, dict], ...] = (
    ("mixed", (4, 2), 64, 16, {}),
    ("mixed", (4, 2), 128, 16, {}),
    ("mixed", (4, 1), 256, 16, {}),
    ("mixed", (4, 2), 96, 16, {}),
    ("mixed", (4, 2), 64, 16, {"causal": False}),
    ("mixed", (4, 2), 64, 16, {"window": (7, 0)}),
    ("mixed", (4, 2), 64, 16, {"causal": False, "window": (7, 7)}),
    ("mixed", (4, 2), 128, 16, {"softcap": 30.0}),
    ("mixed", (4, 2), 64, 16, {"sinks": True}),
    ("mixed", (4, 2), 64, 16, {"sinks": True, "window": (7, 0)}),
    ("mixed", (4, 2), 128, 16, {"softcap": 50.0, "window": (19, 0)}),
    ("mixed", (4, 2), 64, 16, {"alibi_slopes": True}),
    ("decode", (8, 2), 128, 16, {}),
    ("decode", (8, 2), 128, 64, {}),
    ("decode", (8, 8), 64, 16, {"window": (15, 0)}),
    ("prefill", (4, 4), 80, 16, {}),
    ("prefill", (6, 2), 192, 16, {"softcap": 30.0}),
)


def mask_name(mask: dict) -> str:
    words = {
        "causal": "full",
        "window": "window{0[0]}",
        "softcap": "cap{0:g}",
        "sinks": "sinks",
        "alibi_slopes": "alibi",
    }
    return "_".join(words[key].format(value) for key, value in mask.items()) or "causal"


def attention(record: Record) -> None:
    for kind, heads, dim, size, mask in CASES:
        shape = f"{kind}_h{heads[0]}_{heads[1]}_d{dim}_bs{size}"
        inputs = batch(shape, kind, heads, dim, size)
        q, seq_lens = inputs["q"].cuda(), inputs["seq_lens"].cuda()
        kc, vc, table = inputs["k_cache"].cuda(), inputs["v_cache"].cuda(), inputs["block_table"].cuda()
        starts = inputs["query_start_loc"].cuda()
        new, total = requests(kind)
        sinks = normal("sinks" + shape, heads[0], dtype=BF16) if mask.get("sinks") else None
        slopes = torch.tensor([2.0 ** -(i + 1) for i in range(heads[0])]) if mask.get("alibi_slopes") else None
        extra = {"sinks": None if sinks is None else sinks.to(F32), "alibi_slopes": slopes}
        scale, softcap, window = dim**-0.5, mask.get("softcap", 0.0), mask.get("window")
        causal = mask.get("causal", True)
        call = {
            "scale": scale,
            "causal": causal,
            "window": None if window is None else list(window),
            "softcap": softcap,
        }
        for version in (2, 3):
            name = f"{shape}_{mask_name(mask)}_fa{version}"
            with record.attempt(name):
                from vllm.vllm_flash_attn import flash_attn_varlen_func

                out, lse = flash_attn_varlen_func(
                    q, kc, vc, max(new), starts, max(total), seqused_k=seq_lens, softmax_scale=scale, causal=causal,
                    window_size=list(window or (-1, -1)), softcap=softcap, block_table=table, return_softmax_lse=True,
                    alibi_slopes=None if slopes is None else slopes.cuda(), fa_version=version,
                    s_aux=None if sinks is None else sinks.cuda(),
                )  # fmt: skip
                record.case("paged_attention", name, f"vllm_flash_attn.flash_attn_varlen_func(fa_version={version})",
                            {**call, "return_lse": True}, {**inputs, **extra}, {"out": out, "lse": lse})  # fmt: skip
        if window is not None and not causal:
            continue  # the Triton kernel zeroes values by their distance from the first query of its block
        name = f"{shape}_{mask_name(mask)}_triton"
        with record.attempt(name):
            from vllm.v1.attention.ops.triton_unified_attention import unified_attention

            out = torch.zeros_like(q)
            unified_attention(
                q, kc, vc, out, starts, max(new), seq_lens, max(total), scale, causal, tuple(window or (-1, -1)), table,
                softcap, None, None, None, alibi_slopes=None if slopes is None else slopes.cuda(),
                sinks=None if sinks is None else sinks.cuda(),
            )  # fmt: skip
            record.case("paged_attention", name, "vllm.v1.attention.ops.triton_unified_attention.unified_attention",
                        call, {**inputs, **extra}, {"out": out})  # fmt: skip
    merge(record)


def merge(record: Record) -> None:
    """merge_attn_states, with rows where one or both sides saw no key."""
    for dim, dtype in ((64, BF16), (128, BF16), (80, BF16), (64, F32)):
        name = f"{str(dtype)[6:]}_d{dim}"
        outs = [normal(side + name, 9, 4, dim, dtype=dtype) for side in ("prefix", "suffix")]
        lses = [normal("lse" + side + name, 4, 9, scale=4.0) for side in ("prefix", "suffix")]
        lses[0][:, 2], lses[1][:, 3] = -torch.inf, -torch.inf
        lses[0][:, 4], lses[1][:, 4] = -torch.inf, -torch.inf
        lses[0][:, 5] = torch.inf
        lses[0][0, 6], lses[1][0, 6] = 120.0, -120.0
        with record.attempt(f"merge {name}"):
            po, so, pl, sl = (t.cuda() for t in (*outs, *lses))
            out, lse = torch.empty_like(po), torch.empty_like(pl)
            torch.ops._C.merge_attn_states(out, lse, po, pl, so, sl, None, None)
            record.case("merge_attn_states", name, "torch.ops._C.merge_attn_states", {},
                        {"prefix_out": outs[0], "prefix_lse": lses[0],
                         "suffix_out": outs[1], "suffix_lse": lses[1]},
                        {"out": out, "lse": lse})  # fmt: skip
