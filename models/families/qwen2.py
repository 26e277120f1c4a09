"""Qwen2 and 2.5: biases on q, k and v and on nothing else.

Source: vllm/model_executor/models/qwen2.py; llama.cpp src/models/qwen2.cpp.
"""

from __future__ import annotations

from ..family import Family
from ..fields import Fields


class Qwen2(Family):
    name = "qwen2"
    architectures = ("Qwen2ForCausalLM",)
    model_types = ("qwen2",)
    gguf_names = ("qwen2",)

    def hf(self, given: Fields) -> dict:
        given.only("use_sliding_window", (False,), False)
        given.only("dual_chunk_attention_config", (None,))
        return super().hf(given) | {"biased": frozenset(("qkv",))}
