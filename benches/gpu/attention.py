"""Attention over pages of 16: decode steps and prompts of 32 query and 8 key heads of 128; partial results merged."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_empty, torch_normal, vllm_ops
from .bench import Bench

HQ, HK, D, PAGE = 32, 8, 128, 16


def benches() -> Iterator[Bench]:
    for batch in (1, 16, 64):
        for keys in (1024, 4096, 16384):
            yield paged(f"decode {batch}x{keys}", (1,) * batch, keys)
    yield paged("decode 64x2048", (1,) * 64, 2048)
    yield paged("decode 16x4096 window 1024", (1,) * 16, 4096, window=(1023, 0))
    yield paged("prefill 1x1024", (1024,), 1024)
    yield paged("prefill 1x2048", (2048,), 2048)
    yield paged("prefill 4x512", (512,) * 4, 512)
    yield paged("mixed 1x512 + 15 decode x2048", (512,) + (1,) * 15, 2048)
    for T, H, width in ((16, 32, 128), (8192, 32, 128), (8192, 128, 128)):
        yield merged(T, H, width)


def metadata(new: tuple[int, ...], keys: int) -> dict[str, np.ndarray]:
    """Pages dealt at random to requests of `keys` keys each."""
    used = keys // PAGE
    table = np.random.Generator(np.random.PCG64(0)).permutation(len(new) * used).reshape(len(new), used)
    return {
        "block_table": table.astype(np.int32), "seq_lens": np.full(len(new), keys, np.int32),
        "query_start_loc": np.cumsum([0, *new]).astype(np.int32),
    }  # fmt: skip


def paged(name: str, new: tuple[int, ...], keys: int, window: tuple[int, int] | None = None) -> Bench:
    T, host, cache = sum(new), metadata(new, keys), (len(new) * keys // PAGE, PAGE, HK, D)

    def flash(version: int):
        def prepare():
            import torch
            from vllm.vllm_flash_attn import flash_attn_varlen_func

            q, k, v, out = torch_normal(T, HQ, D), torch_normal(*cache), torch_normal(*cache), torch_empty(T, HQ, D)
            on = {name: torch.from_numpy(value).cuda() for name, value in host.items()}
            return lambda: flash_attn_varlen_func(
                q, k, v, max_seqlen_q=max(new), cu_seqlens_q=on["query_start_loc"], max_seqlen_k=keys,
                seqused_k=on["seq_lens"], block_table=on["block_table"], softmax_scale=D**-0.5, causal=True,
                window_size=None if window is None else list(window), out=out, fa_version=version,
            )  # fmt: skip

        return prepare

    def make():
        import cupy

        arrays = [cupy.asarray(value) for value in host.values()]
        q, k, v = cupy_normal(T, HQ, D), cupy_normal(*cache), cupy_normal(*cache)
        return (q, k, v, *arrays), {"scale": D**-0.5, "window": window}, cupy_empty(T, HQ, D)

    seen = sum(min(keys - L + i + 1, keys if window is None else window[0] + 1) for L in new for i in range(L))
    read = sum(min(keys, keys if window is None else window[0] + L) for L in new)
    moved, flops = 4 * read * HK * D + 4 * T * HQ * D, 4 * HQ * D * seen
    peers = {"flash-attention 3": flash(3), "flash-attention 2": flash(2)}
    return Bench("attention", f"paged_attention {name}", ours("paged_attention", make), peers, moved, flops)


def merged(T: int, H: int, width: int) -> Bench:
    def vllm():
        out, lse = torch_empty(T, H, width), torch_empty(H, T, dtype="float32")
        sides = [torch_normal(T, H, width), torch_normal(H, T, dtype="float32"),
                 torch_normal(T, H, width), torch_normal(H, T, dtype="float32")]  # fmt: skip
        call = vllm_ops().merge_attn_states
        return lambda: call(out, lse, *sides, None, None)

    def make():
        sides = cupy_normal(T, H, width), cupy_normal(H, T, dtype=F32)
        others = cupy_normal(T, H, width, seed=1), cupy_normal(H, T, dtype=F32, seed=1)
        return (*sides, *others), {}, (cupy_empty(T, H, width), cupy_empty(H, T, dtype=F32))

    name, moved = f"merge_attn_states {T}x{H}x{width}", 6 * T * H * width + 12 * T * H
    return Bench("attention", name, ours("merge_attn_states", make), {"vllm": vllm}, moved, 3 * T * H * width)
