"""get_rope of every frequency family: its cache in float32 and bfloat16, and its Python forward on random heads.

Also the Triton kernel in front of gated attention, interpreted, in float16: the interpreter rounds bfloat16 wrongly.
Run in the CPU build: `python ops_rope_cpu.py [folder]`; writes rope_frequencies.cpu.safetensors.
"""

from __future__ import annotations

import sys
from pathlib import Path

import interpreted

interpreted.enable()

import torch  # noqa: E402
from record import Record, generator, normal  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.fused_qk_norm_rope import fused_qk_rmsnorm_rope_gate  # noqa: E402
from vllm.model_executor.layers.rotary_embedding import get_rope, phi3_long_rope_scaled_rope  # noqa: E402

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 24}
DEEPSEEK = {"rope_type": "deepseek_yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4,
            "mscale": 0.707, "mscale_all_dim": 0.5, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
        "short_factor": [1 + i / 16 for i in range(16)], "long_factor": [1 + 2.5 * i for i in range(16)]}  # fmt: skip
NTK = {"rope_type": "dynamic", "rope_theta": 1e4}
CASES = {  # name: rope_parameters, head_size, max_position, is_neox
    "default": ({"rope_theta": 1e4}, 64, 96, True),
    "default_long": ({"rope_theta": 1e6}, 8, 4096, True),
    "default_131k": ({"rope_theta": 5e5}, 2, 131072, True),
    "partial": ({"rope_theta": 1e7, "partial_rotary_factor": 0.25}, 256, 64, True),
    "gptj": ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, 128, 64, False),
    "rope_dim": ({"rope_theta": 1e4, "rope_dim": 48}, 128, 33, True),
    "linear": ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 64, 16, True),
    "linear_several": ({"rope_type": "linear", "rope_theta": 1e4, "factor": [1.0, 2.5]}, 64, 31, True),
    "dynamic_factor": ({**NTK, "factor": 4.0, "max_trained_positions": 32}, 128, 96, True),
    "dynamic_factor_trained": ({**NTK, "factor": 4.0}, 128, 64, True),
    "dynamic_alpha": ({**NTK, "alpha": 1000.0}, 128, 64, True),
    "ntk": ({"rope_type": "ntk", "rope_theta": 1e4, "factor": 4.0}, 64, 64, True),
    "ntk_mixed": ({"rope_type": "ntk", "rope_theta": 1e4, "factor": 4.0, "mixed_b": 0.7}, 64, 64, True),
    "llama3": (LLAMA3, 128, 96, True),
    "llama3_gptj": (LLAMA3, 64, 64, False),
    "llama3_equal": ({**LLAMA3, "high_freq_factor": 1.0}, 128, 64, True),
    "yarn": (YARN, 128, 96, True),
    "yarn_gptj": (YARN, 64, 96, False),
    "yarn_untruncated": ({**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}, 64, 96, True),
    "yarn_unscaled": ({**YARN, "factor": 2.5, "original_max_position_embeddings": 25, "apply_yarn_scaling": False,
                       "attn_factor": 0.8, "extrapolation_factor": 0.9}, 64, 63, True),
    "deepseek": (DEEPSEEK, 64, 160, False),
    "deepseek_v4": ({**DEEPSEEK, "is_deepseek_v4": True}, 64, 160, False),
    "longrope": (LONG, 32, 64, True),
    "longrope_mscale": ({**LONG, "short_mscale": 1.1, "long_mscale": 1.3}, 32, 64, True),
    "proportional": ({"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}, 256, 64, True),
    "mrope": ({"rope_theta": 1e6, "mrope_section": [16, 24, 24]}, 128, 24, True),
    "mrope_yarn": ({**YARN, "partial_rotary_factor": 0.5, "mrope_section": [11, 11, 10], "mrope_interleaved": True},
                   128, 96, True),
}  # fmt: skip
TOKENS, QUERY_HEADS, KEY_HEADS = 5, 3, 2


class _Engine:
    """What LongRoPE asks of the engine's configuration: a context beyond the original one, so the long table."""

    class model_config:
        max_model_len = 1 << 20


def capture(record: Record, name: str, dtype: torch.dtype) -> None:
    parameters, head_size, max_position, is_neox = CASES[name]
    rope = get_rope(head_size, max_position, is_neox, dict(parameters), dtype)
    kind = str(dtype)[6:]
    cache = getattr(rope, "cos_sin_cache", None)
    cache = rope.long_short_cos_sin_cache if cache is None else cache
    if cache.shape[0] < 100_000 or dtype == torch.float32:
        arguments = {"rope_parameters": parameters, "head_size": head_size, "max_position": max_position,
                     "dtype": kind, "emulate": "f32"}  # fmt: skip
        record.case("rope_build_cache", f"{name}_{kind}", "vllm get_rope", arguments, {}, {"cos_sin_cache": cache})
    if cache.shape[0] > 1000:
        return
    q = normal(f"q{name}", TOKENS, QUERY_HEADS, head_size, dtype=dtype)
    k = normal(f"k{name}", TOKENS, KEY_HEADS, head_size, dtype=dtype)
    arguments = {"is_neox": is_neox, "rounding": "vllm_native"}
    shape, first = (TOKENS,), 0
    if "mrope_section" in parameters:
        shape = (3, TOKENS)
        arguments |= {key: parameters[key] for key in ("mrope_section", "mrope_interleaved") if key in parameters}
    if name.startswith("longrope"):
        first = parameters["original_max_position_embeddings"]
    positions = torch.randint(0, cache.shape[0] - first, shape, generator=generator(f"p{name}"))
    inputs = {"q": q, "k": k, "positions": positions + first, "cos_sin_cache": cache}
    if name.startswith("deepseek"):
        out = rope.forward_native(positions, q.clone(), k.clone())
    else:
        forward = rope.forward if first else rope.forward_native
        out = forward(positions, q.reshape(TOKENS, -1).clone(), k.reshape(TOKENS, -1).clone())
    outputs = {"q": out[0].reshape(q.shape), "k": out[1].reshape(k.shape)}
    record.case("rope_from_cache", f"{name}_{kind}", f"{type(rope).__name__} in Python", arguments, inputs, outputs)
    if name == "deepseek_v4":
        wide = normal(f"w{name}", TOKENS, QUERY_HEADS, 160, dtype=dtype)
        for inverse in (False, True):
            out = rope.forward_native(positions, wide.clone(), None, inverse=inverse)[0]
            record.case("rope_from_cache", f"{name}_{kind}_{'inverse' if inverse else 'trailing'}",
                        "DeepseekV4ScalingRotaryEmbedding.forward_native",
                        {**arguments, "rope_dim_offset": 96, "inverse": inverse},
                        {"q": wide, "positions": positions, "cos_sin_cache": cache}, {"q": out})  # fmt: skip


def gated_front(record: Record) -> None:
    """Weights go in with their 1 added, as the model passes them."""
    for tokens, hq, hk, dim, rotary in ((5, 3, 2, 64, 16), (3, 2, 1, 256, 64), (3, 1, 1, 96, 96)):
        name = f"float16_{dim}_{rotary}"
        half = torch.float16
        qgate = normal(f"g{name}", tokens, hq * 2 * dim, dtype=half)
        key = normal(f"k{name}", tokens, hk * dim, dtype=half)
        weights = [1 + normal(f"{part}w{name}", dim, scale=0.3) for part in "qk"]
        angle = 50 * torch.rand(20, rotary // 2, generator=generator(f"a{name}"), dtype=torch.float64)
        cache = torch.cat([angle.cos(), angle.sin()], -1).to(torch.float32).to(half)
        positions = torch.randint(0, 20, (tokens,), generator=generator(f"p{name}"))
        with record.attempt(f"fused_qk_rmsnorm_rope_gate {name}"):
            q, k, gate = fused_qk_rmsnorm_rope_gate(qgate, key, *weights, cache, positions, 1e-6, hq, hk, dim, rotary)
            record.case("attn_qk_norm_rope_gate", name, "fused_qk_rmsnorm_rope_gate, interpreted",
                        {"eps": 1e-6, "gemma": False, "rounding": "vllm"},
                        {"qgate": qgate, "kf": key, "q_norm": weights[0], "k_norm": weights[1],
                         "cos_sin": cache[positions]},
                        {"q": q.view(tokens, hq, dim), "k": k.view(tokens, hk, dim),
                         "gate": gate.view(tokens, hq, dim)})  # fmt: skip


def main() -> None:
    record = Record("rope_frequencies", __file__)
    phi3_long_rope_scaled_rope.get_current_vllm_config = lambda: _Engine
    with set_current_vllm_config(VllmConfig()):
        for name in CASES:
            for dtype in (torch.float32, torch.bfloat16):
                with record.attempt(f"{name} {dtype}"):
                    capture(record, name, dtype)
    gated_front(record)
    record.save(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "ops")


if __name__ == "__main__":
    main()
