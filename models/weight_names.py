"""Names and shapes of a checkpoint's tensors: Hugging Face's and llama.cpp's spelling of one list of slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .config import ModelConfig

# slot -> (name in a Hugging Face layer, name in a GGUF block)
_LAYER = {
    "attn_norm": ("input_layernorm", "attn_norm"),
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "ffn_norm": ("post_attention_layernorm", "ffn_norm"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}
_GEMMA = {
    "post_attn_norm": ("post_attention_layernorm", "post_attention_norm"),
    "ffn_norm": ("pre_feedforward_layernorm", "ffn_norm"),
    "post_ffn_norm": ("post_feedforward_layernorm", "post_ffw_norm"),
}
_OUTSIDE = {
    "embed": ("model.embed_tokens", "token_embd"),
    "norm": ("model.norm", "output_norm"),
    "head": ("lm_head", "output"),
}

ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class Slot:
    """One tensor that a model needs: where it goes, its name in the file, its shape."""

    slot: str
    layer: int | None
    name: str
    shape: tuple[int, ...]


def slots(config: ModelConfig, *, gguf: bool) -> Iterator[Slot]:
    """Every tensor that a checkpoint of `config` must hold, under its Hugging Face or GGUF name."""
    spelling = 1 if gguf else 0
    shapes = _shapes(config)
    for slot, names in _OUTSIDE.items():
        if slot != "head" or not config.tie_word_embeddings:
            yield Slot(slot, None, f"{names[spelling]}.weight", shapes[slot])
    prefix = "blk" if gguf else "model.layers"
    for layer in range(config.num_hidden_layers):
        for slot, names in layer_slots(config).items():
            yield Slot(slot, layer, f"{prefix}.{layer}.{names[spelling]}.weight", shapes[slot])


def layer_slots(config: ModelConfig) -> dict[str, tuple[str, str]]:
    """The slots of one layer with both spellings."""
    found = _LAYER | (_GEMMA if config.gemma else {})
    return {slot: names for slot, names in found.items() if config.qk_norm or slot not in ("q_norm", "k_norm")}


def ignored(name: str, config: ModelConfig, *, gguf: bool) -> bool:
    """Tensors that files carry and a model does not need: a copy of tied embeddings, frequencies made anew."""
    if gguf:
        return name == ROPE_FREQS and config.family == "llama"
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q, kv, head = config.q_size, config.kv_size, config.head_dim
    norms = ("attn_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm", "norm")
    return dict.fromkeys(norms, (hidden,)) | {
        "q_norm": (head,), "k_norm": (head,), "q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q),
        "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner), "embed": (vocab, hidden),
        "head": (vocab, hidden),
    }  # fmt: skip
