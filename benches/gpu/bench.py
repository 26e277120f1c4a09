"""What one GPU bench is: a shape of an op, our call and the peers' calls, and what the hardware must do for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Prepare = Callable[[], Callable[[], object]]
"""Allocates on the device and returns the call to time, which takes nothing and allocates nothing."""

TOKENS = (1, 16, 256, 8192)
"""One token, a small batch, a large one, a long prompt."""
HIDDEN, INTERMEDIATE, VOCABULARY = 5120, 17408, 151936
"""Widths of Qwen3 32B and Qwen3.5."""
OTHER_HIDDEN = (2048, 2880, 4096, 7168)
"""Hidden widths of other models."""


@dataclass(frozen=True)
class Bench:
    """One shape of one op of a family.

    ours: prepares our call. peers: by name ("torch", "vllm", …) what prepares the same computation there; one that
    raises ImportError, AttributeError or NotImplementedError is left out. others: other ways of our own to the same
    result, e.g. op by op. bytes: each input read once, each output
    written once. flops: multiply-adds count two; unit: which peak they are measured against, "float32" or
    "bfloat16 tensor cores".
    """

    family: str
    name: str
    ours: Prepare
    peers: Mapping[str, Prepare] = field(default_factory=dict)
    others: Mapping[str, Prepare] = field(default_factory=dict, kw_only=True)
    bytes: int = 0
    flops: int = 0
    unit: str = "float32"

    @property
    def calls(self) -> int:
        """Calls in one graph: enough that a replay takes a millisecond or so."""
        return 10 if self.bytes > 1 << 26 else 50
