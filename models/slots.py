"""Names, shapes and transforms of a checkpoint's tensors: one list for Hugging Face's spelling and for llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from vtlab.ops.numerics import round_to

from .config import LayerConfig, ModelConfig

Array = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Slot:
    """One tensor of a file and where it goes.

    target : attribute of the layer, or of the weights. Tensors of one target lie one below the other, in the order
        in which they are listed; those of "qkv_bias" are the bias of the linear "qkv".
    hf, gguf : its name in either spelling, within a layer or whole; None where a spelling does not have it.
    gguf_rows : the file's row that is row i of the model, where llama.cpp stores rows in another order.
    from_hf : what else is done to Hugging Face's values. dtype : what the model keeps, where it is not its own dtype.
    scalar : kept as a number, rounded to the model's dtype. constant : the values, where no file has them.
    """

    target: str
    hf: str | None
    gguf: str | None
    shape: tuple[int, ...]
    gguf_rows: np.ndarray | None = None
    from_hf: Array | None = None
    dtype: str | None = None
    scalar: bool = False
    constant: np.ndarray | None = None
    layer: int | None = None

    def name(self, gguf: bool) -> str | None:
        return self.gguf if gguf else self.hf


def within(slots: Iterable[Slot], index: int, hf: str, gguf: str) -> Iterator[Slot]:
    """The slots of a layer under their whole names, which begin with `hf` and `gguf`."""
    for slot in slots:
        yield replace(
            slot,
            layer=index,
            hf=None if slot.hf is None else f"{hf}.{index}.{slot.hf}",
            gguf=None if slot.gguf is None else f"{gguf}.{index}.{slot.gguf}",
        )


def norm(target: str, hf: str | None, gguf: str | None, size: int, one_more: bool = False) -> Slot:
    """A norm's weight; `one_more` for Gemma's, which multiplies with 1 + w: it is kept as float32(1 + w), which is
    what llama.cpp's files hold."""
    names = (f"{hf}.weight" if hf else None, f"{gguf}.weight" if gguf else None)
    if one_more:
        return Slot(target, *names, (size,), from_hf=add_one, dtype="float32")
    return Slot(target, *names, (size,))


def layer_norm(target: str, hf: str, size: int) -> Iterator[Slot]:
    """The weight and the bias of a LayerNorm."""
    yield Slot(target, f"{hf}.weight", None, (size,))
    yield Slot(f"{target}_bias", f"{hf}.bias", None, (size,))


def filters(target: str, hf: str, channels: int, taps: int, dtype: str | None = None) -> Slot:
    """The filters of a convolution of each channel by itself, [channels, 1, taps]."""
    return Slot(target, f"{hf}.weight", None, (channels, 1, taps), dtype=dtype)


def constant(target: str, values: np.ndarray) -> Slot:
    """What a family needs as an array and no file holds."""
    return Slot(target, None, None, values.shape, constant=values)


def add_one(weight: np.ndarray) -> np.ndarray:
    """float32(1 + w), rounded once."""
    return round_to(np.asarray(weight, np.float64) + 1.0, np.float32)


@dataclass(frozen=True)
class Part:
    """Rows of a linear under a name of their own. pairs_of : head_dim, where llama.cpp stores rotary pairs together."""

    hf: str | None
    gguf: str | None
    rows: int
    pairs_of: int | None = None


def linear(target: str, columns: int, *parts: Part, bias: bool = False) -> Iterator[Slot]:
    """A linear [rows of all parts, columns], with a bias or without."""
    for suffix, shape in (("weight", (columns,)), ("bias", ()))[: 2 if bias else 1]:
        for part in parts:
            yield Slot(
                target if suffix == "weight" else f"{target}_bias",
                f"{part.hf}.{suffix}" if part.hf else None,
                f"{part.gguf}.{suffix}" if part.gguf else None,
                (part.rows, *shape),
                gguf_rows=None if part.pairs_of is None else halves_first(part.rows, part.pairs_of),
            )


def halves_first(rows: int, head_dim: int) -> np.ndarray:
    """Where in a file of rows (head, pair, half) the rows (head, half, pair) are: llama.cpp's order undone."""
    return np.arange(rows).reshape(rows // head_dim, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def attention(config: ModelConfig, layer: LayerConfig, paired: bool = False) -> Iterator[Slot]:
    """q, k, v and the output under Llama's names; a gated layer's q holds the gates too. paired : llama.cpp stores
    rotary pairs of q and k together."""
    hidden, pairs = config.hidden_size, layer.head_dim if paired else None
    q = Part("self_attn.q_proj", "attn_q", layer.q_size * (1 + layer.gated), pairs)
    k = Part("self_attn.k_proj", "attn_k", layer.kv_size, pairs)
    v = Part("self_attn.v_proj", "attn_v", layer.kv_size)
    yield from linear("qkv", hidden, q, k, v, bias="qkv" in config.biased)
    o = Part("self_attn.o_proj", "attn_output", hidden)
    yield from linear("o", layer.q_size, o, bias="o" in config.biased)


def gated_mlp(config: ModelConfig, layer: LayerConfig) -> Iterator[Slot]:
    """gate, up and down under Llama's names."""
    hidden, inner = config.hidden_size, layer.intermediate_size
    gate, up = Part("mlp.gate_proj", "ffn_gate", inner), Part("mlp.up_proj", "ffn_up", inner)
    yield from linear("gate_up", hidden, gate, up, bias="gate_up" in config.biased)
    yield from linear("down", inner, Part("mlp.down_proj", "ffn_down", hidden), bias="down" in config.biased)


def head_norms(layer: LayerConfig, one_more: bool = False) -> Iterator[Slot]:
    """Norms of each head of q and k."""
    yield norm("q_norm", "self_attn.q_norm", "attn_q_norm", layer.head_dim, one_more)
    yield norm("k_norm", "self_attn.k_norm", "attn_k_norm", layer.head_dim, one_more)


def sandwich_norms(config: ModelConfig, one_more: bool = True) -> Iterator[Slot]:
    """Norms before and after attention and the MLP, under Gemma's names."""
    for target, hf, gguf in (
        ("attn_norm", "input_layernorm", "attn_norm"),
        ("post_attn_norm", "post_attention_layernorm", "post_attention_norm"),
        ("ffn_norm", "pre_feedforward_layernorm", "ffn_norm"),
        ("post_ffn_norm", "post_feedforward_layernorm", "post_ffw_norm"),
    ):
        yield norm(target, hf, gguf, config.hidden_size, one_more)


def outside(config: ModelConfig, one_more: bool = False) -> Iterator[Slot]:
    """Embeddings, the last norm and the head under Llama's names."""
    vocab, hidden = config.vocab_size, config.hidden_size
    yield from linear("embed", hidden, Part("model.embed_tokens", "token_embd", vocab))
    yield norm("norm", "model.norm", "output_norm", hidden, one_more)
    if not config.tie_word_embeddings:
        yield from linear("head", hidden, Part("lm_head", "output", vocab))
