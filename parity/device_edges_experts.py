"""Shapes for experts of packed weights and products in groups: around tiles of pairs, columns, turns of K, chains."""

from __future__ import annotations

import numpy as np

_KINDS, _F32, _U8 = ("bfloat16", "float16"), "float32", "uint8"


def _bytes(T: int, k: int, E: int, N: int, K: int, G: int, bits: int, kind: str, **more) -> dict:
    return {"R": T, "T": T, "k": k, "E": E, "N": N, "K": K, "G": G, "bits": bits, "x": kind, **more}


def _words(T: int, k: int, E: int, N: int, K: int, G: int, quant_type: str, kind: str, **more) -> dict:
    zeros = {"b_zeros": "int32"} if quant_type == "uint4" else {}
    bits = 8 if quant_type == "uint8b128" else 4
    return {"R": T, "T": T, "k": k, "E": E, "N": N, "K": K, "G": G, "bits": bits, "a": kind,
            "quant_type": quant_type, **zeros, **more}  # fmt: skip


def _one_sided(T: int, k: int, E: int) -> np.ndarray:
    """Nearly all to the last expert, some to the first, none between."""
    ids = np.full((T, k), E - 1, np.int32)
    ids[:: max(T // 3, 1), 0] = 0
    return ids


def _counted(k: int, *counts: int) -> np.ndarray:
    """So many pairs for expert 0, so many for expert 1, ..., the last ones for none, mixed."""
    ids = np.repeat(np.int32([*range(len(counts) - 1), -1]), counts)
    return np.random.Generator(np.random.PCG64(k)).permutation(ids).reshape(-1, k)


def _routed(T: int, k: int) -> np.ndarray:
    """Weights as a router gives them, of one size. Those of a bell would leave few elements to decide on a norm."""
    powers = np.exp(np.random.Generator(np.random.PCG64(k)).standard_normal((T, k)))
    return (powers / powers.sum(1, keepdims=True)).astype(np.float32)


def _exponents(*shape: int) -> np.ndarray:
    """Words of four exponents from 2^-9 to 1, the last one of a word zero: 2^-127."""
    found = np.random.Generator(np.random.PCG64(1)).integers(118, 128, (*shape, 4), np.uint8)
    found[..., 3] = 0
    return found.view(np.int32)[..., 0]


def _heads(B: int, H: int, D: int, R: int, **more) -> dict:
    return {"B": B, "H": H, "D": D, "R": R, "G": R // 128, "P": -(-D // 128), "Q": R // 128, **more}


def _few(groups: int, *own: int) -> np.ndarray:
    """Sizes: 128 for some groups, nothing for the others."""
    sizes = np.zeros(groups, np.int32)
    sizes[list(own)] = 128
    return sizes


def _any_codes(K: int, M: int) -> np.ndarray:
    """Codes of every size, and a NaN in the last column."""
    codes = np.random.Generator(np.random.PCG64(K)).integers(0, 0x7F, (K, M)) | np.arange(M) % 2 << 7
    codes[-1, -1] = 0xFF
    return codes.astype(np.uint8)


EDGES: dict[str, list[dict]] = {
    "moe_wna16_gemm": [
        *(_bytes(9, 2, 3, 34, 160, 5, bits, kind, qzeros=zeros, weights=_F32)
          for bits in (4, 8) for kind in _KINDS for zeros in (None, _U8)),
        _bytes(70, 1, 1, 40, 576, 9, 4, "bfloat16"),
        *(_bytes(40, 1, 1, 40, 576, 3, 8, kind, qzeros=_U8) for kind in _KINDS),
        _bytes(40, 2, 4, 36, 128, 1, 4, "float16", weights=_F32, R=80, ids=_one_sided(40, 2, 4)),
        _bytes(1, 8, 8, 66, 1056, 33, 4, "bfloat16", qzeros=_U8), _bytes(3, 2, 300, 8, 96, 1, 8, "bfloat16"),
        _bytes(80, 2, 300, 1, 32, 1, 4, "float16"), _bytes(0, 2, 3, 8, 64, 1, 4, "bfloat16"),
        *(_bytes(100, 2, 4, 64, 640, 5, 4, kind, qzeros=_U8, weights=_F32) for kind in _KINDS),
        *(_bytes(100, 2, 2, 192, 384, 3, 4, kind) for kind in _KINDS),
        *(_bytes(57, 2, 3, 320, 256, 2, 4, kind, ids=_counted(2, 73, 29, 9, 3)) for kind in _KINDS),
        _bytes(200, 2, 3, 192, 256, 2, 4, "bfloat16", ids=_counted(2, 144, 62, 180, 14)),
        _bytes(16, 1, 1, 26880, 128, 1, 4, "bfloat16"), _bytes(64, 1, 1, 8960, 128, 1, 4, "float16"),
        _bytes(2, 2, 3, 0, 64, 1, 8, "float16"), _bytes(2, 2, 3, 6, 0, 1, 4, "bfloat16", weights=_F32),
    ],
    "moe_wna16_marlin_gemm": [
        *(_words(9, 2, 3, 64, 128, G, quant_type, kind, weights=_F32)
          for quant_type, G in (("uint4", 8), ("uint4b8", 4), ("uint8b128", 2)) for kind in _KINDS),
        *(_words(T, 1, 1, 64, 384, 3, "uint4b8", "bfloat16") for T in (20, 40)),
        *(_words(40, 1, 1, 64, 384, 24, "uint8b128", kind) for kind in _KINDS),
        _words(4, 2, 2, 64, 128, 1, "uint4", "bfloat16", weights=_F32, b_bias="bfloat16"),
        _words(5, 2, 2, 128, 64, 1, "uint8b128", "float16", perm="int32"),
        _words(30, 2, 3, 64, 640, 5, "uint4b8", "float16", perm="int32", weights=_F32, R=60, b_bias="float16",
               ids=_one_sided(30, 2, 3)),
        _words(1, 4, 4, 64, 1152, 9, "uint4", "bfloat16"), _words(3, 2, 300, 64, 128, 1, "uint4b8", "float16"),
        *(_words(100, 2, 3, 64, 640, 5, "uint4", kind, weights=_routed(100, 2), b_bias=kind)
          for kind in _KINDS),
        *(_words(100, 2, 2, 192, 384, 3, "uint4b8", kind) for kind in _KINDS),
        *(_words(57, 2, 3, 320, 256, 2, "uint4b8", kind, ids=_counted(2, 73, 29, 9, 3)) for kind in _KINDS),
        *(_words(260, 2, 3, 192, 256, 2, "uint4", kind, ids=_counted(2, 144, 190, 172, 14), b_bias=kind,
                 weights=_routed(260, 2)) for kind in _KINDS),
        _words(24, 1, 1, 26880, 128, 2, "uint4b8", "bfloat16"), _words(160, 1, 1, 8960, 128, 2, "uint4b8", "float16"),
        _words(0, 2, 3, 64, 128, 1, "uint4b8", "bfloat16"),
    ],
    "k_grouped_fp8_gemm_tn": [
        {"K": 512, "G": 4, "M": 70, "N": 9, "E": 4, "ks": np.int32([128, 256, 0, 128])},
        {"K": 256, "G": 2, "M": 5, "N": 67, "E": 2, "ks": np.int32([0, 256]), "c": _F32},
        {"K": 128, "G": 1, "M": 1, "N": 0, "E": 1, "ks": np.int32([128])},
        {"K": 512, "G": 4, "M": 144, "N": 272, "E": 4, "ks": np.int32([128, 256, 0, 128])},
        {"K": 768, "G": 6, "M": 16, "N": 48, "E": 2, "ks": np.int32([640, 128]), "c": _F32},
        {"K": 384, "G": 3, "M": 144, "N": 16, "E": 70, "ks": _few(70, 0, 66, 69), "c": _F32},
        {"K": 128, "G": 1, "M": 32, "N": 16, "E": 1, "ks": np.int32([128]), "a": _any_codes(128, 32)},
    ],
    "fp8_einsum": [
        _heads(66, 2, 192, 256), _heads(3, 3, 64, 640, scale_a=_exponents(3, 3, 2), G=2), _heads(2, 0, 64, 128),
        _heads(18, 3, 192, 384), _heads(1, 5, 1728, 128), _heads(130, 8, 576, 128), _heads(385, 8, 832, 128),
    ],
}  # fmt: skip
"""Axes as in `Contract.examples`, by op."""
