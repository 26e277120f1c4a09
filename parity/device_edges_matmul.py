"""Shapes for the matrix products: around tiles, pieces of 16 k, chains, and blocks that share the chains."""

_BF16 = {"a": "bfloat16", "b": "bfloat16"}
_MIXED = {"a": "float16", "b": "float32", "out_dtype": "bfloat16"}
_F32 = {"a": "float32", "b": "float32"}

EDGES: dict[str, list[dict]] = {
    "matmul_bt": [
        *({"M": M, "N": 9, "K": K, **_BF16} for M in (1, 2, 3, 8) for K in (16, 528, 2064)),
        *({"M": M, "N": 4101, "K": 48, **_BF16} for M in (1, 2, 3, 5)),
        {"M": 2, "N": 7, "K": 4640, "a": "float32", "b": "bfloat16"}, {"M": 1, "N": 3, "K": 3088, **_F32},
        *({"M": M, "N": 5, "K": 1040, **_MIXED} for M in (1, 3, 6)),
        {"M": 5, "N": 6, "K": 520, **_BF16}, {"M": 7, "N": 3, "K": 17, **_F32},  # not whole pieces
        {"M": 17, "N": 130, "K": 528, **_BF16}, {"M": 12, "N": 70, "K": 160, **_MIXED},
        {"M": 40, "N": 66, "K": 288, **_BF16}, {"M": 35, "N": 66, "K": 16, **_F32},
        {"M": 70, "N": 65, "K": 176, **_BF16},
        {"M": 100, "N": 3, "K": 1040, **_F32}, {"M": 66, "N": 67, "K": 270, **_MIXED},
        {"M": 3, "N": 4, "K": 0}, {"M": 0, "N": 4, "K": 16}, {"M": 3, "N": 0, "K": 16},
    ],
    "matmul": [
        {"M": 1, "N": 136, "K": 544, **_BF16}, {"M": 9, "N": 8, "K": 16, **_F32}, {"M": 3, "N": 130, "K": 32, **_BF16},
        {"M": 40, "N": 72, "K": 272, **_MIXED}, {"M": 70, "N": 8, "K": 160, **_BF16},
        {"M": 5, "N": 7, "K": 300, **_MIXED},
        {"M": 3, "N": 0, "K": 16},
    ],
    "batched_matmul": [
        {"G": 3, "M": 2, "K": 144, "N": 136, "a": "bfloat16"}, {"G": 2, "M": 40, "K": 272, "N": 8, "a": "bfloat16"},
        {"G": 2, "M": 67, "K": 32, "N": 64, "a": "float32", "out_dtype": "bfloat16"},
        {"G": 3, "M": 3, "K": 5, "N": 3, "a": "float16"},
        {"G": 0, "M": 3, "K": 16, "N": 8}, {"G": 2, "M": 3, "K": 0, "N": 8},
    ],
}  # fmt: skip
