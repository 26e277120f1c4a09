"""Weights and activations of 8 bits, int8 or e4m3: scales of a tensor, a row, a token, a block of 128 x 128."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import ml_dtypes
import numpy as np

from vtlab import ops
from vtlab.ops.numerics import round_to

from .matrix import InRows, Scheme, new_memory, together
from .stored import E4M3, FLOATS, Part, Site, Stored

_LOW, _HIGH = -128, 127
_BYTE, _INT8, _INT32, _FLOAT32 = map(np.dtype, (np.uint8, np.int8, np.int32, np.float32))


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    """What codes of e4m3 stand for, float64."""
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


@dataclass(frozen=True, eq=False)
class Int8(InRows):
    """w[n, k] = weight[n, k] * scale[n]; activations get a scale of their own, or each row of them does.

    weight : int8 [N, K]. scale : float32 [1, N]. sums : int32 [1, N], of the columns, where activations have a zero
    point. input_scale : float32 [1], None for one a token. zero_point : int32 [1], of a scale that is given. dtype : of
    `expanded`.
    """

    scale: np.ndarray
    sums: np.ndarray | None
    input_scale: np.ndarray | None
    zero_point: np.ndarray | None
    dtype: np.dtype

    def multiply(self, x, out=None, room=new_memory):
        right = {"out_dtype": x.dtype, "out": out}
        target, scales = room("codes", x.shape, _INT8), room("scales", (x.shape[0], 1), _FLOAT32)
        if self.input_scale is not None:
            codes = ops.static_scaled_int8_quant(x, self.input_scale, azp=self.zero_point, out=target)
            if self.sums is None:
                return ops.cutlass_scaled_mm(codes, self.weight.T, self.input_scale, self.scale, **right)
            return ops.cutlass_scaled_mm_azp(codes, self.weight.T, self.input_scale, self.scale, self.sums, **right)
        if self.sums is None:
            codes, scale = ops.dynamic_scaled_int8_quant(x, out=together(target, scales))
            return ops.cutlass_scaled_mm(codes, self.weight.T, scale, self.scale, **right)
        zeros = room("zero points", (x.shape[0], 1), _INT32)
        codes, scale, azp = ops.dynamic_scaled_int8_quant(x, symmetric=False, out=together(target, scales, zeros))
        return ops.cutlass_scaled_mm_azp(codes, self.weight.T, scale, self.scale, self.sums, azp=azp, **right)

    def expanded(self) -> np.ndarray:
        return round_to(self.weight * self.scale.T.astype(np.float64), self.dtype)

    def joins(self, other: Self) -> bool:
        return True

    @classmethod
    def stacked(cls, parts: Sequence[Self]) -> Self:
        """Activations that had scales by part get the range that holds all of theirs."""
        weight = np.concatenate([part.weight for part in parts])
        scale = np.concatenate([part.scale for part in parts], 1)
        first = replace(parts[0], weight=weight, scale=scale)
        if first.input_scale is None:
            return first
        scales = np.concatenate([part.input_scale for part in parts])
        if first.zero_point is None:
            return replace(first, input_scale=scales.max(keepdims=True))
        zeros = np.concatenate([part.zero_point for part in parts]).astype(np.float32)
        high, low = (scales * (_HIGH - zeros)).max(), (scales * (_LOW - zeros)).min()
        step = (high - low) / np.float32(_HIGH - _LOW)
        azp = np.rint(np.float32(_LOW) - low / step).astype(np.int32)
        return replace(first, input_scale=step.reshape(1), zero_point=azp.reshape(1))

    def ready(self) -> Self:
        """With the sums that take the activations' zero points away again."""
        if self.sums is None:
            return self
        sums = self.weight.sum(1, dtype=np.int32)[None]
        return replace(self, sums=sums if self.zero_point is None else sums * self.zero_point)


@dataclass(frozen=True)
class W8A8Int8(Scheme):
    """compressed-tensors' int-quantized. channels : a scale for every row of W. static : activations have a scale.
    symmetric : and no zero point."""

    activations: ClassVar = True

    channels: bool
    static: bool
    symmetric: bool

    def stored(self, site: Site) -> Mapping[str, Stored]:
        scale = Stored((site.rows, 1) if self.channels else (), FLOATS)
        found = {"weight": Stored((site.rows, site.columns), ("int8",)), "weight_scale": scale}
        if self.static:
            found["input_scale"] = Stored((), FLOATS)
            if not self.symmetric:
                found["input_zero_point"] = Stored((), ("int8", "int32"))
        return found

    def matrix(self, part: Part, dtype: np.dtype) -> Int8:
        scale = part.scales("weight_scale").reshape(1, -1)
        zero = part.get("input_zero_point")
        return Int8(
            np.ascontiguousarray(part.tensors["weight"]),
            np.ascontiguousarray(np.broadcast_to(scale, (1, part.rows))),
            None if self.symmetric else np.zeros((1, 0), np.int32),
            part.scale("input_scale") if self.static else None,
            None if zero is None else zero.reshape(1).astype(np.int32),
            np.dtype(dtype),
        )


@dataclass(frozen=True, eq=False)
class Fp8(InRows):
    """w[n, k] = e4m3(weight[n, k]) * scale, of all or of row n; activations get a scale, or each row of them does.

    weight : codes, uint8 [N, K]. scale : float32 [1] or [1, N]. input_scale : float32 [1], None for one a token.
    dtype : of `expanded`.
    """

    scale: np.ndarray
    input_scale: np.ndarray | None
    dtype: np.dtype

    def multiply(self, x, out=None, room=new_memory):
        target = room("codes", x.shape, _BYTE)
        if self.input_scale is None:
            scales = room("scales", (x.shape[0], 1), _FLOAT32)
            codes, scale = ops.dynamic_per_token_scaled_fp8_quant(x, out=together(target, scales))
        else:
            codes, scale = ops.quant_fp8_static(x, self.input_scale, out=target), self.input_scale
        return ops.cutlass_scaled_mm(codes, self.weight.T, scale, self.scale, out_dtype=x.dtype, out=out)

    def expanded(self) -> np.ndarray:
        scale = self.scale if self.scale.ndim == 1 else self.scale.T
        return round_to(e4m3_values(self.weight) * scale, self.dtype)

    def joins(self, other: Self) -> bool:
        return True

    @classmethod
    def stacked(cls, parts: Sequence[Self]) -> Self:
        """Scales of tensors become the largest one, and codes follow it."""
        weight = np.concatenate([part.weight for part in parts])
        scale = np.concatenate([part.scale for part in parts], parts[0].scale.ndim - 1)
        if scale.ndim == 1 and len(set(scale.tolist())) == 1:
            scale = scale[:1]
        elif scale.ndim == 1:
            weight, scale = ops.requantize_with_max_scale(weight, scale, [part.rows for part in parts])
        inputs = [part.input_scale for part in parts]
        common = None if inputs[0] is None else np.max(inputs, axis=0)
        return replace(parts[0], weight=weight, scale=scale, input_scale=common)


@dataclass(frozen=True)
class W8A8Fp8(Scheme):
    """FP8 as AutoFP8, ModelOpt and compressed-tensors store it. channels : a scale for every row of W.
    static : activations have a scale. packed : false for weights alone, whose activations stay as they are."""

    channels: bool
    static: bool
    packed: bool = True

    @property
    def activations(self) -> bool:
        return self.packed

    def stored(self, site: Site) -> Mapping[str, Stored]:
        scale = Stored((site.rows, 1) if self.channels else (), FLOATS)
        found = {"weight": Stored((site.rows, site.columns), E4M3), "weight_scale": scale}
        return found | ({"input_scale": Stored((), FLOATS)} if self.static else {})

    def matrix(self, part: Part, dtype: np.dtype) -> Fp8:
        scale = part.scales("weight_scale")
        scale = np.ascontiguousarray(scale.reshape(1, -1)) if self.channels else scale.reshape(1)
        given = part.scale("input_scale") if self.static else None
        return Fp8(part.codes("weight"), scale, given, np.dtype(dtype))


@dataclass(frozen=True, eq=False)
class Fp8Blocks(InRows):
    """w[n, k] = e4m3(weight[n, k]) * scale[n / block_n, k / block_k]; activations get a scale for block_k neighbours.

    weight : codes, uint8 [N, K]. scale : float32 [ceil(N / block_n), ceil(K / block_k)]. dtype : of `expanded`.
    """

    scale: np.ndarray
    block: tuple[int, int]
    dtype: np.dtype

    def multiply(self, x, out=None, room=new_memory):
        height, width = self.block
        scales = room("scales", (x.shape[0], x.shape[1] // width), _FLOAT32)
        target = together(room("codes", x.shape, _BYTE), scales)
        codes, scale = ops.per_token_group_quant_fp8(x, group_size=width, out=target)
        return ops.scaled_mm_block(
            codes, self.weight, scale, self.scale, block_n=height, block_k=width, out_dtype=x.dtype, out=out
        )

    def expanded(self) -> np.ndarray:
        spread = self.scale.repeat(self.block[0], 0)[: self.rows].repeat(self.block[1], 1)[:, : self.columns]
        return round_to(e4m3_values(self.weight) * spread, self.dtype)

    def joins(self, other: Self) -> bool:
        return self.rows % self.block[0] == 0

    @classmethod
    def stacked(cls, parts: Sequence[Self]) -> Self:
        arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in ("weight", "scale"))
        return cls(*arrays, parts[0].block, parts[0].dtype)


@dataclass(frozen=True)
class W8A8Blocks(Scheme):
    """FP8 in blocks: DeepSeek's and Qwen3's `weight_scale_inv`, compressed-tensors' `weight_scale`.

    packed : false for weights alone."""

    block: tuple[int, int]
    suffix: str
    packed: bool = True

    @property
    def activations(self) -> bool:
        return self.packed

    def stored(self, site: Site) -> Mapping[str, Stored]:
        scales = tuple(-(-size // block) for size, block in zip((site.rows, site.columns), self.block))
        return {"weight": Stored((site.rows, site.columns), E4M3), self.suffix: Stored(scales, FLOATS)}

    def matrix(self, part: Part, dtype: np.dtype) -> Fp8Blocks:
        return Fp8Blocks(part.codes("weight"), part.scales(self.suffix), self.block, np.dtype(dtype))
