"""Weights of 4 bits in floating point: NVFP4 with its scales of 16 neighbours, MXFP4 with its powers of two of 32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import ml_dtypes
import numpy as np

from vtlab import ops
from vtlab.ops import nvfp4
from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import round_to

from .matrix import InRows, Scheme, new_memory, together
from .stored import BYTES, E4M3, FLOATS, Part, Site, Stored

MX_BLOCK = 32
_BIAS, _NO_SCALE = 127, 255
_BYTE = np.dtype(np.uint8)
_BFLOAT16 = ("bfloat16",)


def _only_bfloat16(dtype: np.dtype, what: str) -> None:
    if dtype != ml_dtypes.bfloat16:
        raise ContractError("load", "dtype", dtype, f"bfloat16 for products of {what}")


@dataclass(frozen=True, eq=False)
class NvFp4(InRows):
    """w[n, k] = e2m1(weight[n, k]) * e4m3(scales[n, k / 16]) * global_scale.

    weight : uint8 [N, K / 2], two codes a byte. scales : uint8 [N, K / 16], in tiles once it is ready.
    global_scale : float32 [1]. input_scale : float32 [1], the factor that activations are quantised with, None where
    they are not. alpha : float32 [1], global_scale / input_scale. dtype : of `expanded`.
    """

    held: ClassVar[int] = 2

    scales: np.ndarray
    global_scale: np.ndarray
    input_scale: np.ndarray | None
    alpha: np.ndarray | None
    dtype: np.dtype

    def multiply(self, x, out=None, room=new_memory):
        if self.input_scale is None:
            return ops.matmul_nvfp4(x, self.weight, self.scales, self.global_scale, out_dtype=x.dtype, out=out)
        rows, blocks = x.shape[0], self.columns // nvfp4.BLOCK
        tiles = room("scales", nvfp4.tiled_shape(rows, blocks), _BYTE)
        codes, scales = ops.scaled_fp4_quant(
            x, self.input_scale, out=together(room("codes", (rows, self.columns // 2), _BYTE), tiles)
        )
        return ops.cutlass_scaled_fp4_mm(
            codes, self.weight, scales, self.scales, self.alpha, out_dtype=x.dtype, out=out
        )

    def expanded(self) -> np.ndarray:
        return ops.dequantize_nvfp4(
            self.weight, self.scales, self.global_scale, out_dtype=self.dtype, is_sf_swizzled_layout=False
        )

    def joins(self, other: Self) -> bool:
        same = self.global_scale[0] == other.global_scale[0]
        return same and (self.input_scale is None or self.input_scale[0] == other.input_scale[0])

    @classmethod
    def stacked(cls, parts: Sequence[Self]) -> Self:
        weight, scales = (np.concatenate([getattr(part, name) for part in parts]) for name in ("weight", "scales"))
        return replace(parts[0], weight=weight, scales=scales)

    def ready(self) -> Self:
        if self.input_scale is None:
            _only_bfloat16(self.dtype, "NVFP4 and rows of 16 bits")
        return replace(self, scales=ops.swizzle_blockscale(self.scales))


@dataclass(frozen=True)
class Nvfp4(Scheme):
    """NVFP4 as compressed-tensors (global scales are what values were multiplied with) or ModelOpt (what codes are to
    be multiplied with) stores it. quantised : activations are, too."""

    ops: ClassVar = ("matmul_nvfp4",)

    modelopt: bool
    quantised: bool

    @property
    def activations(self) -> bool:
        return self.quantised

    @property
    def dtypes(self) -> tuple[str, ...]:
        return Scheme.dtypes if self.quantised else _BFLOAT16

    @property
    def _names(self) -> tuple[str, str, str]:
        if self.modelopt:
            return "weight", "weight_scale_2", "input_scale"
        return "weight_packed", "weight_global_scale", "input_global_scale"

    def stored(self, site: Site) -> Mapping[str, Stored]:
        weight, for_all, given = self._names
        site.divides(weight, "K", nvfp4.BLOCK, site.columns)
        found = {
            weight: Stored((site.rows, site.columns // 2), BYTES),
            "weight_scale": Stored((site.rows, site.columns // nvfp4.BLOCK), E4M3),
            for_all: Stored((), FLOATS),
        }
        return found | ({given: Stored((), FLOATS)} if self.quantised else {})

    def matrix(self, part: Part, dtype: np.dtype) -> NvFp4:
        weight, for_all, given = self._names
        scale, factor = part.scale(for_all), part.scale(given) if self.quantised else None
        if not self.modelopt:
            scale = np.float32(1) / scale
        elif factor is not None:
            factor = np.float32(1) / factor
        alpha = None if factor is None else np.float32(1) / factor * scale
        codes = np.ascontiguousarray(part.tensors[weight])
        return NvFp4(codes, part.block_scales("weight_scale"), scale, factor, alpha, np.dtype(dtype))


@dataclass(frozen=True, eq=False)
class MxFp4(InRows):
    """w[n, k] = e2m1(weight[n, k]) * 2^(scales[n, k / 32] - 127); activations are quantised alike, or stay.

    weight : uint8 [N, K / 2], two codes a byte. scales : uint8 [N, K / 32], in tiles once it is ready.
    one : float32 [1], None where activations stay as they are. dtype : of `expanded`.
    """

    held: ClassVar[int] = 2

    scales: np.ndarray
    one: np.ndarray | None
    dtype: np.dtype

    def multiply(self, x, out=None, room=new_memory):
        if self.one is None:
            return ops.matmul_mxfp4(x, self.weight, self.scales, out_dtype=x.dtype, out=out)
        rows, blocks = x.shape[0], self.columns // MX_BLOCK
        target = together(room("codes", (rows, self.columns // 2), _BYTE), room("exponents", (rows, blocks), _BYTE))
        codes, scales = ops.mxfp4_quant(x, out=target)
        tiles = ops.swizzle_blockscale(scales, out=room("scales", nvfp4.tiled_shape(rows, blocks), _BYTE))
        return ops.matmul_mxf4_bf16_tn(codes, self.weight, tiles, self.scales, self.one, out=out)

    def expanded(self) -> np.ndarray:
        values = nvfp4.unpack(self.weight).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        powers = self.scales.repeat(MX_BLOCK, 1).astype(np.int32) - _BIAS
        return round_to(np.ldexp(values, powers), self.dtype)

    def joins(self, other: Self) -> bool:
        return True

    @classmethod
    def stacked(cls, parts: Sequence[Self]) -> Self:
        weight, scales = (np.concatenate([getattr(part, name) for part in parts]) for name in ("weight", "scales"))
        return replace(parts[0], weight=weight, scales=scales)

    def ready(self) -> Self:
        _only_bfloat16(self.dtype, "MXFP4")
        return replace(self, scales=ops.swizzle_blockscale(self.scales))


@dataclass(frozen=True)
class Mxfp4(Scheme):
    """compressed-tensors' mxfp4-pack-quantized. quantised : activations are, too."""

    ops: ClassVar = ("matmul_mxfp4",)
    dtypes: ClassVar = _BFLOAT16

    quantised: bool

    @property
    def activations(self) -> bool:
        return self.quantised

    def stored(self, site: Site) -> Mapping[str, Stored]:
        site.divides("weight_packed", "K", MX_BLOCK, site.columns)
        return {
            "weight_packed": Stored((site.rows, site.columns // 2), BYTES),
            "weight_scale": Stored((site.rows, site.columns // MX_BLOCK), BYTES),
        }

    def matrix(self, part: Part, dtype: np.dtype) -> MxFp4:
        codes, scales = (np.ascontiguousarray(part.tensors[name]) for name in ("weight_packed", "weight_scale"))
        if (scales == _NO_SCALE).any():
            raise part.error("weight_scale", "a NaN, byte 255", "powers of two, bytes to 254")
        return MxFp4(codes, scales, np.ones(1, np.float32) if self.quantised else None, np.dtype(dtype))
