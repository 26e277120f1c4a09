"""RoPE goldens from vLLM's CPU build: the caches of get_rope and the rotations of forward_native.

    python goldens/capture/ops_rope.py --out goldens/ops

Caches are small (32 rotated lanes, up to a few hundred rows) but for two that reach far positions, where the
float32 angles of vLLM part from exact ones.
"""

from __future__ import annotations

import torch
from record import Record, normal, run
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

BF16, F32 = torch.bfloat16, torch.float32
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DEEPSEEK = {"rope_type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.05 * i for i in range(16)],
        "long_factor": [1.0 + 0.5 * i * i for i in range(16)]}  # fmt: skip

# name: (rope_parameters, head_size, max_position, NeoX)
CACHES: dict[str, tuple[dict, int, int, bool]] = {
    "default": ({"rope_type": "default", "rope_theta": 10000.0}, 32, 512, True),
    "default_far": ({"rope_type": "default", "rope_theta": 1000000.0}, 8, 16384, True),
    "partial": ({"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}, 128, 128, True),
    "linear": ({"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, 32, 64, True),
    "dynamic_factor": ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, 32, 128, True),
    "dynamic_trained": (
        {"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 64, "rope_theta": 10000.0}, 32, 128, True),
    "dynamic_alpha": ({"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 10000.0}, 32, 128, True),
    "ntk": ({"rope_type": "ntk", "factor": 4.0, "rope_theta": 10000.0}, 32, 64, True),
    "ntk_mixed": ({"rope_type": "ntk", "factor": 4.0, "mixed_b": 0.5, "rope_theta": 10000.0}, 32, 64, True),
    "llama3": ({**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 64}, 32, 512, True),
    "llama3_far": ({**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}, 8, 16384, True),
    "llama3_gptj": ({**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 64}, 32, 128, False),
    "llama3_equal": (
        {**LLAMA3, "high_freq_factor": 1.0, "factor": 8.0, "original_max_position_embeddings": 64}, 32, 128, True),
    "yarn": ({**YARN, "rope_theta": 10000.0}, 32, 256, True),
    "yarn_untruncated": (
        {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2, "rope_theta": 1e6}, 32, 256, True),
    "yarn_unscaled": ({**YARN, "apply_yarn_scaling": False, "attn_factor": 1.2, "rope_theta": 10000.0}, 32, 256, True),
    "deepseek_yarn": ({**DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 1.0, "rope_theta": 10000.0}, 32, 256, False),
    "longrope_short": (LONG, 32, 64, True),
    "longrope_long": ({**LONG, "rope_theta": 10000.0}, 32, 256, True),
    "longrope_mscale": ({**LONG, "short_mscale": 1.1, "long_mscale": 1.3}, 32, 128, True),
    "longrope_partial": ({**LONG, "partial_rotary_factor": 0.5}, 64, 128, True),
    "mrope": ({"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6}, 32, 64, True),
    "mrope_yarn": (
        {**YARN, "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 1e6}, 32, 64, True),
    "proportional": ({"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}, 64, 128, True),
}  # fmt: skip


def table_of(rope: torch.nn.Module) -> torch.Tensor:
    """The rotary cache of a vLLM layer; LongRoPE keeps [short; long] under another name."""
    return (
        getattr(rope, "long_short_cos_sin_cache", None)
        if hasattr(rope, "long_short_cos_sin_cache")
        else rope.cos_sin_cache
    )


def caches(record: Record) -> None:
    for name, (parameters, size, rows, neox) in CACHES.items():
        for dtype in (F32, BF16):
            kind = str(dtype)[6:]
            if dtype == BF16 and name.endswith("far"):
                continue
            with record.attempt(f"{name} {kind}"):
                rope = get_rope(size, rows, neox, dict(parameters), dtype)
                record.case("rope_build_cache", f"{name}_{kind}", f"get_rope(...): {type(rope).__name__}",
                            {"rope_parameters": parameters, "head_size": size, "max_position": rows, "dtype": kind,
                             "emulate": "f32"}, {}, {"cos_sin_cache": table_of(rope)})  # fmt: skip


def rotations(record: Record) -> None:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    sections = {"contiguous": ([4, 6, 6], False), "interleaved": ([6, 5, 5], True)}
    kinds = [
        ("full", plain, 64, True, None), ("gptj", plain, 64, False, None), ("odd_heads", plain, 80, True, None),
        ("partial", {**plain, "partial_rotary_factor": 0.25}, 64, True, None),
        ("partial_gptj", {**plain, "partial_rotary_factor": 0.5}, 64, False, None),
        ("proportional", CACHES["proportional"][0], 64, True, None),
    ]  # fmt: skip
    kinds += [(f"mrope_{how}", {**plain, "mrope_section": s, "mrope_interleaved": mixed}, 32, True, (s, mixed))
              for how, (s, mixed) in sections.items()]  # fmt: skip
    for name, parameters, dim, neox, section in kinds:
        for dtype in (F32, BF16):
            full, heads = f"{name}_{str(dtype)[6:]}", 3 if name == "odd_heads" else 4
            positions = torch.tensor([0, 1, 2, 63, 40])
            if section is not None:
                positions = torch.stack([positions, torch.tensor([0, 5, 9, 1, 2]), torch.tensor([3, 0, 7, 60, 8])])
            with record.attempt(f"rotation {full}"):
                rope = get_rope(dim, 64, neox, dict(parameters), dtype)
                q, k = normal("q" + full, 5, heads, dim, dtype=dtype), normal("k" + full, 5, 1, dim, dtype=dtype)
                got = rope.forward_native(positions, q.reshape(5, -1).clone(), k.reshape(5, -1).clone())
                call = {"is_neox": neox, "rounding": "vllm_native"}
                call |= {} if section is None else {"mrope_section": section[0], "mrope_interleaved": section[1]}
                record.case("rope_from_cache", full, f"{type(rope).__name__}.forward_native", call,
                            {"q": q, "k": k, "positions": positions, "cos_sin_cache": rope.cos_sin_cache},
                            {"q": got[0].view_as(q), "k": got[1].view_as(k)})  # fmt: skip


def rope(record: Record) -> None:
    # LongRoPE asks the engine's model length; no other class does.
    config = VllmConfig()
    config.model_config = ModelConfig.__new__(ModelConfig)
    config.model_config.max_model_len = 256
    with torch.no_grad(), set_current_vllm_config(config):
        caches(record)
        rotations(record)


if __name__ == "__main__":
    run("rope", __file__, rope)
