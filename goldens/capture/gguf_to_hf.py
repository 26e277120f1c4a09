"""Turn a GGUF file into a float32 Hugging Face checkpoint that vLLM loads, so that both run the same weights.

    python goldens/capture/gguf_to_hf.py MODEL.gguf FOLDER

Needs NumPy, safetensors and PyPI's gguf (its reference dequantisation). Knows the architectures llama and gemma3.
What the GGUF converter had done is undone: llama's q and k rows are put back from rotation pairs (head, i, half)
to halves (head, half, i); Gemma's norm weights, stored as w + 1, become w.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
from gguf.quants import dequantize
from safetensors.numpy import save_file

from gguf import GGUFReader

_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_FEED_FORWARD_NORM = {"llama": "post_attention_layernorm", "gemma3": "pre_feedforward_layernorm"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# llama.cpp gives every sixth gemma3 layer full attention and fixes the base of the sliding ones;
# neither is written into the file.
_GEMMA3_PERIOD, _GEMMA3_LOCAL_THETA = 6, 10000.0


def hf_name(name: str, arch: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("blk."):
        return f"{_TOP[stem]}.{kind}"
    _, layer, part = stem.split(".")
    names = {**_LAYER, "ffn_norm": _FEED_FORWARD_NORM[arch], "post_attention_norm": "post_attention_layernorm"}
    return f"model.layers.{layer}.{names[part]}.{kind}"


def halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row order (head, i, half) -> (head, half, i)."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def config(fields: dict, tied: bool) -> dict:
    """The Hugging Face config of the file's key-value pairs."""
    arch = fields["general.architecture"]

    def get(key: str, default: object = None) -> object:
        return fields.get(f"{arch}.{key}", default)

    heads, hidden = get("attention.head_count"), get("embedding_length")
    common = {
        "hidden_size": hidden, "intermediate_size": get("feed_forward_length"), "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads), "num_hidden_layers": get("block_count"),
        "head_dim": get("attention.key_length", hidden // heads), "max_position_embeddings": get("context_length"),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]), "tie_word_embeddings": tied, "attention_bias": False,
        # The file holds a float32; its shortest decimal is the number the original config wrote.
        "rms_norm_eps": float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"], "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }  # fmt: skip
    theta = float(get("rope.freq_base", 10000.0))
    if arch == "llama":
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", **common, "hidden_act": "silu",
            "mlp_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }  # fmt: skip
    layers = range(1, common["num_hidden_layers"] + 1)
    return {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **common,
        "hidden_activation": "gelu_pytorch_tanh", "sliding_window": get("attention.sliding_window"),
        "layer_types": [f"{'sliding' if i % _GEMMA3_PERIOD else 'full'}_attention" for i in layers],
        "query_pre_attn_scalar": common["head_dim"],
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": _GEMMA3_LOCAL_THETA},
                            "full_attention": {"rope_type": "default", "rope_theta": theta}},
    }  # fmt: skip


def convert(file: Path, folder: Path) -> dict:
    """Write config.json, model.safetensors and provenance.json; the provenance."""
    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    arch = fields["general.architecture"]
    if arch not in _FEED_FORWARD_NORM:
        raise ValueError(f"{file}: architecture {arch!r}, want one of {sorted(_FEED_FORWARD_NORM)}")
    hf = config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    heads = {"attn_q": hf["num_attention_heads"], "attn_k": hf["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.split(".")[-2]
        if arch == "llama" and part in heads:
            weight = halves_from_pairs(weight, heads[part])
        if arch == "gemma3" and part.endswith("norm"):
            weight = weight - np.float32(1.0)
        tensors[hf_name(tensor.name, arch)] = weight
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    total = hashlib.sha256()
    for name, weight in sorted(tensors.items()):
        total.update(f"{name} float32 {list(weight.shape)}\n".encode() + weight.tobytes())
    source = {
        "checkpoint_digest": total.hexdigest(), "checkpoint_script": "goldens/capture/gguf_to_hf.py",
        "checkpoint_script_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "gguf_file": file.name, "gguf_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }  # fmt: skip
    (folder / "provenance.json").write_text(json.dumps(source, indent=2) + "\n")
    return source


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(json.dumps(convert(arguments.file, arguments.folder), indent=2))
