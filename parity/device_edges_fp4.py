"""Edge shapes of FP4 products: chunks of 128 k and less, chains beside each other or not, tiles of scales, NaN."""

from __future__ import annotations

import numpy as np

from vtlab.ops import nvfp4


def _marlin(M: int, K: int, N: int, kind: str = "bfloat16", group: int = 16, **more) -> dict:
    given = {"weight_global_scale": "float32", "kind": kind} if group == 16 else {}
    return {"M": M, "K": K, "N": N, "G": K // group, "input": kind, **given, **more}


def _scales(rows: int, blocks: int, powers: bool, tiled: bool, every: bool = False, low: int = 120) -> np.ndarray:
    """Bytes of scales around 1, signs among those of e4m3. every: NaN, zeros, the smallest, the largest, too."""
    rng = np.random.default_rng([rows, blocks])
    scales = rng.integers(low, low + 14, (rows, blocks)) if powers else rng.integers(0x28, 0x48, (rows, blocks))
    if not powers:
        scales |= rng.integers(0, 2, (rows, blocks)) << 7
    if every:
        found = (0, 255, 1) if powers else (0, 0x7F, 7, 0x7E, 0xFF, 0x80)
        scales[: len(found), 0] = found[:rows]
        scales[-1, -1] = found[1]
    scales = scales.astype(np.uint8)
    if not tiled:
        return scales
    tiles = nvfp4.tile(scales)
    empty = nvfp4.tile(np.ones_like(scales)) == 0
    return np.where(empty, np.uint8(0xFF), tiles)  # what fills tiles up is nobody's, a NaN just as well


def _both(M: int, N: int, K: int, powers: bool = False, tiled: bool = True, every: bool = False, **more) -> dict:
    group = 32 if powers else 16
    names = ("a_sf", "b_sf") if powers else ("block_scale_a", "block_scale_b")
    scales = {name: _scales(rows, K // group, powers, tiled, every) for name, rows in zip(names, (M, N))}
    return {"M": M, "N": N, "B": K // 2, **scales, "is_sf_swizzled_layout": tiled, **more}


def _alone(M: int, N: int, K: int, tiled=True, every=False, x: str = "bfloat16", powers=False, **more) -> dict:
    name, group = ("b_sf", 32) if powers else ("block_scale_b", 16)
    scales = _scales(N, K // group, powers, tiled, every, low=108)  # activations of 3e38 overflow no sum
    return {"M": M, "N": N, "B": K // 2, "x": x, name: scales, "is_sf_swizzled_layout": tiled, **more}


EDGES: dict[str, list[dict]] = {
    "apply_fp4_marlin_linear": [
        *(_marlin(M, 128, 64, kind) for M in (1, 17) for kind in ("bfloat16", "float16")),
        *(_marlin(M, K, 320, kind, group) for M in (3, 12, 24, 40) for K in (128, 640)
          for kind, group in (("bfloat16", 16), ("float16", 16), ("bfloat16", 32))),
        _marlin(9, 1152, 64), _marlin(70, 576, 128, "float16", bias="float16"), _marlin(5, 192, 128, bias="bfloat16"),
        *(_marlin(M, K, N, group=32) for M, K, N in ((16, 64, 128), (70, 640, 64), (3, 1152, 192))),
        _marlin(66, 128, 192, group=32, bias="bfloat16"), _marlin(0, 128, 64), _marlin(70, 1152, 64),
        *(_marlin(M, 128, 5696, kind, group)
          for M in (2, 16) for kind, group in (("bfloat16", 16), ("float16", 16), ("bfloat16", 32))),
        *(_marlin(130, 128, 8704, kind, group)
          for kind, group in (("bfloat16", 16), ("float16", 16), ("bfloat16", 32))),
    ],
    "nvfp4_marlin_process_scales": [
        {"R": 33, "N": 192, "marlin_scales": kind, "a_dtype": a, **more}
        for kind, a in (("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("bfloat16", "float16"))
        for more in ({}, {"marlin_scales": np.zeros((33, 192), np.float16)})
    ] + [{"R": 33, "N": 192, "marlin_scales": np.linspace(0.01, 90, 33 * 192).reshape(33, 192).astype(np.float16)}],
    "nvfp4_marlin_process_global_scale": [{"...": (3, 130), "a_dtype": "float16"}, {"...": (0,)}],
    "mxfp4_marlin_process_scales": [{"R": 5, "N": 196, "fp8_activations": raised} for raised in (False, True)],
    "marlin_int4_fp8_preprocess": [
        {"K": 96, "W": 9}, {"K": 96, "W": 9, "G": 3, "qzeros": "int32"}, {"K": 6, "W": 70, "G": 6, "qzeros": "int32"},
    ],
    "marlin_act_int8_process_scales": [{"G": 37, "N": 72, "s": kind} for kind in ("bfloat16", "float16")],
    "cutlass_scaled_fp4_mm": [
        _both(1, 64, 128), _both(16, 70, 96, tiled=False), _both(17, 130, 64), _both(9, 66, 1184, every=True),
        _both(70, 130, 544, tiled=False, out_dtype="float16"), _both(130, 5, 640, out_dtype="float16"),
        _both(3, 130, 256, tiled=False, every=True), _both(5, 20, 48), _both(5, 20, 80, tiled=False, every=True),
        _both(70, 192, 640, tiled=False, every=True), _both(200, 64, 1152, out_dtype="float16"), _both(130, 4352, 128),
        _both(40, 192, 1152), _both(12, 200, 640, tiled=False), _both(24, 130, 384),
        _both(3, 64, 9216),
        *(_both(M, 8512, 256) for M in (2, 11, 20, 40)), _both(130, 8704, 256), _both(66, 17152, 256),
        _both(9, 24, 128, out_dtype="float32"), _both(2, 5, 0), _both(0, 5, 32), _both(2, 0, 32, tiled=False),
    ],
    "matmul_nvfp4": [
        _alone(1, 64, 128), _alone(16, 70, 96, tiled=False), _alone(17, 130, 64, out_dtype="float16"),
        _alone(9, 66, 1184, every=True), _alone(70, 130, 544, tiled=False),
        _alone(3, 130, 256, tiled=False, every=True),
        _alone(70, 192, 640, every=True), _alone(130, 64, 1152, tiled=False), _alone(130, 4352, 128, tiled=False),
        _alone(40, 192, 1152), _alone(12, 200, 640, out_dtype="float16"), _alone(24, 130, 384),
        _alone(3, 64, 9216, every=True), *(_alone(M, 8512, 256) for M in (2, 11, 20, 40)),
        _alone(130, 8704, 256), _alone(66, 17152, 256),
        _alone(5, 20, 48, every=True), _alone(5, 20, 128, x="float32"), _alone(3, 9, 64, out_dtype="float32"),
        _alone(2, 5, 0), _alone(0, 5, 32),
    ],
    "matmul_mxfp4": [
        _alone(1, 64, 128, powers=True), _alone(16, 70, 96, tiled=False, powers=True),
        _alone(17, 130, 64, powers=True, out_dtype="float16"), _alone(9, 66, 1184, every=True, powers=True),
        _alone(70, 192, 640, every=True, powers=True), _alone(130, 4352, 128, tiled=False, powers=True),
        _alone(40, 192, 1152, powers=True), _alone(12, 200, 640, powers=True), _alone(24, 130, 384, powers=True),
        *(_alone(M, 8512, 256, powers=True) for M in (2, 11, 20, 40)), _alone(130, 8704, 256, powers=True),
        _alone(66, 17152, 256, powers=True),
        _alone(5, 20, 128, x="float32", powers=True), _alone(3, 9, 64, out_dtype="float32", powers=True),
        _alone(2, 5, 0, powers=True), _alone(0, 5, 32, powers=True),
    ],
    "matmul_mxf4_bf16_tn": [
        _both(1, 64, 128, True), _both(16, 70, 96, True, tiled=False), _both(17, 130, 64, True),
        _both(9, 66, 1184, True, every=True), _both(70, 130, 544, True, tiled=False), _both(130, 5, 640, True),
        _both(70, 192, 640, True, tiled=False, every=True), _both(200, 64, 1152, True), _both(130, 4352, 128, True),
        _both(3, 130, 256, True, tiled=False, every=True), _both(12, 200, 640, True, every=True),
        _both(2, 5, 0, True), _both(0, 5, 32, True),
    ],
}  # fmt: skip
"""Axes as in `Contract.examples`, by op."""
