"""Goldens of quantised KV caches: vLLM's Triton kernels that write them and its attention that reads them, interpreted.

python goldens/capture/ops_kv_quant.py --out goldens/ops

Attention over a single key returns its value, which is how a dequantised value is got out of the kernel.
"""

from __future__ import annotations

import exact_fp8  # noqa: F401  (first: it switches Triton on)
import torch
from record import Record, generator, normal, run
from vllm.platforms import current_platform
from vllm.v1.attention.ops import int4_per_token_head as int4
from vllm.v1.attention.ops import rocm_aiter_mla_sparse as indexer
from vllm.v1.attention.ops import triton_reshape_and_cache_flash as store
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.kv_cache_interface import KVQuantMode

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
BLOCKS, SIZE, HEADS = 6, 16, 2
SLOTS = torch.tensor([3, 17, -1, 64, 95, 0, 33])
SCALES = torch.tensor([0.0321]), torch.tensor([0.37])


def keys(name: str, dtype: torch.dtype, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values; one row of zeros, one constant, one that saturates under the static scales."""
    key, value = (normal(f"{name}{part}", len(SLOTS), HEADS, width, dtype=dtype, scale=2) for part in "kv")
    key[0, 0], value[1, 1] = 0, 0.75
    key[3] *= 40
    return key, value


def byte(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == E4M3 else tensor


def static(record: Record) -> None:
    store._is_supported_kv_cache_dtype = lambda kind: True  # asks for a GPU
    torch.cuda.get_device_capability = lambda device: (9, 0)
    for dtype in (F32, BF16):
        key, value = keys("fp8", dtype, 8)
        key, value = key.to(F32), value.to(F32)  # exact; the interpreter divides no bfloat16
        name = f"{str(dtype)[6:]}_values"
        caches = [torch.zeros(BLOCKS, SIZE, HEADS, 8, dtype=torch.uint8) for _ in "kv"]
        before = [cache.clone() for cache in caches]
        with record.attempt(f"reshape_and_cache_fp8 {name}"):
            store.triton_reshape_and_cache_flash(key, value, *caches, SLOTS, "fp8", *SCALES)
            record.case("reshape_and_cache_fp8", name, "triton_reshape_and_cache_flash (interpreted)", {"kind": "fp8"},
                        {"key": key, "value": value, "key_cache": before[0], "value_cache": before[1],
                         "slot_mapping": SLOTS, "k_scale": SCALES[0], "v_scale": SCALES[1]},
                        {"key_cache": caches[0], "value_cache": caches[1]})  # fmt: skip


def a_head(record: Record, kind: str, dtype: torch.dtype, call, caches: list[torch.Tensor], key, value) -> None:
    """One write with scales a head; the caches are read afterwards."""
    op = "reshape_and_cache_int4" if kind == "int4" else "reshape_and_cache_per_token_head"
    name = f"{kind}_{str(dtype)[6:]}"
    scales = [torch.ones(BLOCKS, SIZE, HEADS) for _ in "kv"]
    before = [tensor.clone() for tensor in (*caches, *scales)]
    names = "key_cache", "value_cache", "k_scale_cache", "v_scale_cache"
    with record.attempt(f"{op} {name}"):
        call(caches, scales)
        record.case(op, name, f"{store.__name__.split('.')[-1] if kind != 'int4' else 'int4_per_token_head'} "
                    "(interpreted)", {}, {"key": key, "value": value, "slot_mapping": SLOTS,
                                          **{n: byte(t) for n, t in zip(names, before)}},
                    {n: byte(t) for n, t in zip(names, (*caches, *scales))})  # fmt: skip


def per_token_head(record: Record) -> None:
    for dtype in (F32, BF16):
        for kind, stored in (("int8", torch.int8), ("fp8", E4M3)):
            key, value = keys(kind, dtype, 16)
            caches = [torch.zeros(BLOCKS, SIZE, HEADS, 16, dtype=torch.int8).view(stored) for _ in "kv"]
            mode = KVQuantMode.INT8_PER_TOKEN_HEAD if kind == "int8" else KVQuantMode.FP8_PER_TOKEN_HEAD

            def call(caches, scales, key=key, value=value, mode=mode):
                store.triton_reshape_and_cache_flash_per_token_head_quant(key, value, *caches, *scales, SLOTS, mode)

            a_head(record, kind, dtype, call, caches, key, value)


def rotations(record: Record) -> None:
    for width in (16, 64, 256):
        for inverse in (False, True):
            x = normal(f"rht{width}", 5, width)
            with record.attempt(f"rht {width}"):
                out = int4.single_rht(x, inverse=inverse)
                record.case("rht", f"{width}{'_inverse' * inverse}", "single_rht", {"inverse": inverse}, {"x": x},
                            {"out": out / width if inverse else out})  # fmt: skip
    for dtype in (F32, BF16):
        key, value = keys("int4", dtype, 32)
        rotated = [int4.single_rht(part.float()).to(dtype) for part in (key, value)]
        caches = [torch.zeros(BLOCKS, SIZE, HEADS, 16, dtype=torch.uint8) for _ in "kv"]

        def call(caches, scales, key=key, value=value):
            int4.reshape_and_cache_int4(key, value, *caches, SLOTS, k_scale_cache=scales[0], v_scale_cache=scales[1])

        a_head(record, "int4", dtype, call, caches, *rotated)


def reads(record: Record) -> None:
    """Requests of one key each, the first of every block."""
    cache = torch.randint(-128, 128, (BLOCKS, SIZE, HEADS, 16), generator=generator("codes")).to(torch.int8)
    finite = torch.where((cache & 0x7F) == 0x7F, 5, cache)
    scales = torch.rand(BLOCKS, SIZE, HEADS, generator=generator("scales")) * 0.04 + 0.01
    every = {"cu_seqlens_q": torch.arange(BLOCKS + 1, dtype=torch.int32), "max_seqlen_q": 1, "max_seqlen_k": 1,
             "seqused_k": torch.ones(BLOCKS, dtype=torch.int32), "softmax_scale": 0.25, "window_size": (-1, -1),
             "block_table": torch.arange(BLOCKS, dtype=torch.int32)[:, None], "softcap": 0.0}  # fmt: skip
    forms = {
        "int8": (cache, KVQuantMode.INT8_PER_TOKEN_HEAD, scales),
        "fp8": (finite.view(E4M3), KVQuantMode.FP8_PER_TOKEN_HEAD, scales),
        "tensor": (finite.view(E4M3), KVQuantMode.FP8_PER_TENSOR, None),
    }
    where, single = "unified_attention over one key (interpreted)", {"out_dtype": "float32"}
    for kind, (codes, mode, each) in forms.items():
        out = torch.empty(BLOCKS, HEADS, 16)
        descale = SCALES[1].expand(BLOCKS, HEADS)
        with record.attempt(f"read {kind}"):
            unified_attention(normal("q", BLOCKS, HEADS, 16), codes, codes, out, causal=True, q_descale=None,
                              k_descale=descale, v_descale=descale, kv_quant_mode=mode, k_scale_cache=each,
                              v_scale_cache=each, **every)  # fmt: skip
            if each is None:
                record.case("dequantize_kv_fp8", "tensor", where, single,
                            {"cache": byte(codes)[:, 0], "scale": SCALES[1]}, {"out": out})  # fmt: skip
            else:
                record.case("dequantize_kv_heads", kind, where, single,
                            {"cache": byte(codes)[:, 0], "scale_cache": each[:, 0]}, {"out": out})  # fmt: skip
    packed = cache[..., :8].contiguous().view(torch.uint8)
    int4.single_rht = lambda x, inverse=False: x * x.shape[-1] if inverse else x  # leaves the rotation out
    with record.attempt("read int4"):
        out = torch.empty(BLOCKS, HEADS, 16)
        int4.unified_attention_int4(normal("q", BLOCKS, HEADS, 16), packed, packed, out, sinks=None, alibi_slopes=None,
                                    use_alibi_sqrt=False, qq_bias=None, output_scale=None, mm_prefix_range=None,
                                    k_scale_cache=scales, v_scale_cache=scales, **every)  # fmt: skip
        record.case("dequantize_kv_int4", "one", "unified_attention_int4 over one key, not rotated (interpreted)",
                    single, {"cache": packed[:, 0], "scale_cache": scales[:, 0]}, {"out": out})  # fmt: skip


def attention(record: Record) -> None:
    """Attention over codes, kept as a case of attention over their values."""
    table = torch.tensor([[3, 0], [5, 1], [2, 4]], dtype=torch.int32)
    q, start = normal("query", 6, 4, 16), torch.tensor([0, 1, 4, 6], dtype=torch.int32)
    lengths = torch.tensor([5, 21, 32], dtype=torch.int32)
    codes = [
        torch.randint(-100, 100, (BLOCKS, SIZE, HEADS, 16), generator=generator(part)).to(torch.int8) for part in "kv"
    ]
    scales = [torch.rand(BLOCKS, SIZE, HEADS, generator=generator(f"s{part}")) * 0.04 + 0.01 for part in "kv"]
    call = {"scale": 0.25, "causal": True}
    for kind in ("int8", "fp8", "tensor"):
        caches = [c if kind == "int8" else torch.where((c & 0x7F) < 0x50, c, c & 0x4F).view(E4M3) for c in codes]
        mode = {"int8": KVQuantMode.INT8_PER_TOKEN_HEAD, "fp8": KVQuantMode.FP8_PER_TOKEN_HEAD,
                "tensor": KVQuantMode.FP8_PER_TENSOR}[kind]  # fmt: skip
        by = SCALES if kind == "tensor" else [s[..., None] for s in scales]
        out, descale = torch.empty_like(q), [s.expand(3, HEADS) for s in SCALES]
        with record.attempt(f"paged_attention {kind}"):
            unified_attention(q, *caches, out, start, 3, lengths, 32, 0.25, True, (-1, -1), table, 0.0, None, *descale,
                              kv_quant_mode=mode, k_scale_cache=None if kind == "tensor" else scales[0],
                              v_scale_cache=None if kind == "tensor" else scales[1])  # fmt: skip
            k, v = (c.float() * s for c, s in zip(caches, by))
            record.case("paged_attention", f"over_{kind}", "unified_attention over codes (interpreted)", call,
                        {"q": q, "k_cache": k, "v_cache": v, "block_table": table, "seq_lens": lengths,
                         "query_start_loc": start}, {"out": out})  # fmt: skip


def indexer_keys(record: Record) -> None:
    current_platform.fp8_dtype = lambda: E4M3
    slots, table = torch.tensor([4, 0, -1, 2, 6]), torch.tensor([[4, 0, 2], [6, 2, 9]], dtype=torch.int32)
    for dtype in (F32, BF16):
        k = normal(f"index{dtype}", 5, 128, dtype=dtype, scale=3)
        k[1] = 0
        for ue8m0 in (False, True):
            name = f"{str(dtype)[6:]}{'_ue8m0' * ue8m0}"
            cache = torch.zeros(7, 1, 132, dtype=torch.uint8)
            before = cache.clone()
            with record.attempt(f"indexer_k_quant_and_cache {name}"):
                indexer.indexer_k_quant_and_cache_triton(k, cache, slots, 128, "ue8m0" if ue8m0 else "")
                record.case("indexer_k_quant_and_cache", name, "indexer_k_quant_and_cache_triton (interpreted)",
                            {"ue8m0": ue8m0}, {"k": k, "kv_cache": before, "slot_mapping": slots},
                            {"kv_cache": cache})  # fmt: skip
    bounds, of = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32)
    keys, scale = torch.zeros(5, 128, dtype=torch.uint8), torch.zeros(5)
    with record.attempt("cp_gather_indexer_k_quant_cache"):
        indexer.cp_gather_indexer_k_quant_cache_triton(cache, keys.view(E4M3), scale, table, bounds, of)
        record.case("cp_gather_indexer_k_quant_cache", "two_requests",
                    "cp_gather_indexer_k_quant_cache_triton (interpreted)", {},
                    {"kv_cache": cache, "dst_k": torch.zeros_like(keys), "dst_scale": torch.zeros(5),
                     "block_table": table, "cu_seq_lens": bounds}, {"dst_k": keys, "dst_scale": scale})  # fmt: skip


def capture(record: Record) -> None:
    for part in (static, per_token_head, rotations, attention, reads, indexer_keys):
        part(record)


if __name__ == "__main__":
    run("kv_quant", __file__, capture)
