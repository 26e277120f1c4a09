"""Gemma 1: embeddings times sqrt(hidden_size), norms that multiply with 1 + w, a GELU MLP, heads of any width.

Source: vllm/model_executor/models/gemma.py; llama.cpp src/models/gemma.cpp.
"""

from __future__ import annotations

from typing import ClassVar

from vtlab import ops

from ..config_gguf import GGUFFields
from ..config_hf import at_least_one
from ..family import Family
from ..fields import Fields


class Gemma(Family):
    name = "gemma"
    architectures = ("GemmaForCausalLM",)
    model_types = ("gemma",)
    gguf_names = ("gemma",)
    defaults: ClassVar = {"head_dim": 256, "tie_word_embeddings": True}
    activation = "gelu_pytorch_tanh"
    activation_field = "hidden_activation"  # hidden_act is a mistake of the published files, which nothing reads
    activate = staticmethod(ops.gelu_and_mul)
    one_more = True

    def hf(self, given: Fields) -> dict:
        return super().hf(given) | {"embedding_scale": at_least_one(given, "hidden_size") ** 0.5}

    def gguf(self, given: GGUFFields) -> dict:
        return super().gguf(given) | {"embedding_scale": at_least_one(given, "embedding_length") ** 0.5}
