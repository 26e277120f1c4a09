"""Bytes of a page of the KV cache in each quantised format, and the views of what lies in it."""

from __future__ import annotations

import numpy as np

from .errors import ContractError

_HEAD_BITS = {"fp8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8, "int8_per_token_head": 8, "fp8_per_token_head": 8,
              "int4_per_token_head": 4, "bfloat16": 16, "float16": 16, "float32": 32}  # fmt: skip
_FOUR_BIT_BLOCK = 16
"""Elements of NVFP4 that are 8 bytes of codes and one of a scale."""
_TOKEN_BYTES = {"fp8_ds_mla": 656, "indexer": 132}
_SCALE = 4


def page_bytes(kind: str, block_size: int, num_heads: int = 1, head_size: int = 1, align: int = 1) -> int:
    """Bytes of `block_size` tokens' keys and values, with the scales that lie beside them, up to a multiple of align.

    "fp8_ds_mla" and "indexer" store one entry of their own size a token, whatever the heads.
    """
    sizes = {"block_size": block_size, "num_heads": num_heads, "head_size": head_size, "align": align}
    for name, value in sizes.items():
        if value < 1:
            raise ContractError("page_bytes", name, value, ">= 1")
    if kind in _TOKEN_BYTES:
        size = block_size * _TOKEN_BYTES[kind]
    elif kind == "nvfp4":
        if head_size % _FOUR_BIT_BLOCK:
            raise ContractError("page_bytes", "head_size", head_size, f"a multiple of {_FOUR_BIT_BLOCK}")
        size = 2 * block_size * num_heads * (head_size // _FOUR_BIT_BLOCK * 9)
    elif kind in _HEAD_BITS:
        if head_size * _HEAD_BITS[kind] % 8:
            raise ContractError("page_bytes", "head_size", head_size, f"whole bytes in {kind}")
        row = head_size * _HEAD_BITS[kind] // 8 + (_SCALE if kind.endswith("per_token_head") else 0)
        size = 2 * block_size * num_heads * row
    else:
        raise ContractError(
            "page_bytes", "kind", repr(kind), "one of " + ", ".join([*_HEAD_BITS, "nvfp4", *_TOKEN_BYTES])
        )
    return -(-size // align) * align


def views_of_heads(pages: np.ndarray, dtype=np.uint8) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(key cache, value cache, key scales, value scales) of pages uint8 [NB, H, BS, 2 * (D + 4)], on their memory.

    A row of a page is a key's D bytes, its float32 scale, a value's D bytes, its scale. Caches are [NB, BS, H, D] of
    `dtype` (one byte an element), scales [NB, BS, H].
    """
    width = pages.shape[-1]
    if pages.ndim != 4 or pages.dtype != np.uint8 or width % 8 or width <= 2 * _SCALE:
        raise ContractError("views_of_heads", "pages", f"{pages.dtype} {pages.shape}", "uint8 [NB, H, BS, 2 * (D + 4)]")
    half, rows = width // 2, pages.swapaxes(1, 2)
    parts = [rows[..., start : start + half] for start in (0, half)]
    caches = [part[..., : half - _SCALE].view(dtype) for part in parts]
    scales = [part[..., half - _SCALE :].view(np.float32)[..., 0] for part in parts]
    return caches[0], caches[1], scales[0], scales[1]
