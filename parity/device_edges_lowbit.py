"""Edge shapes of low-bit weights: chains dealt out or not, a warp across or more, groups and layouts of every kind."""

from __future__ import annotations

_KINDS = ("bfloat16", "float16")
_TYPES = (("uint4b8", {}), ("uint4", {"b_zeros": "int32"}), ("uint8b128", {}))
_BOTH = (False, True)


def _bits(quant_type: str) -> int:
    return 8 if quant_type.startswith("uint8") else 4


def _marlin(M: int, K: int, N: int, G: int, kind: str, quant_type: str = "uint4b8", **more) -> dict:
    return {"M": M, "K": K, "N": N, "G": G, "bits": _bits(quant_type), "a": kind, "quant_type": quant_type, **more}


def _machete(M: int, K: int, N: int, G: int, kind: str, quant_type: str, **more) -> dict:
    zeros = {} if "b" in quant_type else {"b_group_zeros": kind}
    return _marlin(M, K, N, G, kind, quant_type, **zeros, **more)


def _gptq(M: int, K: int, N: int, G: int, kind: str, bits: int = 4, **more) -> dict:
    return {"M": M, "K": K, "W": K * bits // 32, "N": N, "G": G, "bits": bits, "a": kind, **more}


def _w4a8(M: int, K: int, N: int) -> dict:
    return {"M": M, "K": K, "N": N, "G": K // 128}


def _experts(P: int, K: int, N: int, E: int) -> dict:
    return {"P": P, "K": K, "N": N, "G": K // 128, "E": E}


_PERM, _SHUFFLED = {"b_g_idx": "int32"}, {"use_exllama": True}

EDGES: dict[str, list[dict]] = {
    "gptq_pack": [{"K": 96, "N": 70, "bits": bits} for bits in (2, 3, 4, 8)] + [{"K": 0, "N": 8, "bits": 4}]
    + [{"K": 96, "N": 72, "bits": bits} for bits in (4, 8)],
    "gptq_unpack": [{"W": 12, "N": N, "bits": bits} for bits in (2, 3, 4, 8) for N in (70, 72)],
    "awq_pack": [
        {"K": 9, "N": 96, "bits": bits, "interleaved": interleaved}
        for bits, interleaved in ((2, False), (3, False), (4, True), (4, False), (8, True), (8, False))
    ],
    "awq_unpack": [
        {"K": 9, "W": 12, "bits": bits, "interleaved": interleaved}
        for bits, interleaved in ((2, False), (3, False), (4, True), (4, False), (8, True), (8, False))
    ],
    "sort_weights": [{"K": 300, "N": 5}],
    "permute_cols": [
        *({"M": 5, "K": 130, "x": kind} for kind in ("bfloat16", "float32", "int32")),
        *({"M": 67, "K": K, "x": kind} for K in (8, 2184) for kind in ("float16", "float32")),
    ],
    "gptq_shuffle": [
        {"W": 12, "N": N, "bits": bits, "P": 384 // bits, **perm}
        for bits in (2, 3, 4, 8) for N in (30, 32) for perm in ({}, {"q_perm": "int32"})
    ],
    "gptq_unshuffle": [
        {"W": 12, "N": N, "bits": bits, "P": 384 // bits, **perm}
        for bits in (2, 3, 4, 8) for N in (30, 32) for perm in ({}, {"q_perm": "int32"})
    ],
    "gptq_dequantize": [
        *({"W": 12, "N": 32, "G": 4, "bits": bits, "scales": kind, "qzeros": "int32"}
          for bits in (2, 3, 4, 8) for kind in ("bfloat16", "float16", "float32")),
        {"W": 8, "N": 4, "G": 2, "bits": 8, "scales": "float16"},
        *({"W": 8, "N": 48, "G": 4, "bits": bits, "scales": "bfloat16", "K": 256 // bits, "g_idx": "int32", **more}
          for bits, more in ((4, {"use_v2_format": True}), (8, {"qzeros": "int32"}), (2, {"use_v2_format": True}))),
        {"W": 12, "N": 32, "G": 8, "bits": 4, "scales": "float16", "qzeros": "int32"},
    ],
    "gptq_gemm": [
        *(_gptq(M, 128, 64, G, kind, **more)
          for M, G in ((5, 8), (18, 2)) for kind in _KINDS for more in ({}, _SHUFFLED | _PERM)),
        *(_gptq(M, 1152, 64, 9, "bfloat16", use_v2_format=True) for M in (1, 70)), _gptq(1, 5184, 64, 81, "float16"),
        *(_gptq(2, 192, 4352, 3, kind, **more) for kind in _KINDS for more in ({}, _SHUFFLED)),
        *(_gptq(3, 1152, 192, 18, kind, **more) for kind in _KINDS for more in ({}, _SHUFFLED)),
        *(_gptq(M, 128, N, 2, kind, **more)
          for M, N in ((70, 128), (130, 4352)) for kind in _KINDS for more in ({}, _SHUFFLED)),
        *(_gptq(9, 96, 96, 3, "float16", bits, use_exllama=shuffled) for bits in (2, 3, 4, 8) for shuffled in _BOTH),
        _gptq(3, 128, 64, 8, "bfloat16", divide=16, **_PERM),
    ],
    "awq_dequantize": [
        {"K": 33, "N": 72, "G": 3, "scales": kind} for kind in ("bfloat16", "float16", "float32")
    ],
    "awq_gemm": [
        *({"M": M, "K": 128, "N": 64, "G": G, "input": kind} for M, G in ((5, 4), (18, 1)) for kind in _KINDS),
        {"M": 16, "K": 1152, "N": 192, "G": 18, "input": "float16"},
        *({"M": M, "K": 128, "N": N, "G": 2, "input": kind} for M, N in ((70, 128), (130, 4352)) for kind in _KINDS),
        {"M": 3, "K": 40, "N": 24, "G": 5, "input": "float16"},
        *({"M": 9, "K": 416, "N": 24, "G": 13, "input": kind, "split_k_iters": 4, "rounding": rounding}
          for kind in _KINDS for rounding in ("vllm", "vllm_triton")),
    ],
    "triton_w4a16_gemm": [
        *({"M": M, "K": 128, "N": 64, "G": 2, "a": kind, **zeros}
          for M in (5, 18) for kind in _KINDS for zeros in ({"zp_bias": 7}, {"qzeros": "int32"})),
        {"M": 9, "K": 40, "N": 24, "G": 5, "a": "bfloat16"},
    ],
    "gptq_marlin_repack": [
        {"W": 64 * bits // 32, "N": 192, "bits": bits, "is_a_8bit": wide, "P": 64, **perm}
        for bits in (4, 8) for wide in _BOTH for perm in ({}, {"perm": "int32"})
    ],
    "awq_marlin_repack": [{"K": 64, "W": 6 * bits, "bits": bits, "is_a_8bit": w} for bits in (4, 8) for w in _BOTH],
    "marlin_unpack": [{"R": 4, "C": 96 * bits, "bits": bits, "is_a_8bit": w} for bits in (4, 8) for w in _BOTH],
    "marlin_zero_points": [{"G": 3, "N": 192, "bits": bits, "is_a_8bit": w} for bits in (4, 8) for w in _BOTH],
    "awq_to_marlin_zero_points": [{"G": 3, "W": 6 * b, "bits": b, "is_a_8bit": w} for b in (4, 8) for w in _BOTH],
    "marlin_unpack_zero_points": [{"G": 3, "W": 6 * b, "bits": b, "is_a_8bit": w} for b in (4, 8) for w in _BOTH],
    "marlin_permute_scales": [
        {"G": 4, "N": 192, "size_k": 128, "group_size": 32, "s": kind} for kind in ("bfloat16", "float32")
    ],
    "marlin_permute_bias": [{"...": (3,), "N": 96, "s": kind} for kind in ("bfloat16", "float32")],
    "marlin_gemm": [
        *(_marlin(M, 128, 64, G, kind, quant_type, **zeros)
          for M, G in ((5, 8), (17, 8)) for kind in _KINDS for quant_type, zeros in _TYPES),
        *(_marlin(M, K, 320, G, kind, quant_type, **zeros)  # a run of tiles, and tiles dealt out by parts
          for M in (3, 12, 24, 40) for K, G in ((128, 2), (640, 5)) for kind in _KINDS for quant_type, zeros in _TYPES),
        *(_marlin(M, 1152, 128, 72, "bfloat16") for M in (1, 9, 70)), _marlin(9, 1152, 128, 18, "bfloat16"),
        *(_marlin(M, 128, 5696, 2, kind, quant_type, **zeros)  # columns enough for few rows without a cluster
          for M in (2, 16) for kind in _KINDS for quant_type, zeros in _TYPES),
        _marlin(9, 64, 5760, 1, "float16", "uint8b128"),
        _marlin(20, 128, 133 * 256, 1, "bfloat16"),  # a tile more than multiprocessors: shares end within one
        _marlin(16, 128, 256, 4, "float16", perm="int32"), _marlin(70, 64, 256, 1, "float16", b_bias="float16"),
        *(_marlin(130, 128, N, 1, kind, "uint8b128") for kind in _KINDS for N in (64, 8640, 8704)),
        _marlin(0, 128, 64, 1, "float16"),
        *(_marlin(130, 128, 192, 2, kind, "uint4", b_zeros="int32") for kind in _KINDS),
        *(_marlin(130, 128, 8704, 2, kind, quant_type, **zeros)
          for kind in _KINDS for quant_type, zeros in (("uint4b8", {}), ("uint4", {"b_zeros": "int32"}))),
        *(_marlin(70, 1536, 64, 12, "bfloat16", quant_type) for quant_type in ("uint4b8", "uint8b128")),
    ],
    "machete_prepack_b": [{"W": 32 * bits // 8, "N": 256, "bits": bits} for bits in (4, 8)],
    "machete_unpack_b": [{"W": 32 * bits // 8, "N": 256, "bits": bits} for bits in (4, 8)],
    "machete_mm": [
        *(_machete(M, 128, 128, 2, kind, quant_type)
          for M in (5, 18) for kind in _KINDS for quant_type in ("uint4", "uint8", "uint4b8", "uint8b128")),
        _machete(3, 192, 128, 1, "float16", "uint4"), _machete(70, 1088, 128, 17, "float16", "uint4"),
        *(_machete(M, K, N, G, kind, quant_type)
          for M, K, N, G in ((70, 1152, 128, 9), (130, 128, 4352, 2))
          for kind in _KINDS for quant_type in ("uint4b8", "uint4")),
        *(_machete(M, 2112, 256, 33, kind, quant_type)  # rounds of chains, the last one not whole
          for M, quant_type in ((33, "uint4b8"), (64, "uint4")) for kind in _KINDS),
    ],
    "allspark_repack_weight": [{"K": 48, "N": 80, "scale": "float16", "zero_point": "float16"}],
    "allspark_unpack_weight": [{"P": 96, "K": 48, "n": 79}],
    "allspark_w8a16_gemm": [
        *({"M": M, "P": P, "K": K, "n": n, "a": kind}
          for M, P, K, n in ((5, 64, 80, 35), (16, 64, 704, 64), (20, 96, 80, 80)) for kind in _KINDS),
        {"M": 0, "P": 32, "K": 16, "n": 32, "a": "float16"},
    ],
    "w4a8_quantize_scales": [
        {"...": (rows,), "C": width, "rounding": rounding}
        for rows, width in ((9, 64), (300, 3)) for rounding in ("vllm", "vllm_native")
    ],
    "convert_packed_uint4b8_to_signed_int4": [{"R": 9, "C": 70}, {"R": 0, "C": 8}],
    "cutlass_encode_and_reorder_int4b": [{"W": 32, "N": 48}],
    "cutlass_decode_int4b": [{"W": 32, "N": 48}],
    "cutlass_pack_scale_fp8": [{"G": 5, "N": 127}],
    "w4a8_dequantize": [{"G": 2, "N": 33}],
    "cutlass_w4a8_mm": [
        _w4a8(9, 1280, 128), _w4a8(16, 384, 256), _w4a8(40, 384, 128), _w4a8(70, 384, 256), _w4a8(150, 128, 128),
        _w4a8(40, 1920, 128),  # groups that take turns come round in their ring
        _w4a8(9, 128, 17152), *(_w4a8(M, 128, N) for M, N in ((20, 8576), (20, 25600), (40, 8576), (193, 8576))),
    ],
    "cutlass_w4a8_moe_mm": [
        _experts(40, 384, 128, 2), _experts(90, 128, 128, 3), _experts(100, 384, 256, 2),
    ],
}  # fmt: skip
"""Axes as in `Contract.examples`, by op."""
