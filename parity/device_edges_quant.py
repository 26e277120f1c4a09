"""Edge shapes of the quantising kernels: teams of lanes, blocks, rows too long for registers, groups of every kind."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np

from .quant_codes import MAGNITUDES

_RNG = np.random.Generator(np.random.PCG64(17))


def _ties(*shape: int, kind=ml_dtypes.bfloat16) -> np.ndarray:
    """Small multiples of powers of two under a largest value of 7 * 2^n: many quotients lie halfway between codes."""
    x = _RNG.integers(-31, 32, shape) * np.exp2(_RNG.integers(-9, 4, shape))
    x[..., 0] = 448
    return x.astype(kind)


def _no_numbers(*shape: int) -> np.ndarray:
    """Bfloat16 with a NaN of either sign, an infinity and zeros of either sign here and there."""
    x = _ties(*shape)
    for value, step in ((0x7FC1, 53), (0xFFC1, 59), (0x7F80, 1997), (0xFF80, 2003), (0x8000, 31), (0x0000, 37)):
        x.reshape(-1).view(np.uint16)[step // 3 :: step] = value
    return x


def _mantissas(rows: int, width: int) -> np.ndarray:
    """Bfloat16 of all mantissas, up to six powers of two under their block's largest, which goes through all too."""
    x = np.arange(rows * width).reshape(-1, 16) * 5
    x[:, 15] = np.arange(len(x)) * 3 % 128
    x[:, :15] = x[:, 15:] - x[:, :15] % (6 * 128)
    return (np.uint16(0x3F80) + x + (x & 1) * 0x8000).astype(np.uint16).view(ml_dtypes.bfloat16).reshape(rows, width)


def _near_ties(largest: float) -> np.ndarray:
    """A row of quotients around halfway between two codes, where a product with the reciprocal may err."""
    scale = np.float32(largest) / np.float32(448)
    middle = np.float32([(a + b) / 2 for a, b in itertools.pairwise(MAGNITUDES)]) * scale
    row = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))])
    row = np.append(row[row < largest], np.float32(largest))
    return np.append(row, np.zeros(-len(row) % 8, np.float32))


_BF16 = ml_dtypes.bfloat16
_16, _F16, _F32 = ({"x": kind, "weight": kind} for kind in ("bfloat16", "float16", "float32"))
_HALVES = np.tile(np.float32(224 * 2.0**-149) * np.arange(1, 17, 2, np.float32)[:, None], 8)
"""Their 448th part lies halfway between two subnormal numbers."""
_KINDS = ("bfloat16", "float16", "float32")
_ALL = ("vt", "vllm", "vllm_native")
_UB = {"scale_ub": "float32"}


def _tiny(rows: int, width: int) -> np.ndarray:
    """Here and there a zero, or a number whose square is 2^-133."""
    x = np.random.Generator(np.random.PCG64(18)).standard_normal((rows, width))
    x[3::5, ::16], x[4::7, ::40] = 0, 2.0**-66 * 0.9
    return x.astype(_BF16)


_HEAVY = np.where(np.arange(1040) % 300 < 200, 1e30, 1.0).astype(_BF16)
"""Of some groups, and of a row, scales are large ones."""
_HEIGHT = (270,)  # more rows than take their weights early
_RINGS = (384, 640, 1152, 1664, 2176, 2688, 3200, 4352, 5248, 6272, 7296)
"""Widths, one for each of rings.SHAPES and one more."""

_NORMS = [
    *({"...": (3,), "H": H, **_16} for H in (8, 40, 256, 264, 2056, 8192, 8200, 33)),
    *({"...": (3,), "H": H, **_16, "residual": "bfloat16"} for H in (24, 128, 1032, 5128)),
    {"...": _HEIGHT, "H": 264, **_16}, {"...": _HEIGHT, "H": 3080, **_16},
    *({"...": _HEIGHT, "H": H, **_16, "residual": "bfloat16"} for H in (264, 2888, 3080)),
    {"...": (3,), "H": 72, **_F16, "residual": "float16"}, {"...": (3,), "H": 40, **_F32, "residual": "bfloat16"},
    {"...": (0,), "H": 64, **_16}, {"...": (), "H": 40, **_16},
    *({"...": (3,), "H": 520, **_16, "residual": "bfloat16", "rounding": r} for r in ("vllm",)),
    {"...": (70,), "H": 72, **_16, "rounding": "vllm"},
]  # fmt: skip


def _gates(*shape: int) -> np.ndarray:
    """Bfloat16 whose gates make e^-x of any size, among them none of a float32's, beside large and small factors."""
    x = _RNG.standard_normal(shape) * np.exp2(_RNG.integers(-3, 6, shape))
    half = shape[-1] // 2
    for value, step in ((-86.5, 61), (-88, 67), (-95, 71), (90, 73), (np.nan, 1999), (np.inf, 2003), (-np.inf, 2011)):
        gates = x[:, :half].ravel()
        gates[step // 2 :: step] = value
        x[:, :half] = gates.reshape(-1, half)
    x[::7, half:] *= 1e30
    x[3::7, half:] *= 1e-30
    x[5], x[6] = x[5, 1], 0
    x[8, half:], x[9, half:] = 1e37, -0.0
    x[10, :half], x[10, half:] = np.linspace(-87, -98, half), 1e37
    return x.astype(_BF16)


def _two_partials() -> dict:
    """Rows whose squares sum to 2^21, for a root of 1/32, in the tree's order alone.

    Small ones, in the second half, would vanish beside the large ones of the first. 11.25 * 9 / 32 lies halfway between
    two bfloat16, and those on two sides of halfway between two codes.
    """
    x = np.full(2048, 2.0**-6)
    x[:1024] = np.tile([127.5, 11.25, 34 / 32, 7 / 32, 3 / 32, 0, 0, 0], 128)
    weight = np.where(x == 127.5, 9.375, 9)
    x = np.tile(x, (*_HEIGHT, 1))
    return {"...": _HEIGHT, "H": 2048, "x": x.astype(_BF16), "weight": weight.astype(_BF16), "eps": 0.0}


def _steps_of_fp4(largest: float, kind=np.float32) -> np.ndarray:
    """Blocks whose products with the factor lie on the steps of e2m1 and an ulp beside them, of both signs."""
    steps = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * np.float32(largest / 6)
    row = np.concatenate([steps, np.nextafter(steps, np.float32(0)), np.nextafter(steps, np.float32(1e9))])
    row = np.concatenate([row, -row])
    blocks = np.zeros((-(-len(row) // 15), 16), np.float32)
    blocks[np.divmod(np.arange(len(row)), 15)] = row
    blocks[:, 15] = largest
    return blocks.reshape(1, -1).astype(kind)


def _groups(case: dict, size: int) -> dict:
    width = case.get("H", case.get("K", case.get("D", 0)))
    return {**case, "group_size": size, "G": -(-width // size)}


def _scales_at_ties() -> np.ndarray:
    """Blocks whose sixth part, an ulp off, lies halfway between two codes of e4m3 or beside: a sixth that is a division
    gives others than a product."""
    middle = np.float32([6 * (a + b) / 2 for a, b in itertools.pairwise(MAGNITUDES)])
    largest = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))])
    blocks = np.zeros((len(largest), 16), np.float32)
    blocks[:, 0] = largest
    return blocks.reshape(1, -1)


_LINEAR, _TILES = {"is_sf_swizzled_layout": False}, {"is_sf_swizzled_layout": True}
_G = {"input_global_scale": np.float32([1])}

EDGES: dict[str, list[dict]] = {
    "scaled_fp4_quant": [
        *({"...": (3,), "K": K, "x": kind, "rounding": rounding, **layout}
          for K in (16, 80) for kind in _KINDS for rounding in ("vt", "vllm_native") for layout in (_LINEAR, _TILES)),
        *({"...": (rows,), "K": K, "x": "bfloat16", **_TILES}
          for rows, K in ((1, 4096), (127, 16), (128, 64), (129, 48))),
        {"...": (2, 3), "K": 64, "x": "bfloat16", **_TILES},
        *({"...": (260,), "K": 2064, "x": "bfloat16", **layout} for layout in (_LINEAR, _TILES)),  # many vectors
        *({"...": (260,), "K": 2064, "x": make(260, 2064), **_TILES, **_G} for make in (_ties, _no_numbers)),
        *({"...": (rows,), "K": K, "x": make(rows, K), "input_global_scale": np.float32([g]), **_TILES}
          for rows, K in ((7, 1040), (260, 2064)) for make in (_mantissas, _no_numbers) for g in (537.6, 128 / 129)),
        *({"...": (1,), "K": 48, "x": _steps_of_fp4(largest), "rounding": rounding, **_LINEAR, **_G}
          for largest in (6.0, 6.0 * 448, 3.0, 6 * 1.0625) for rounding in ("vt", "vllm_native")),
        *({"...": (2,), "K": 32, "x": "bfloat16", "input_global_scale": np.float32([g]), "rounding": r, **_LINEAR}
          for g in (0, -3, 1e-40, 1e-30, 1e38) for r in ("vt", "vllm_native")),
        {"...": (1,), "K": _scales_at_ties().size, "x": _scales_at_ties(), **_LINEAR, **_G},
        {"...": (3,), "K": 64, "x": np.zeros((3, 64), np.float32), **_TILES},
        {"...": (0,), "K": 32, **_TILES}, {"...": (2,), "K": 0, **_LINEAR}, {"...": (), "K": 32, **_LINEAR},
    ],
    "dequantize_nvfp4": [
        *({"...": (rows,), "B": half, "M": rows, "C": half // 8, "out_dtype": kind, **_LINEAR}
          for rows, half in ((3, 8), (5, 40), (260, 1032)) for kind in _KINDS),
        *({"...": (rows,), "B": half, "M": -(-rows // 128) * 128, "C": -(-half // 32) * 4, "out_dtype": kind, **_TILES}
          for rows, half in ((1, 2048), (129, 24), (128, 32)) for kind in _KINDS),
        {"...": (1,), "B": 128, "M": 1, "C": 16, "packed": np.arange(128, dtype=np.uint8)[None] * 2 + 1,
         "scale": np.arange(0x78, 0x88, dtype=np.uint8)[None], **_LINEAR},
        {"...": (0,), "B": 8, "M": 0, "C": 1, **_LINEAR}, {"...": (2,), "B": 0, "M": 2, "C": 0, **_LINEAR},
    ],
    "swizzle_blockscale": [
        *({"...": lead, "M": rows, "C": columns}
          for rows, columns in ((1, 1), (127, 3), (128, 4), (129, 5), (300, 33)) for lead in ((), (2,))),
        {"...": (2,), "M": 0, "C": 4}, {"...": (), "M": 4, "C": 0},
    ],
    "quant_fp8_static": [
        *({"...": (3,), "K": K, "x": kind, "rounding": rounding}
          for K in (1, 264, 4104) for kind in _KINDS for rounding in ("vt", "vllm")),
        {"...": (4,), "K": 40, "x": _ties(4, 40), "scale": np.float32([2])},
        {"...": (0,), "K": 8}, {"...": (2,), "K": 0}, {"...": (), "K": 24, "x": "bfloat16", "rounding": "vllm_native"},
    ],
    "dynamic_scaled_fp8_quant": [
        *({"...": (3,), "K": K, "x": kind, "rounding": rounding}
          for K in (7, 264) for kind in _KINDS for rounding in _ALL),
        *({"...": (2200,), "K": 1000, "x": kind} for kind in ("bfloat16", "float16")),
        {"...": (300,), "K": 1032, "x": "bfloat16"}, {"...": (2,), "K": 0},
        {"...": (2,), "K": 16, "x": np.zeros((2, 16), np.float32)},
        {"...": (2,), "K": 16, "x": np.zeros((2, 16), np.float32), "rounding": "vllm"},
        {"...": (4,), "K": 40, "x": _ties(4, 40)},
    ],
    "dynamic_per_token_scaled_fp8_quant": [
        *({"...": (5,), "K": K, "x": "bfloat16"} for K in (1, 8, 24, 72, 256, 264, 2056, 8192, 8200)),
        *({"...": (3,), "K": 72, "x": kind, "rounding": rounding, **_UB} for kind in _KINDS for rounding in _ALL),
        {"...": (3,), "K": 7, "x": "float32"}, {"...": (0,), "K": 8}, {"...": (), "K": 40, "x": "bfloat16"},
        *({"...": (4,), "K": 296, "x": _ties(4, 296, kind=k)} for k in (ml_dtypes.bfloat16, np.float32)),
        *({"...": (), "K": len(_near_ties(top)), "x": _near_ties(top), "rounding": r}
          for top in (3.0, 100.0) for r in ("vt", "vllm_native")),
    ],
    "per_token_group_quant_fp8": [
        *(_groups({"...": (5,), "K": 768, "x": "bfloat16"}, size) for size in (8, 16, 32, 64, 128, 256)),
        *(_groups({"...": (3,), "K": 256, "x": kind, "rounding": rounding, "ue8m0": ue8m0}, 64)
          for kind in _KINDS for rounding in _ALL for ue8m0 in (False, True)),
        *(_groups({"...": (7,), "K": 384, "x": kind, "column_major": True}, 128) for kind in _KINDS),
        *(_groups({"...": (3,), "K": K, "x": "bfloat16", "ue8m0": True, "column_major": True}, size)
          for K, size in ((100, 32), (96, 48), (40, 128), (7, 1))),
        _groups({"...": (0,), "K": 64}, 32), _groups({"...": (), "K": 64, "x": "bfloat16"}, 32),
        _groups({"...": (4,), "K": 256, "x": _ties(4, 256)}, 32),
        _groups({"...": (130,), "K": 4096, "x": "bfloat16", "column_major": True}, 128),
        _groups({"...": (129,), "K": 4096, "x": _ties(129, 4096), "rounding": "vllm"}, 64),
        _groups({"...": (2,), "K": 16, "x": np.zeros((2, 16), np.float32), "eps": 1e-44}, 8),
        _groups({"...": (8,), "K": 8, "x": _HALVES, "eps": 1e-44}, 8),
        _groups({"...": (1,), "K": 16, "x": np.float32([[1e-40, *[3e-41] * 15]]), "eps": 1e-44}, 16),
    ],
    "rms_norm_quant_fp8": [
        *_NORMS, {"...": (3,), "H": 264, **_16, "gemma": True},
        {"...": (3,), "H": 264, **_16, "rounding": "vllm_native"},
        {"...": (3,), "H": 264, **_16, "gemma": True, "rounding": "vllm"},
        {**_two_partials(), "scale": np.float32([0.083])},
    ],
    "rms_norm_gated_quant_fp8": [
        {"...": (5, 4), "D": 128, **_16, "gate": "bfloat16"}, {"...": (3,), "D": 7, "sigmoid_gate": True},
        {"...": (8193,), "D": 64, **_16, "gate": "bfloat16"},
        {"...": (0,), "D": 8}, {"...": (2,), "D": 0}, {"...": (2,), "D": 264, **_16, "gate": "bfloat16"},
        *({"...": (9,), "D": D, **_16, "gate": "bfloat16", "sigmoid_gate": s}
          for D, s in ((8, False), (72, True), (256, True))),
    ],
    "rms_norm_dynamic_per_token_quant": [
        *({"quant_dtype": "float8_e4m3fn", **case} for case in _NORMS),
        *({"...": (3,), "H": H, **_16, "quant_dtype": "int8", "rounding": r}
          for H in (40, 264) for r in ("vt", "vllm")),
        *({"...": (3,), "H": 264, **_16, "quant_dtype": "float8_e4m3fn", "rounding": r, **_UB} for r in _ALL),
        {"...": (3,), "H": 33, **_F16, "quant_dtype": "int8"},
        {"...": _HEIGHT, "H": 3080, **_16, "quant_dtype": "int8"},
        *({"...": (513,), "H": H, **_16, "quant_dtype": "float8_e4m3fn"} for H in _RINGS),
        {"...": (4300,), "H": 272, **_16, "quant_dtype": "float8_e4m3fn"},  # a third row of some teams
        {"...": (513,), "H": 1040, **_16, **_UB, "quant_dtype": "float8_e4m3fn", "rounding": "vllm"},
        {"...": (513,), "H": 1040, **_16, "quant_dtype": "float8_e4m3fn", "rounding": "vllm_native"},
        {"...": (513,), "H": 1040, "x": "bfloat16", "weight": _HEAVY, "quant_dtype": "float8_e4m3fn"},
        {"...": (513,), "H": 1040, "x": _tiny(513, 1040), "weight": "bfloat16", "quant_dtype": "float8_e4m3fn"},
        {"...": (3,), "H": 264, **_16, "residual": "bfloat16", "quant_dtype": "int8"},
        {**_two_partials(), "quant_dtype": "float8_e4m3fn"},
        {"...": _HEIGHT, "H": 1032, **_16, "quant_dtype": "float8_e4m3fn", "rounding": "vllm_native"},
    ],
    "rms_norm_per_block_quant": [
        *(_groups(case, 128) for case in _NORMS),
        *(_groups({"...": (3,), "H": 520, **_16, **_UB, "column_major": True, "rounding": r}, size)
          for size in (8, 64, 256) for r in ("vt", "vllm")),
        _groups({"...": (70,), "H": 64, **_16, "residual": "bfloat16", "column_major": True}, 32),
        _groups({"...": (3,), "H": 96, **_16, "residual": "bfloat16"}, 48), _groups(_two_partials(), 128),
        *(_groups({"...": (513,), "H": H, **_16}, 128 << H // 128 % 2) for H in _RINGS),
        _groups({"...": (513,), "H": 1040, **_16, **_UB, "column_major": True, "rounding": "vllm"}, 128),
        _groups({"...": (513,), "H": 1040, "x": "bfloat16", "weight": _HEAVY}, 128),
        _groups({"...": _HEIGHT, "H": 4352, **_16}, 128),
    ],
    "silu_and_mul_quant": [
        *({"...": (301,), "D": 384, "x": _gates(301, 768), "scale": np.float32([scale]), "rounding": rounding}
          for rounding in ("vt", "vllm") for scale in (0.02, 1e-36)),
        *({"...": (3,), "D": D, "x": kind, "rounding": rounding}
          for D in (1, 264, 2056) for kind in _KINDS for rounding in ("vt", "vllm")),
        {"...": (300,), "D": 8, "x": "bfloat16"}, {"...": (0,), "D": 8}, {"...": (2,), "D": 0},
        *({"...": (33,), "D": 2056, "x": kind, "rounding": rounding}
          for kind in ("bfloat16", "float16") for rounding in ("vt", "vllm")),
    ],
    "silu_and_mul_per_block_quant": [
        *(_groups({"...": (3,), "D": 256, "x": kind, "rounding": rounding, **_UB}, 64)
          for kind in _KINDS for rounding in ("vt", "vllm")),
        *(_groups({"...": (5,), "D": 768, "x": "bfloat16", "column_major": True}, size) for size in (8, 128, 256)),
        _groups({"...": (3,), "D": 100, "x": "bfloat16", "column_major": True}, 32),
        *(_groups({"...": (274,), "D": 1920, "x": "bfloat16", "column_major": True, "rounding": rounding}, 128)
          for rounding in ("vt", "vllm")),
        _groups({"...": (3,), "D": 33, "x": "float32", "rounding": "vllm"}, 10), _groups({"...": (0,), "D": 64}, 32),
        _groups({"...": (3,), "D": 512, "x": "bfloat16", "rounding": "vllm"}, 256),
        *(_groups({"...": (401,), "D": 384, "x": _gates(401, 768), "rounding": rounding}, 128)
          for rounding in ("vt", "vllm")),
    ],
}  # fmt: skip
"""Axes as in `Contract.examples`, by op."""
