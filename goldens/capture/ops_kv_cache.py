"""Cache goldens from vLLM's Triton store kernel, interpreted: bytes are copied, so its interpreter is exact.

python goldens/capture/ops_kv_cache.py --out goldens/ops
"""

from __future__ import annotations

import interpreted  # noqa: F401  before vLLM
import torch
from record import Record, generator, normal, run
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

# Its launch heuristics ask for the device's generation even where kernels are interpreted.
torch.cuda.get_device_capability = lambda *_: (9, 0)

TOKENS, BLOCKS = 7, 3


def pages(layout: str, size: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned [NB, BS, Hk, D] views of K and V pages in one of the layouts in use."""

    def filled(*shape: int) -> torch.Tensor:
        return torch.full(shape, -7.0, dtype=dtype)

    if layout == "halves_nb2bshd":
        return filled(BLOCKS, 2, size, heads, dim).unbind(1)
    if layout == "nhd_2d":
        return filled(BLOCKS, size, heads, 2 * dim).split(dim, -1)
    if layout == "hnd_2d":
        return filled(BLOCKS, heads, size, 2 * dim).permute(0, 2, 1, 3).split(dim, -1)
    return filled(BLOCKS, size, heads, dim), filled(BLOCKS, size, heads, dim)


def store(key, value, key_cache, value_cache, slots) -> None:
    one = torch.ones(1)
    triton_reshape_and_cache_flash(key, value, key_cache, value_cache, slots, "auto", one, one)


def kv_cache(record: Record) -> None:
    shapes = ((16, 2, 64), (4, 1, 72), (8, 3, 16))
    for layout in ("separate", "halves_nb2bshd", "nhd_2d", "hnd_2d"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for size, heads, dim in shapes if dtype == torch.bfloat16 else shapes[:1]:
                name = f"{layout}_{str(dtype)[6:]}_bs{size}_h{heads}_d{dim}"
                packed = normal(name, TOKENS, (2 * heads + 1) * dim, dtype=dtype)
                packed[0, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
                key, value = (packed[:, at : at + heads * dim].unflatten(1, (heads, dim)) for at in (0, heads * dim))
                # slots without repetition, one skipped, the last token graph padding
                slots = torch.randperm(BLOCKS * size, generator=generator("slots" + name))[: TOKENS - 1]
                slots[2] = -1
                caches = pages(layout, size, heads, dim, dtype)
                before = [cache.clone() for cache in caches]
                with record.attempt(name):
                    store(key, value, *caches, slots)
                    record.case("reshape_and_cache", name, "triton_reshape_and_cache_flash, interpreted", {},
                                {"key": key, "value": value, "key_cache": before[0], "value_cache": before[1],
                                 "slot_mapping": slots},
                                {"key_cache": caches[0], "value_cache": caches[1]})  # fmt: skip
    key, value = normal("kx", TOKENS, 2, 64, dtype=torch.bfloat16), normal("vx", TOKENS, 2, 64, dtype=torch.bfloat16)
    caches = [torch.full((BLOCKS, 2, 8, 16, 8), -7.0), torch.full((BLOCKS, 2, 64, 16), -9.0)]
    caches = [cache.to(torch.bfloat16) for cache in caches]
    before, slots = [cache.clone() for cache in caches], torch.tensor([5, 47, -1, 17, 0, 32])
    with record.attempt("x-packed"):
        store(key, value, *caches, slots)
        record.case("reshape_and_cache_xpacked", "bfloat16", "triton_reshape_and_cache_flash, interpreted", {},
                    {"key": key, "value": value, "key_cache": before[0], "value_cache": before[1],
                     "slot_mapping": slots}, {"key_cache": caches[0], "value_cache": caches[1]})  # fmt: skip


if __name__ == "__main__":
    run("kv_cache", __file__, kv_cache)
