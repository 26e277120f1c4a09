"""What a checkpoint says about its model, in one shape: from Hugging Face's config.json or from GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vtlab.ops.errors import FormatError

if TYPE_CHECKING:
    from .quant import Quantization

FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True)
class StateConfig:
    """What a recurrent layer keeps of a sequence, whatever its length: the last inputs of its convolution, and a state.

    channels, taps : of the convolution, whose filter is one tap longer. shape : of the state.
    """

    channels: int
    taps: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LayerConfig:
    """The numbers of one layer, which those of another may differ from.

    Attributes
    ----------
    kind : "full_attention" or "sliding_attention"; also says which of the model's rotary tables it reads. A
        "linear_attention" layer has a state instead of keys and values, and no heads that attend.
    sliding_window : keys that a query of a sliding layer sees, itself included.
    kv_layer : the earlier layer whose keys and values it reads, where it has none of its own.
    gated : the projection of q gives each head a gate beside it, whose sigmoid its output is multiplied with.
    """

    kind: str
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    sliding_window: int | None = None
    kv_layer: int | None = None
    gated: bool = False
    state: StateConfig | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def window(self) -> tuple[int, int] | None:
        """Keys left and right of a query that it sees, or None for all of them."""
        return (self.sliding_window - 1, 0) if self.kind == SLIDING else None


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of one decoder, under Hugging Face's names.

    Attributes
    ----------
    family : the name of its module in `families`.
    layers : what one layer has that another may not.
    norm_eps : of every norm, whichever kind the family has.
    softmax_scale : what attention scores are multiplied with. embedding_scale, residual_scale, logits_scale : what
        embeddings, a block's output before it joins the residual, and logits are.
    rope : layer kind -> rope_parameters in transformers 5's form (rope_type, rope_theta, …); layers of a kind that it
        does not name are not rotated. rope_is_neox : pairs are lanes i and half + i, else 2 i and 2 i + 1.
    biased : the linears that have a bias: "qkv", "o", "gate_up", "down", …
    stop_ids : tokens that end a generation.
    file : where it came from, for error messages. quantization : how its linears are stored, where that is not plainly.
    more : numbers that one family alone has.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    softmax_scale: float
    rope: Mapping[str, Mapping]
    rope_is_neox: bool = True
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    attn_logit_softcapping: float = 0.0
    final_logit_softcapping: float = 0.0
    biased: frozenset[str] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    dtype: str = "float32"
    file: str = "config"
    quantization: Quantization | None = None
    more: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self):
        self._want("num_hidden_layers", len(self.layers), len(self.layers) >= 1, "at least 1")
        for name in ("vocab_size", "hidden_size", "max_position_embeddings"):
            self._want(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        self._want("norm_eps", self.norm_eps, self.norm_eps > 0, "> 0")
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            self._want(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        for index, layer in enumerate(self.layers):
            self._check_layer(index, layer)

    def _check_layer(self, index: int, layer: LayerConfig) -> None:
        if layer.state is not None:
            sizes = (layer.state.channels, layer.state.taps, *layer.state.shape)
            self._want("layer_types", layer.kind, layer.kind == RECURRENT, RECURRENT)
            self._want("conv_kernel", sizes, min(sizes) >= 1, "a filter of two taps or more, a state with lanes")
            return
        for name in ("intermediate_size", "num_key_value_heads", "head_dim"):
            self._want(name, getattr(layer, name), getattr(layer, name) >= 1, "at least 1")
        heads, kv = layer.num_heads, layer.num_key_value_heads
        right = heads >= 1 and heads % kv == 0
        self._want("num_attention_heads", heads, right, f"a multiple of {kv} key-value heads")
        self._want("head_dim", layer.head_dim, layer.head_dim % 2 == 0, "an even number")
        self._want("layer_types", layer.kind, layer.kind in (FULL, SLIDING), f"{FULL} or {SLIDING}")
        window = layer.sliding_window
        self._want("sliding_window", window, layer.kind != SLIDING or (window or 0) >= 1, "at least 1")
        if layer.kv_layer is not None:
            own = layer.kv_layer < index and self.layers[layer.kv_layer].kv_layer is None
            same = own and self.layers[layer.kv_layer].kv_size == layer.kv_size
            self._want("num_kv_shared_layers", layer.kv_layer, same, f"a layer before {index} with keys of that size")

    def _want(self, name: str, got: object, condition: bool, want: str) -> None:
        if not condition:
            raise FormatError(self.file, None, name, got, want)

    @property
    def recurrent(self) -> bool:
        """Whether a layer keeps a state of a request, beside or instead of its keys and values."""
        return any(layer.state is not None for layer in self.layers)

    @property
    def attends(self) -> bool:
        """Whether a layer keeps keys and values, which take the more room the longer a request is."""
        return any(layer.state is None for layer in self.layers)

    @property
    def layer_types(self) -> tuple[str, ...]:
        return tuple(layer.kind for layer in self.layers)

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """From `config.json` in a model folder; FormatError for what is missing, contradictory or unsupported."""
        from .config_hf import read

        file = Path(folder) / "config.json"
        if not file.is_file():
            raise FormatError(file, None, "config.json", "no such file", "a model's configuration")
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise FormatError(file, None, "config.json", error, "JSON") from None
        return read(data, file)

    @classmethod
    def from_gguf(cls, gguf) -> ModelConfig:
        """From an open GGUF file (`vtlab.gguf.reader.read_gguf`): its metadata and the names of its tensors."""
        from .config_gguf import read

        return read(gguf.metadata, gguf.tensors, gguf.path)
