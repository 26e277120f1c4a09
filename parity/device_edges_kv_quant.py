"""Edge shapes of the quantised caches' kernels: heads around vectors, lanes and warps, scales a tensor and a head."""

from __future__ import annotations

import ml_dtypes
import numpy as np

_KINDS = ("bfloat16", "float16", "float32")
_TABLE = np.random.Generator(np.random.PCG64(5)).integers(0, 9, (4, 40)).astype(np.int32)
_STALE = np.int32([[8, 1, -5, 77], [2, 2, 3, 4], [0, 1 << 30, -1, -1]])


def _requests(*lengths: int) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


def _beside(scale: float, bits: int) -> np.ndarray:
    """[1, 1, D]: what `scale` divides to halves between codes of `bits` bits of mantissa, and the float32 beside it."""
    size = 2 << bits
    odd = np.arange(size + 1, 2 * size, 2) / size
    middle = (np.float32(scale) * (odd * 2.0 ** np.arange(-3, 5)[:, None])).astype(np.float32).reshape(-1, 1)
    return (middle.view(np.int32) + np.arange(-4, 4)).astype(np.int32).view(np.float32).reshape(1, 1, -1)


def _between(scale: float, bits: int, kind: str) -> dict:
    key, scales = _beside(scale, bits), np.float32([scale])
    return {"T": 1, "H": 1, "D": key.size, "Dv": key.size, "NB": 1, "BS": 4, "S": 1, "Sk": 1, "Sv": 1, "key": key,
            "k_scale": scales, "v_scale": scales, "kind": kind}  # fmt: skip


def _few_bits(*shape: int) -> np.ndarray:
    """Halves up to 6, some of them halfway between codes where the scale is 1, and a NaN here and there."""
    x = np.arange(np.prod(shape)).reshape(shape) * 11 % 25 / 2 - 6.0
    x.reshape(-1)[5::113] = np.nan
    return x.astype(ml_dtypes.bfloat16)


def _written(H, D, Dv=None, T=6, NB=3, BS=4, **more) -> dict:
    return {"T": T, "H": H, "D": D, "Dv": D if Dv is None else Dv, "NB": NB, "BS": BS, "S": T, **more}


def _halved(H, B, Bv=None, T=6, NB=3, BS=4, **more) -> dict:
    return {"T": T, "H": H, "B": B, "Bv": B if Bv is None else Bv, "NB": NB, "BS": BS, "S": T, **more}


EDGES: dict[str, list[dict]] = {
    "reshape_and_cache_fp8": [
        *(_written(H, D, Sk=Sk, Sv=Sv, key=key, kind=kind)
          for H, D, Sk, Sv, key, kind in (
              (2, 128, 1, 1, "bfloat16", "fp8"), (3, 64, 3, 3, "bfloat16", "fp8_e4m3"), (2, 24, 2, 1, "float16", "fp8"),
              (1, 5, 1, 1, "float32", "fp8_e5m2"), (2, 72, 1, 1, "float32", "fp8_e5m2"))),
        _written(2, 16, 40, Sk=1, Sv=2, key="bfloat16"), _written(2, 0, 8, Sk=1, Sv=1), _written(0, 8, Sk=1, Sv=1, T=2),
        *(_written(4, 256, T=70, NB=20, Sk=1, Sv=1, key="bfloat16", kind=kind) for kind in ("fp8", "fp8_e5m2")),
        {"T": 2, "H": 1, "D": 8, "Dv": 8, "NB": 0, "BS": 2, "S": 0, "Sk": 1, "Sv": 1},
        *(_between(scale, bits, kind) for scale in (1.0, 0.0321, 0.7)
          for bits, kind in ((3, "fp8_e4m3"), (2, "fp8_e5m2"))),
    ],
    "dequantize_kv_fp8": [
        {"...": (3, 4), "H": 2, "D": 128, "Sk": 1}, {"...": (3, 4), "H": 3, "D": 40, "Sk": 3, "out_dtype": "float16"},
        {"...": (2, 2, 3), "H": 2, "D": 8, "Sk": 2, "kind": "fp8_e5m2", "out_dtype": "float32"},
        {"...": (2,), "H": 16, "D": 8, "Sk": 1, "kind": "fp8_e5m2"}, {"...": (70,), "H": 8, "D": 128, "Sk": 8},
        {"...": (2,), "H": 3, "D": 7, "Sk": 1},
        {"...": (1,), "H": 1, "D": 256, "Sk": 1, "cache": np.arange(256, dtype=np.uint8).reshape(1, 1, 256),
         "out_dtype": "float32"},
        {"...": (1,), "H": 1, "D": 256, "Sk": 1, "cache": np.arange(256, dtype=np.uint8).reshape(1, 1, 256),
         "out_dtype": "float32", "kind": "fp8_e5m2"},
    ],
    "reshape_and_cache_per_token_head": [
        *(_written(2, D, Dv, key=key, key_cache=cache)
          for D, Dv, key, cache in (
              (128, 128, "bfloat16", "int8"), (64, 256, "bfloat16", "uint8"), (96, 8, "float16", "int8"),
              (8, 8, "float32", "uint8"), (80, 80, "float32", "int8"), (264, 512, "bfloat16", "int8"),
              (5, 16, "bfloat16", "uint8"), (0, 8, "bfloat16", "int8"))),
        _written(3, 64, T=200, NB=60, key="bfloat16"), _written(0, 8, T=2),
        *(_written(3, D, T=70, NB=20, key="bfloat16", key_cache=cache)
          for D, cache in ((16, "int8"), (128, "uint8"), (512, "int8"))),
        *(_written(15, 256, T=70, NB=20, key="bfloat16", key_cache=cache) for cache in ("int8", "uint8")),
        {"T": 2, "H": 1, "D": 8, "Dv": 8, "NB": 0, "BS": 2, "S": 0},
    ],
    "dequantize_kv_heads": [
        {"...": (3, 4), "H": 2, "D": 128}, {"...": (3, 4), "H": 3, "D": 40, "cache": "uint8", "out_dtype": "float16"},
        {"...": (2, 2, 3), "H": 2, "D": 8, "out_dtype": "float32"}, {"...": (2,), "H": 3, "D": 7},
        {"...": (0,), "H": 2, "D": 8}, {"...": (), "H": 2, "D": 16},
        *({"...": (1,), "H": 1, "D": 256, "cache": np.arange(256).astype(np.uint8).view(kind).reshape(1, 1, 256),
           "out_dtype": "float32"} for kind in ("int8", "uint8")),
    ],
    "rht": [
        *({"...": (5, 3), "D": D, "x": kind, "inverse": inverse}
          for D, kind, inverse in ((1, "float32", True), (2, "bfloat16", False), (4, "float16", True),
                                   (8, "bfloat16", False), (16, "float32", True), (32, "bfloat16", True),
                                   (64, "float16", False), (128, "bfloat16", False), (128, "bfloat16", True),
                                   (256, "float32", False))),
        {"...": (70, 8), "D": 128, "x": "bfloat16"}, {"...": (0,), "D": 8},
        *({"...": (300, 8), "D": 128, "x": "bfloat16", "inverse": inverse} for inverse in (False, True)),
    ],
    "reshape_and_cache_int4": [
        *(_halved(2, B, Bv, key=key)
          for B, Bv, key in ((64, 64, "bfloat16"), (32, 128, "bfloat16"), (48, 4, "float16"), (4, 4, "float32"),
                             (40, 40, "float32"), (132, 256, "bfloat16"), (3, 8, "bfloat16"))),
        _halved(3, 32, T=200, NB=60, key="bfloat16"), _halved(0, 8, T=2),
        _halved(15, 128, T=70, NB=20, key="bfloat16"),
    ],
    "dequantize_kv_int4": [
        {"...": (3, 4), "H": 2, "B": 64}, {"...": (3, 4), "H": 3, "B": 20, "out_dtype": "float16"},
        {"...": (2, 2, 3), "H": 2, "B": 4, "out_dtype": "float32"}, {"...": (2,), "H": 3, "B": 7},
        {"...": (), "H": 2, "B": 8}, {"...": (0,), "H": 2, "B": 8},
    ],
    "concat_and_cache_ds_mla": [
        {"T": 9, "NB": 3, "BS": 4, "S": 9, "kv_c": "bfloat16"},
        {"T": 70, "NB": 6, "BS": 16, "S": 68, "kv_c": "float16"},
        {"T": 2, "NB": 0, "BS": 4, "S": 0, "kv_c": "bfloat16"},
    ],
    "dequantize_ds_mla": [
        {"...": (9,), "out_dtype": "float16"}, {"...": (2, 2, 2), "out_dtype": "float32"}, {"...": ()},
    ],
    "indexer_k_quant_and_cache": [
        *({"T": 9, "NB": 3, "BS": 4, "S": 9, "k": kind, "ue8m0": ue8m0}
          for kind, ue8m0 in zip(_KINDS, (True, False, False))),
        {"T": 70, "NB": 6, "BS": 16, "S": 69, "k": "bfloat16"}, {"T": 2, "NB": 0, "BS": 4, "S": 0},
    ],
    "cp_gather_indexer_k_quant_cache": [
        {"NB": 9, "BS": 4, "N": 90, "B": 4, "MB": 40, "block_table": _TABLE, "cu_seq_lens": _requests(31, 0, 2, 50)},
        {"NB": 9, "BS": 2, "N": 5, "B": 3, "MB": 4, "block_table": _STALE, "cu_seq_lens": _requests(4, 1, 0)},
        {"NB": 9, "BS": 16, "N": 2100, "B": 4, "MB": 40, "block_table": _TABLE,
         "cu_seq_lens": _requests(640, 300, 640, 500)},
        {"NB": 2, "BS": 0, "N": 0, "B": 1, "MB": 40, "block_table": _TABLE[:1], "cu_seq_lens": _requests(0)},
    ],
    "reshape_and_cache_nvfp4": [
        *({"T": 6, "H": H, "G": G, "Gv": Gv, "NB": 3, "BS": 8, "S": 6, "key": key}
          for H, G, Gv, key in ((2, 8, 8, "bfloat16"), (1, 16, 4, "bfloat16"), (3, 2, 8, "float16"),
                                (2, 4, 4, "float32"), (1, 32, 32, "bfloat16"))),
        {"T": 60, "H": 3, "G": 8, "Gv": 8, "NB": 5, "BS": 16, "S": 59, "key": "bfloat16"},
        *({"T": 6, "H": 2, "G": 8, "Gv": 8, "NB": 3, "BS": 8, "S": 6, "key": _few_bits(6, 2, 128),
           "value": _few_bits(6, 2, 128), "k_scale": np.float32([scale])} for scale in (1, 0.03)),
        {"T": 561, "H": 15, "G": 16, "Gv": 16, "NB": 150, "BS": 4, "S": 560, "key": _few_bits(561, 15, 256),
         "value": _few_bits(561, 15, 256), "k_scale": np.float32([0.03])},
        {"T": 2, "H": 0, "G": 4, "Gv": 4, "NB": 1, "BS": 4, "S": 2},
    ],
}  # fmt: skip
"""Axes as in `Contract.examples`, by op."""
