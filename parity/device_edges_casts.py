"""Edge shapes of casts to FP8 and FP4, of microscaling formats, and of what DeepGEMM's experts need around products."""

from __future__ import annotations

import ml_dtypes
import numpy as np

_KINDS = ("bfloat16", "float16", "float32")
_POWERS = (None, "bits", "log2")


def _draw(*shape: int, seed: int = 0) -> np.ndarray:
    """Floats of sizes from 2^-12 to 2^12."""
    rng = np.random.default_rng((*shape, seed))
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))).astype(np.float32)


def _just_above_powers(limit: float, exponents, steps) -> np.ndarray:
    """[R, 128] whose rows' scales, the largest value over `limit`, lie `steps` ulps above powers of two."""
    x = _draw(len(exponents) * len(steps), 128) * np.float32(2.0**-40)
    powers = np.exp2(np.repeat(exponents, len(steps)).astype(np.float64))
    x[:, 5] = powers * (1 + np.tile(steps, len(exponents)) * 2.0**-23) * limit
    return x


_ABOVE = (0, 1, 2, 3, 5, 6, 11, 12, 22, 23)
_EXPONENTS = (-22, -17, -16, -9, -8, -5, -4, -3, -2, -1, 0, 1, 2, 4, 8, 16, 32, 64, 110)


def _middles(kind) -> np.ndarray:
    """[4, 64]: the middles of neighbouring codes of e2m1 and their neighbours, at scales of 1 and 1/4."""
    middle = np.array([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 1e-30])
    x = np.concatenate([middle, np.nextafter(middle.astype(kind), kind(9)), np.nextafter(middle.astype(kind), kind(0))])
    x = np.concatenate([x, -x, [-0.0, np.nan, 6.0, 6.0]]).astype(kind)
    return np.stack([x, x[::-1], x * kind(0.25), x * kind(-0.25)])


def _many_middles() -> np.ndarray:
    """[129, 4096]: the middles of codes of e2m1 and the bfloat16 beside them; a few NaN and infinities in two rows."""
    middle = np.array([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 1e-30]).astype(ml_dtypes.bfloat16)
    bits = middle.view(np.uint16)
    one = np.concatenate([bits, bits + 1, np.maximum(bits, 1) - 1, bits[8:9], bits[8:9]]).view(ml_dtypes.bfloat16)
    one = np.where(one > 6, 6, one.astype(np.float32))  # of groups of 32
    scale = np.exp2(np.arange(129) % 5 - 2.0)[:, None] * np.where(np.arange(129) % 2, -1, 1)[:, None]
    x = np.tile(one, 128) * scale
    x[7, [3, 900, 901]], x[9, [40, 41]] = np.nan, (np.inf, -np.inf)
    return x.astype(ml_dtypes.bfloat16)


_WHOLE = (np.arange(4 * 256).reshape(4, 256) ** 2 * 7 % 23 - 11.0).astype(ml_dtypes.bfloat16)
"""Small whole numbers: sums of them are as well, and with a power of two lie halfway between codes."""


def _overflowing() -> np.ndarray:
    """[1, 32], whose rotation by 32 has sums that are no number among the last 16, and none that is infinite there."""
    x = np.cos(np.arange(32.0) ** 2)[None]
    x[:, :8] = x[:, 16:24] = 3.3e38
    return x.astype(ml_dtypes.bfloat16)


def _groups(axes: dict, size: int) -> dict:
    return axes | {"group_size": size, "G": -(-axes["K"] // size)}


def _tiles(axes: dict, high: int = 128, wide: int = 128) -> dict:
    blocks = {"R": -(-axes["M"] // high), "C": -(-axes["K"] // wide)}
    return axes | blocks | ({} if high == wide == 128 else {"block_m": high, "block_k": wide})


def _token(M: int, K: int, **more) -> dict:
    return {"M": M, "K": K, "G": -(-K // 128), **more}


_LARGE = {"x": np.tile(_draw(129, 256), (1, 16)).astype(ml_dtypes.bfloat16)}
"""More vectors than small kernels are taken for."""

_ROUNDINGS = ("vt", "vllm_native")
_CODES = np.arange(1 << 16, dtype=np.uint16)
_HALVES = np.where((_CODES & 0x7FFF) > 0x7F80, _CODES | 0x40, _CODES).astype(np.uint16).view(ml_dtypes.bfloat16)
"""Every bfloat16; a host's fmaxf does not pass over a signalling NaN."""


def _around() -> np.ndarray:
    """Blocks of 32 whose largest elements lie around 1.75 times each power of two, and at it."""
    x = np.zeros((3 * 280, 32), np.float32)
    size = np.float32(1.75) * np.exp2(np.arange(-150, 128)).astype(np.float32)
    size = np.concatenate([size, np.float32([3.4e38, 0])])
    for part, top in enumerate((size, np.nextafter(size, np.float32(0)), size / np.float32(1.75))):
        x[part * 280 : part * 280 + 280] = top[:, None] * np.float32(np.linspace(-1, 1, 32))
    return x.reshape(-1)


_AROUND = _around()


def _diagonal(size: int) -> np.ndarray:
    """Almost the identity: squares of what it makes have too many digits, and a variance may come out below zero."""
    return (np.eye(size) * (1 + 2.0**-7)).astype(ml_dtypes.bfloat16)


def _signs(size: int, scale: float = 1.0, flipped: tuple[int, int] | None = None) -> np.ndarray:
    """Sylvester's signs times `scale`, but for the one at `flipped`."""
    k = np.arange(size)
    h = scale * (-1.0) ** np.bitwise_count(k[:, None] & k)
    if flipped is not None:
        h[flipped] *= -1
    return h.astype(ml_dtypes.bfloat16)


def _far_apart(rows: int, width: int) -> np.ndarray:
    """Rows at both ends of the exponents, and of single elements far apart."""
    x = _draw(rows, width) * np.exp2(np.resize([-126.0, -133.0, 124.0, 0.0, 126.0], rows))[:, None]
    x[3::5, ::3] *= 2.0**-40
    x[4::5] = np.where(np.arange(width) % 32 == 5, np.clip(x[4::5], -3e38, 3e38), 0)
    return np.clip(x, -3.3e38, 3.3e38).astype(ml_dtypes.bfloat16)


def _zeros_and_more(rows: int, width: int) -> np.ndarray:
    """Blocks of zeros, of equal elements, with a NaN, with an infinity, near the largest number."""
    x = _draw(rows, width)
    x[0, :32], x[0, 32:64], x[1, 40], x[2, 70] = 0, 1.0546875, np.nan, np.inf
    x[2, 98:101] = (1e38, -3e38, -1e38)
    return x.astype(ml_dtypes.bfloat16)


def _many(width: int) -> dict:
    """More rows than small kernels are taken for, and no whole tiles: small and large, special ones, whole numbers."""
    some = [_draw(16, 128), _zeros_and_more(3, 128), _far_apart(10, 128), _WHOLE[:, :128]]
    x = np.concatenate([part.astype(ml_dtypes.bfloat16) for part in some])
    return {"...": (1027,), "K": width, "x": np.resize(x, (1027, width))}


def _leaning(width: int) -> np.ndarray:
    """[1027, width]: groups of 32 of their rotation lie around 1 or -1, which two elements of a vector say."""
    x = np.cos(np.arange(1027.0 * width) ** 2).reshape(1027, width) / 2
    x[:, 0], x[:, 32] = 0.5 * width**0.5, -0.5 * width**0.5
    return x.astype(ml_dtypes.bfloat16)


def _quantised(K: int, N: int, size: int, quant_type: str, **more) -> dict:
    return {"K": K, "N": N, "G": 1 if size == -1 else K // size, "group_size": size, "quant_type": quant_type, **more}


def _ranges(kind) -> np.ndarray:
    """[64, 40]: groups of 16 of zeros, of one sign, of ties, beyond the dtype's range, of tiny numbers."""
    x = _draw(64, 40) / 64
    x[:16, 0], x[:16, 1], x[:16, 2] = 0, 1, -1
    x[:, 3], x[:, 4] = np.tile(np.arange(-8, 8), 4) * 0.5, np.tile(np.arange(16), 4) * 0.5
    x[:, 5] = np.tile([-6e4, 6e4] if kind is np.float16 else [-3e38, 3e38], 32)
    x[:, 6] = np.tile([-3e-8, 6e-8] if kind is np.float16 else [-1e-42, 3e-42], 32)
    return np.clip(x, np.finfo(kind).min, np.finfo(kind).max).astype(kind)


def _scattered(T: int, k: int, E: int, alignment: int, **more) -> dict:
    """As many rows as any choice of experts needs."""
    rows = T * k + min(T * k, E) * (alignment - 1)
    return {"R": -(-rows // alignment) * alignment, "T": T, "k": k, "num_experts": E, "alignment": alignment, **more}


def _columns(M: int, half: int, **more) -> dict:
    return {"M": M, "I": half, "G": half // 128, **more}


def _masked(E: int, T: int, half: int, counts: tuple, **more) -> dict:
    return {"E": E, "T": T, "I": half, "G": half // 128, "counts": np.int32(counts), **more}


def _near_ties() -> np.ndarray:
    """[1, 3, 256]: products so near the middle of two codes that fast functions find the wrong one."""
    x = np.full((1, 3, 256), 0.5)
    x[0, :, 7], x[0, :, 135] = (33.25, 37.75, 44.25), 1
    x[0, :, 9], x[0, :, 137] = (0.12255859375, 2.671875, 0.40625), (1.640625, 1.28125, 1.3671875)
    return x.astype(ml_dtypes.bfloat16)


def _far_down(rows: int, width: int) -> np.ndarray:
    """Gates from -86 to -118, and so large an `up` that their acts are seen."""
    gate = -86 - np.arange(rows * width, dtype=np.float32).reshape(rows, width) / (rows * width / 32)
    return np.concatenate([gate, np.full_like(gate, 3e38)], axis=1).astype(ml_dtypes.bfloat16)


def _every_gate(up: float) -> np.ndarray:
    """[4, 2 * 16384]: every bfloat16 as a gate, against one factor, small ones with small ones."""
    gates = _HALVES.reshape(4, -1)
    return np.concatenate([gates, np.full(gates.shape, up, gates.dtype)], axis=1)


EDGES: dict[str, list[dict]] = {
    "per_token_cast_to_fp8": [
        *(_token(5, K, x=kind, ue8m0=how) for K in (384, 200, 7) for kind in _KINDS for how in _POWERS),
        _token(129, 4096, ue8m0="log2", **_LARGE),
        *(_token(190, 128, x=_just_above_powers(448, _EXPONENTS, _ABOVE), ue8m0=how) for how in ("bits", "log2")),
        _token(0, 256), _token(2, 0), _token(2, 256, x=np.zeros((2, 256), np.float32)),
    ],
    "per_token_cast_to_fp4": [
        *(_groups({"M": 5, "K": 256, "x": kind, "ue8m0": how}, 32) for kind in _KINDS for how in _POWERS),
        *(_groups({"M": 3, "K": K, "x": "bfloat16"}, size) for K, size in ((256, 8), (256, 256), (70, 32), (96, 48))),
        _groups({"M": 129, "K": 4096, **_LARGE}, 32), _groups({"M": 129, "K": 4096, "x": _many_middles()}, 32),
        *(_groups({"M": 4, "K": 64, "x": _middles(kind), "ue8m0": how}, size)
          for kind in (np.float32, np.float16) for how in ("bits", None) for size in (64, 6)),
        _groups({"M": 0, "K": 64}, 32), _groups({"M": 2, "K": 0}, 32),
    ],
    "per_block_cast_to_fp8": [
        *(_tiles({"M": M, "K": K, "x": kind, "ue8m0": how})
          for M, K in ((130, 136), (40, 264), (3, 5)) for kind, how in zip(_KINDS, _POWERS)),
        *(_tiles({"M": 9, "K": 40, "x": kind}, high, wide)
          for kind in _KINDS for high, wide in ((1, 40), (4, 7), (128, 64))),
        _tiles({"M": 0, "K": 8}), _tiles({"M": 8, "K": 0}),
    ],
    "requant_weight_ue8m0": [
        *(_tiles({"M": M, "K": K, "ue8m0": how})
          for M, K in ((130, 136), (40, 264), (3, 5)) for how in ("bits", "log2")),
        *(_tiles({"M": 128, "K": K, "weight": np.tile(np.arange(256, dtype=np.uint8), (128, 1))[:, :K]})
          for K in (256, 250)),
        _tiles({"M": 131, "K": 272}),
        *(_tiles({"M": 9, "K": 40}, high, wide) for high, wide in ((1, 40), (4, 7))), _tiles({"M": 0, "K": 8}),
    ],
    "transform_sf_layout": [
        *({"M": M, "G": G, "C": -(-G // 4) if packed else G, "packed": packed}
          for M, G in ((33, 56), (70, 130), (1, 4), (64, 1)) for packed in (False, True)),
        {"M": 3, "G": 0, "C": 0},
    ],
    "quantize_weights": [
        *(_quantised(K, N, size, quant_type, w=kind, zero_points_after_scales=after)
          for (K, N, size), kind in zip(((128, 72, 64), (96, 37, 32), (130, 8, -1)), _KINDS)
          for quant_type, after in (("uint4b8", False), ("uint8b128", False), ("uint2b2", False), ("uint4", False),
                                    ("uint4", True), ("uint8", True))),
        *(_quantised(64, 40, 16, quant_type, w=_ranges(kind)) for kind in (np.float16, np.float32)
          for quant_type in ("uint3b4", "uint4")),
        _quantised(4, 0, 2, "uint4b8"), _quantised(3, 5, 1, "uint8", w="bfloat16"),
    ],
    "ep_scatter": [
        *(_scattered(T, k, E, align, H=H, G=G) for T, k, E, align, H, G in
          ((37, 4, 9, 16, 144, 3), (1, 8, 40, 128, 32, 1), (1400, 6, 33, 8, 16, 2), (1400, 6, 33, 8, 7, 2),
           (5, 2, 3, 1, 7, 2), (3, 2, 2, 4, 16, 0), (3, 3, 2, 4, 8208, 1))),
        _scattered(300, 8, 5, 4, H=16, G=1, N=12, expert_map="int32", topk_ids="int64"),
        _scattered(4, 0, 3, 8, H=16, G=1), _scattered(2, 2, 3, 8, H=0, G=1),
    ],
    "ep_scatter_ue8m0": [
        *(_scattered(T, k, E, align, H=H, G=G, P=-(-G // 4)) for T, k, E, align, H, G in
          ((37, 4, 9, 16, 144, 7), (1, 8, 40, 128, 32, 1), (1400, 6, 33, 8, 16, 4), (1400, 6, 33, 8, 7, 4),
           (5, 2, 3, 1, 7, 2), (3, 2, 2, 4, 16, 0), (4, 3, 3, 8, 64, 67))),
        _scattered(300, 8, 5, 4, H=16, G=6, P=2, N=12, expert_map="int32", topk_ids="int64"),
        _scattered(4, 0, 3, 8, H=16, G=1, P=1), _scattered(2, 2, 3, 8, H=0, G=1, P=1),
    ],
    "ep_gather": [
        *({"R": 40, "H": H, "T": 9, "k": k, "a": kind}
          for H, k in ((264, 8), (64, 11), (7, 3)) for kind in _KINDS),
        {"R": 40, "H": 2048, "T": 70, "k": 2, "a": "bfloat16"}, {"R": 0, "H": 8, "T": 2, "k": 2},
        {"R": 3, "H": 8, "T": 0, "k": 2}, {"R": 3, "H": 0, "T": 2, "k": 2},
    ],
    "silu_mul_per_token_group_quant_fp8_colmajor": [
        *(_columns(5, 384, x=kind, ue8m0=ue8m0, **more) for kind in _KINDS for ue8m0 in (False, True)
          for more in ({}, {"clamp_limit": 0.75, "alpha": 1.702, "beta": 1.0}, {"clamp_limit": 1.3})),
        _columns(33, 1 << 14, x=np.tile(_draw(33, 256, seed=1) / 16, (1, 128)).astype(ml_dtypes.bfloat16),
                 clamp_limit=7.0),
        _columns(4097, 1024, x=np.tile(_draw(241, 256, seed=2), (17, 8)).astype(ml_dtypes.bfloat16)),
        _columns(4, 1 << 14, x=_every_gate(0.7109375)), _columns(3, 0),
        _columns(2, 128, x=_far_down(2, 128)),
        *(_columns(3, 128, x=np.tile(np.float32([0, -0.0, 1, -1]), (3, 64)).astype(kind), beta=zero)
          for kind in (np.float32, ml_dtypes.bfloat16) for zero in (0.0, -0.0)),
        _columns(4, 1 << 14, x=_every_gate(-1.3), clamp_limit=2.3, ue8m0=True),
    ],
    "silu_mul_masked_quant": [
        *(_masked(5, 7, 256, (0, 7, 1, 0, 3), x=kind, ue8m0=ue8m0) for kind in _KINDS for ue8m0 in (False, True)),
        _masked(33, 9, 128, tuple(i * 5 % 10 for i in range(33)), x="bfloat16"),
        _masked(2, 20, 1408, (20, 11), x="bfloat16"), _masked(1, 3, 128, (0,), x="bfloat16"),
        *(_masked(4, 1, 1 << 14, (1, 1, 1, 1), x=_every_gate(up)[:, None]) for up in (1.0, 0.7109375)),
        _masked(1, 3, 128, (3,), x=_near_ties()),
        _masked(2, 3, 128, (2, 3), scale=np.zeros((2, 1, 3), np.float32).swapaxes(1, 2)),
    ],
    "mxfp4_quant": [
        *({"...": (5,), "K": K, "x": kind, "rounding": rounding}
          for K in (32, 160) for kind in _KINDS for rounding in _ROUNDINGS),
        {"...": (129,), "K": 4096, **_LARGE},
        *({"...": (len(_AROUND) // 32,), "K": 32, "x": _AROUND.reshape(-1, 32), "rounding": rounding}
          for rounding in _ROUNDINGS),
        {"...": (0,), "K": 32}, {"...": (2,), "K": 0}, {"...": (), "K": 96, "x": "bfloat16"},
    ],
    "hadamard": [{"n": n} for n in (2, 4, 8, 16, 64, 256)],
    "hadacore_transform": [
        *({"...": (3,), "K": K, "x": kind}
          for K, kind in zip((1, 2, 4, 8, 16, 32, 128, 512, 1024, 2048, 4096, 32768), 4 * _KINDS)),
        *({"...": (300,), "K": K, "x": "bfloat16"} for K in (16, 32, 64)),
        *({"...": (3,), "K": 1 << power, "x": kind} for power in range(5, 16) for kind in ("bfloat16", "float16")),
        {"...": (5,), "K": 256, "x": "float32"}, {"...": (0,), "K": 64}, {"...": (), "K": 8192, "x": "bfloat16"},
    ],
    "fused_quantize_mx": [
        *({"...": (rows,), "K": K, "R": R, "method": method}
          for rows, K, R in ((33, 160, 32), (3, 2048, 64), (9, 512, 128)) for method in ("quest", "abs_max")),
        *({"...": (3,), "K": 128, "R": 32, "x": _zeros_and_more(3, 128), "h": _diagonal(32), "method": method}
          for method in ("quest", "abs_max")),
        *({"...": (len(x),), "K": 256, "R": R, "x": x, "h": h, "method": method}
          for R in (32, 64, 128) for method in ("quest", "abs_max")
          for x, h in ((_zeros_and_more(3, 256), _signs(R)), (_far_apart(10, 256), _signs(R)),
                       (_draw(3, 256).astype(ml_dtypes.bfloat16), _signs(R, -0.3, flipped=(R - 1, R - 3))))),
        *({"...": (4,), "K": 256, "R": R, "x": _WHOLE, "h": _signs(R, 0.25), "method": method}
          for R in (32, 64, 128) for method in ("quest", "abs_max")),
        *({**_many(R), "R": R, "method": method, **h}
          for R in (32, 64, 128) for method in ("quest", "abs_max") for h in ({}, {"h": _signs(R, 0.25)})),
        *({**_many(32), "R": 32, "h": _signs(32, flipped=at)} for at in ((0, 0), (31, 31))),
        *({"...": (1027,), "K": R, "R": R, "x": _leaning(R)} for R in (64, 128)),
        {"...": (0,), "K": 64, "R": 32}, {"...": (2,), "K": 0, "R": 64}, {"...": (), "K": 128, "R": 64},
    ],
    "fused_quantize_nv": [
        *({"...": (4,), "K": 256, "R": R, "x": _WHOLE, "h": _signs(R, 0.25), "input_global_scale": np.float32([1])}
          for R in (16, 32, 64, 128)),
        {"...": (1,), "K": 32, "R": 32, "x": _overflowing(), "input_global_scale": np.float32([5])},
        *({"...": (rows,), "K": K, "R": R}
          for rows, K, R in ((29, 144, 16), (33, 160, 32), (3, 2048, 64), (9, 512, 128))),
        {"...": (3,), "K": 128, "R": 16, "x": _zeros_and_more(3, 128), "h": _diagonal(16),
         "input_global_scale": np.float32([0])},
        *({"...": (len(x),), "K": 256, "R": R, "x": x, "h": h, "input_global_scale": np.float32([scale])}
          for R, scale in ((16, 1e-3), (32, 300), (64, 1e30), (128, 5))
          for x, h in ((_zeros_and_more(3, 256), _signs(R)), (_far_apart(10, 256), _signs(R)),
                       (_draw(3, 256).astype(ml_dtypes.bfloat16), _signs(R, -0.3, flipped=(R // 2, 0))))),
        *({**_many(R), "R": R, "input_global_scale": np.float32([300]), **h}
          for R in (16, 32, 64, 128) for h in ({}, {"h": _signs(R, 0.25)})),
        {"...": (0,), "K": 64, "R": 32}, {"...": (), "K": 16, "R": 16}, {"...": (), "K": 48, "R": 16},
    ],
}  # fmt: skip
"""Axes as in `Contract.examples`, by op."""
