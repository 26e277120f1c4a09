"""Shapes for 8-bit products: around tiles, stages of 128 k, sixteen codes, and blocks of scales."""

from __future__ import annotations

import numpy as np

from vtlab.oracle.fp8_matmul import draw_codes

_INT8 = {"a": "int8"}


def _scaled(M, N, K, each=False, **more) -> dict:
    """`each`: a scale for every row and column."""
    return {"M": M, "N": N, "K": K, **({"sa": (M, 1), "sb": (1, N)} if each else {}), **more}


def _not_a_number(M, K) -> np.ndarray:
    """Codes [M, K] with a NaN in a corner."""
    codes = draw_codes("M", "K")(np.random.default_rng(M), {"M": M, "K": K}).astype(np.uint8)
    codes[-1, -1] = 0xFF
    return codes


def _blocks(M, N, K, block_n=128, block_k=128, **more) -> dict:
    """Scales for blocks of block_n x block_k."""
    return {"M": M, "N": N, "K": K, "G": -(-K // block_k), "R": -(-N // block_n), "block_n": block_n,
            "block_k": block_k, **more}  # fmt: skip


def _exponents(*shape: int) -> np.ndarray:
    """Words of four exponents, of scales from 2^-127 on, most of them around 1/32."""
    codes = np.random.default_rng(shape).integers(119, 127, (*shape, 4)).astype(np.uint8)
    codes.flat[:1] = 0
    return codes.view(np.int32)[..., 0]


def _deep(M, N, K, packed=False, **more) -> dict:
    wide = {"scale_a": _exponents(M, -(-K // 512)), "G": -(-K // 512)} if packed else {"G": K // 128}
    return {"M": M, "N": N, "K": K, "R": -(-N // 128), "H": K // 128, **wide, **more}


def _experts(*counts: int, alignment: int) -> dict:
    """Tokens of experts 0, 1, ... in segments of `alignment`."""
    indices = [np.repeat(np.int32([e, -1]), [n, -n % alignment]) for e, n in enumerate(counts)]
    return {"m_indices": np.concatenate(indices), "alignment": alignment}


EDGES: dict[str, list[dict]] = {
    "matmul_fp8_cutlass": [
        {"M": 1, "N": 80, "K": 144}, {"M": 17, "N": 64, "K": 2064}, {"M": 70, "N": 144, "K": 256},
        {"M": 3, "N": 16, "K": 0}, {"M": 2, "N": 0, "K": 32}, {"M": 70, "N": 80, "K": 528, "out_dtype": "float32"},
    ],
    "matmul_fp8_cublaslt": [
        {"M": 16, "N": 64, "K": 128}, {"M": 5, "N": 208, "K": 1040},
        {"M": 66, "N": 80, "K": 528, "out_dtype": "float32"},
        {"M": 3, "N": 48, "K": 560, "out_dtype": "float32"},
    ],
    "cutlass_scaled_mm": [
        _scaled(130, 72, 144, True, **_INT8, out_dtype="float16"),
        *(_scaled(M, N, K, True) for M, N, K in ((1, 129, 272), (16, 65, 128), (65, 7, 48), (129, 200, 400))),
        _scaled(300, 136, 144, bias="float16"), _scaled(2, 72, 1168, True, bias="bfloat16"),
        *(_scaled(M, N, K, True, **_INT8, bias="bfloat16")
          for M, N, K in ((1, 129, 272), (17, 65, 640), (129, 200, 144))),
        *(_scaled(M, N, K, **_INT8, out_dtype="float16")
          for M, N, K in ((66, 64, 8208), (257, 64, 8208), (3, 16, 4368))),
        _scaled(70, 64, 2064, True), _scaled(33, 136, 528, True, bias="bfloat16", out_dtype="float16"),
        _scaled(3, 5, 0),
        _scaled(3, 66, 1030, out_dtype="float16"),
        _scaled(130, 70, 37, True), _scaled(3, 9, 144, a=_not_a_number(3, 144)),
        _scaled(3, 9, 37, a=_not_a_number(3, 37)),
        _scaled(70, 66, 1031, True, **_INT8), _scaled(385, 4240, 16, True),
        _scaled(65, 8464, 16, True),
        *(_scaled(M, N, 16, True) for M in (3, 20, 70) for N in (3176, 4232, 5288, 6344, 7400)),
        *(_scaled(M, N, 16, **_INT8) for M in (3, 20, 70) for N in (3176, 4232, 6344)),
        _scaled(300, 4240, 16), _scaled(300, 4240, 16, **_INT8),
    ],
    "cutlass_scaled_mm_azp": [
        _scaled(M, N, K, True, azp=azp, bias=bias)
        for M, N, K, azp, bias in ((1, 64, 128, "int32", None), (70, 130, 272, "int32", "float16"),
                                   (140, 136, 160, None, "bfloat16"), (3, 5, 77, "int32", None),
                                   (385, 4240, 16, None, None), (65, 8464, 16, None, None))
    ],
    "scaled_mm_block": [
        *(_blocks(M, N, K) for M, N, K in ((1, 64, 128), (17, 200, 272), (130, 264, 400), (66, 8, 144))),
        _blocks(3, 70, 130, 64, 32), _blocks(2, 9, 1300, 1, 1100, out_dtype="float32"),
        _blocks(70, 66, 300, out_dtype="float16"), *(_blocks(M, 72, 272, out_dtype="float16") for M in (9, 70)),
        _blocks(5, 130, 260, a="int8"), _blocks(2, 3, 0),
        _blocks(3, 9, 144, a=_not_a_number(3, 144)),
    ],
    "fp8_gemm_nt": [
        _deep(1, 64, 128), _deep(16, 192, 256, True), _deep(70, 64, 640, True), _deep(129, 320, 1152),
        _deep(385, 4288, 128), _deep(65, 8512, 128),
    ],
    "m_grouped_fp8_gemm_nt_contiguous": [
        {"M": 256, "E": 3, **_experts(3, 0, 128, alignment=128), **_deep(256, 192, 256)},
        {"M": 48, "E": 2, **_experts(17, 9, alignment=16), **_deep(48, 64, 128, True)},
        {"M": 18, "E": 4, **_experts(3, 6, 2, alignment=6), **_deep(18, 64, 128)},
    ],
    "m_grouped_fp8_gemm_nt_masked": [
        {"E": 3, **_deep(70, 192, 256), "masked_m": np.int32([70, 0, 65])},
        {"E": 2, **_deep(9, 64, 512), "scale_a": _exponents(2, 9, 1), "G": 1, "masked_m": np.int32([1, 9])},
        {"E": 2, **_deep(130, 64, 128), "masked_m": np.int32([129, 2])},
    ],
}  # fmt: skip
