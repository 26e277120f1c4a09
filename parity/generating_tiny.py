"""Tiny checkpoints as models, kept: what several tests of models generate with."""

from __future__ import annotations

from functools import lru_cache

import ml_dtypes

from vtlab.goldens import tiny
from vtlab.models.config_hf import read
from vtlab.models.decoder import Decoder
from vtlab.models.weights import Weights

RECURRENT = tuple(
    name
    for name, config in tiny.CHECKPOINTS.items()
    if {"state_size", "linear_attn_config", "linear_num_key_heads"} & config.get("text_config", config).keys()
)
"""The checkpoints with layers that keep a state."""


@lru_cache
def tiny_model(name: str, dtype: str = "float32", stored: str | None = None) -> Decoder:
    """The checkpoint evaluated in `dtype`, stored in it or in another."""
    config, tensors = read(tiny.CHECKPOINTS[name], name), tiny.tensors(name, stored or dtype)
    if (stored or dtype) == "bfloat16":
        tensors = {key: value.view(ml_dtypes.bfloat16) for key, value in tensors.items()}
    return Decoder(config, Weights.from_tensors(config, tensors, dtype), max_positions=256)
