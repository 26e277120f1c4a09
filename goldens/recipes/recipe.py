"""What a recipe is, and the pieces that several families' recipes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

Shapes = Iterator[tuple[str, tuple[int, ...]]]

ATTENTION = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": False,
             "attention_dropout": 0.0}  # fmt: skip
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "use_cache": True}
PROJECTIONS = {"q_proj": 2.0, "k_proj": 2.0, "v_proj": 2.0, "o_proj": 1.5, "qkv_proj": 2.0}


@dataclass(frozen=True)
class Recipe:
    """One checkpoint: its config.json, its tensors, and the sizes of their values.

    shapes : config -> (name, shape) of every tensor, in the order of the file.
    embedding, final_norm : tied embeddings echo the last token unless the residual stream outgrows them; these
        gains keep greedy streams varied (test: at least ten distinct tokens in 32).
    qk_norm : mean of the q and k norms' weights. zero_centered : the norms multiply with 1 + w.
    bias : spread of the biases.
    gains : last part of a matrix's name -> its gain over fan_in**-0.5. known : tensor -> (offset, scale) of its values.
    """

    config: Mapping
    shapes: Callable[[Mapping], Shapes]
    embedding: float = 1.0
    final_norm: float = 1.0
    qk_norm: float = 1.0
    bias: float = 0.2
    zero_centered: bool = False
    final_norm_name: str = "model.norm.weight"
    gains: Mapping[str, float] = field(default_factory=lambda: PROJECTIONS)
    known: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def offset_and_scale(self, tensor: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Mean and spread of a tensor's values."""
        parts = tensor.split(".")
        if parts[-1] == "bias":
            return 0.0, self.bias
        if (own := self.known.get(parts[-2]) or self.known.get(parts[-1])) is not None:
            return own
        if "norm" in tensor:
            gain = self.final_norm if tensor == self.final_norm_name else 1.0
            gain = self.qk_norm if tensor.endswith(("q_norm.weight", "k_norm.weight")) else gain
            return gain - (1.0 if self.zero_centered else 0.0), 0.1 * gain
        if "embed" in tensor:
            return 0.0, self.embedding
        return 0.0, self.gains.get(parts[-2], 1.0) * shape[1] ** -0.5


def head_dim(config: Mapping) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def layered(config: Mapping, layer: Callable[[Mapping, str], Shapes]) -> Shapes:
    """Embeddings, the layers, the last norm, and a head where embeddings are not tied."""
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        yield from layer(config, f"model.layers.{index}.")
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def attention(config: Mapping, at: str, *, biases: tuple[str, ...] = ()) -> Shapes:
    """q, k, v and o; those in `biases` have one."""
    hidden, dim = config["hidden_size"], head_dim(config)
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    for name, shape in (("q_proj", (q, hidden)), ("k_proj", (kv, hidden)), ("v_proj", (kv, hidden)),
                        ("o_proj", (hidden, q))):  # fmt: skip
        yield f"{at}self_attn.{name}.weight", shape
        if name in biases:
            yield f"{at}self_attn.{name}.bias", shape[:1]


def head_norms(config: Mapping, at: str) -> Shapes:
    """Norms of q and k, head by head."""
    for name in ("q_norm", "k_norm"):
        yield f"{at}self_attn.{name}.weight", (head_dim(config),)


def mlp(config: Mapping, at: str) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for name in ("gate_proj", "up_proj"):
        yield f"{at}mlp.{name}.weight", (inner, hidden)
    yield f"{at}mlp.down_proj.weight", (hidden, inner)


def fused_mlp(config: Mapping, at: str) -> Shapes:
    """gate and up as one matrix in the file."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield f"{at}mlp.gate_up_proj.weight", (2 * inner, hidden)
    yield f"{at}mlp.down_proj.weight", (hidden, inner)


def norms(config: Mapping, at: str, *names: str) -> Shapes:
    for name in names:
        yield f"{at}{name}.weight", (config["hidden_size"],)


PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
SANDWICH_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
