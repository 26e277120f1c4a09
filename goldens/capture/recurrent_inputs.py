"""What the captures of the recurrent families share: varlen starts, unit keys, states behind vLLM's null slot."""

from __future__ import annotations

import torch
from record import normal

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHORT = {BF16: "bf16", F16: "f16", F32: "f32"}


def starts(lengths: list[int], device: str = "cpu", dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype, device=device)


def unit(name: str, *shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Normal rows divided by their length, rounded once."""
    x = normal(name, *shape)
    return (x / x.norm(dim=-1, keepdim=True)).to(dtype)


def cache(name: str, slots: int, *shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """States of slots 0 ... slots; slot 0 is vLLM's null slot, which vtlab does not have: vtlab's slot s is s + 1."""
    return normal(name, slots + 1, *shape, scale=0.5, dtype=dtype)


def index(*slots: int) -> torch.Tensor:
    """vLLM's state indices: 0 and below are null."""
    return torch.tensor(slots, dtype=torch.int32)


def shifted(indices: torch.Tensor) -> torch.Tensor:
    """vtlab's state indices: below 0 is null."""
    return indices - 1
