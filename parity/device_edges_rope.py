"""Edge shapes of the rotations' kernels: pairs and copied lanes around vectors, all roundings, sections, far angles."""

from __future__ import annotations

import numpy as np

_16 = {"q": "bfloat16", "k": "bfloat16"}
_KINDS = ("bfloat16", "float16", "float32")
_ROUNDINGS = ("vt", "vllm", "vllm_native")
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ALL_16 = {"qgate": "bfloat16", "kf": "bfloat16"}
_QKV_16 = {"qkv": "bfloat16", "q_weight": "bfloat16", "k_weight": "bfloat16"}
_FAR = np.array([0, 1, 131071, 1 << 20, (1 << 31) - 1, 1 << 40, (1 << 62) + 12345, (1 << 63) - 1])

EDGES: dict[str, list[dict]] = {
    "rope_from_cache": [
        *({"T": 5, "Hq": 3, "Hk": 2, "D": 32, "P": 9, "rotary_dim": 32, "q": kind, "k": kind, "cos_sin_cache": cache,
           "is_neox": is_neox, "rounding": rounding}
          for kind in _KINDS for cache in {kind, "float32"} for is_neox in (True, False) for rounding in _ROUNDINGS),
        *({"T": 3, "Hq": 9, "Hk": 1, "D": D, "P": 9, "rotary_dim": rot, **_16, "rope_dim_offset": offset,
           "is_neox": is_neox, "inverse": True}
          for D, rot, offset in ((64, 32, 0), (64, 16, 24), (72, 48, 8), (40, 16, 4), (24, 6, 1), (576, 64, 512))
          for is_neox in (True, False)),
        *({"...": (3,), "T": 4, "Hq": 2, "Hk": 1, "D": 136, "P": 40, "rotary_dim": 128, "q": kind, "k": kind,
           "mrope_section": (16, 24, 24), "mrope_interleaved": interleaved, "inverse": interleaved}
          for kind in _KINDS for interleaved in (True, False)),
        {"...": (3,), "T": 4, "Hq": 2, "Hk": 1, "D": 40, "P": 40, "rotary_dim": 20, "mrope_section": [3, 2, 5],
         "k": "float32", "positions": "int64"},
        {"T": 300, "Hq": 1, "Hk": 1, "D": 16, "P": 9, "rotary_dim": 16, **_16, "positions": "int64"},
        {"T": 2, "Hq": 80, "Hk": 8, "D": 128, "P": 9, "rotary_dim": 128, **_16},
        {"T": 2, "Hq": 2, "Hk": 1, "D": 300, "P": 9, "rotary_dim": 260, **_16, "is_neox": False},
        {"T": 2, "Hq": 2, "Hk": 1, "D": 2048, "P": 9, "rotary_dim": 1024, **_16},
        {"T": 0, "Hq": 2, "Hk": 1, "D": 16, "P": 9, "rotary_dim": 16, **_16},
        {"T": 2, "Hq": 0, "Hk": 1, "D": 16, "P": 9, "rotary_dim": 16, **_16},
    ],
    "rope_neox": [
        *({"T": 8, "Hq": 3, "Hk": 1, "D": 32, "rotary_dim": 32, "q": kind, "k": kind, "base": 5e5, "positions": _FAR}
          for kind in _KINDS),
        {"T": 5, "Hq": 12, "Hk": 2, "D": 256, "rotary_dim": 64, **_16, "base": 1e7, "positions": "int64"},
        {"T": 300, "Hq": 1, "Hk": 1, "D": 16, "rotary_dim": 16, **_16},
        {"T": 3, "Hq": 2, "Hk": 1, "D": 300, "rotary_dim": 260, **_16, "llama3": _LLAMA3},
        {"T": 0, "Hq": 2, "Hk": 1, "D": 16, "rotary_dim": 16, **_16},
    ],
    "rope_cos_sin_cache": [
        {"T": 8, "rotary_dim": 128, "positions": _FAR, "base": 1e6},
        {"T": 8, "rotary_dim": 6, "positions": _FAR, "base": 1e-3},
        {"T": 50, "rotary_dim": 128, "llama3": _LLAMA3, "base": 5e5}, {"T": 0, "rotary_dim": 2},
    ],
    "attn_qk_norm_rope_gate": [
        *({"T": 3, "Hq": 3, "Hk": 2, "D": D, "rotary_dim": rot, **_ALL_16, "rounding": rounding}
          for D, rot in ((8, 8), (32, 32), (48, 16), (64, 32), (128, 128), (256, 64), (512, 128), (2056, 64))
          for rounding in ("vt", "vllm")),
        {"T": 3, "Hq": 2, "Hk": 1, "D": 64, "rotary_dim": 32, "qgate": "float16", "kf": "bfloat16",
         "out_dtype": "float32", "gate_dtype": "bfloat16"},
        {"T": 3, "Hq": 2, "Hk": 1, "D": 64, "rotary_dim": 32, "qgate": "float32", "kf": "bfloat16",
         "cos_sin": "bfloat16", "gemma": False, "out_dtype": "bfloat16"},
        {"T": 700, "Hq": 2, "Hk": 1, "D": 32, "rotary_dim": 16, **_ALL_16},
        {"T": 3, "Hq": 2, "Hk": 1, "D": 20, "rotary_dim": 6, "qgate": "float16", "kf": "float16", "rounding": "vllm"},
        {"T": 0, "Hq": 2, "Hk": 1, "D": 8, "rotary_dim": 4},
    ],
    "fused_qk_norm_rope": [
        *({"T": 3, "Hq": 3, "Hk": 2, "Hv": 1, "D": D, "P": 9, "rotary_dim": rot, **_QKV_16, "is_neox": is_neox}
          for D, rot in ((16, 16), (80, 80), (128, 64), (256, 32), (320, 320), (24, 6)) for is_neox in (True, False)),
        *({"T": 3, "Hq": 3, "Hk": 2, "Hv": 1, "D": 64, "P": 9, "rotary_dim": 64, "qkv": kind, "q_weight": "float32",
           "cos_sin_cache": "float32", "positions": "int64"} for kind in _KINDS),
        {"T": 1400, "Hq": 4, "Hk": 1, "Hv": 1, "D": 64, "P": 9, "rotary_dim": 64, **_QKV_16,
         "cos_sin_cache": "bfloat16"},
        {"T": 0, "Hq": 1, "Hk": 1, "Hv": 1, "D": 16, "P": 9, "rotary_dim": 16},
    ],
    "rope_and_cache": [
        *({"T": 6, "Hq": 3, "Hk": 2, "D": D, "P": 9, "rotary_dim": rot, "NB": 3, "BS": 4, "S": 5, "q": kind,
           "key_cache": kind, "is_neox": is_neox}
          for D, rot, kind in ((32, 32, "bfloat16"), (72, 16, "bfloat16"), (32, 16, "float32"), (24, 24, "float16"),
                               (15, 6, "bfloat16")) for is_neox in (True, False)),
        {"T": 300, "Hq": 2, "Hk": 1, "D": 16, "P": 9, "rotary_dim": 16, "NB": 40, "BS": 8, "S": 290, "q": "bfloat16",
         "key_cache": "bfloat16"},
        {"T": 2, "Hq": 2, "Hk": 1, "D": 16, "P": 9, "rotary_dim": 16, "NB": 0, "BS": 8, "S": 0},
        {"T": 0, "Hq": 2, "Hk": 1, "D": 16, "P": 9, "rotary_dim": 16, "NB": 1, "BS": 8, "S": 0},
    ],
}  # fmt: skip
