"""Weights of 2, 3, 4 or 8 bits in 32-bit words under scales of groups, activations in 16 bits: GPTQ's and AWQ's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from vtlab import ops
from vtlab.ops import lowbit

from .matrix import Matrix, Scheme, new_memory
from .stored import FLOATS, WORDS, Part, Site, Stored


def groups_of(site: Site, suffix: str, group_size: int) -> int:
    """Groups along K; -1 is one group for all of it."""
    if group_size == -1:
        return 1
    site.divides(suffix, f"groups of {group_size} in K =", group_size, site.columns)
    return site.columns // group_size


def check_groups(part: Part, suffix: str, g_idx: np.ndarray, groups: int) -> np.ndarray:
    """The group of every row of K, refused where there is no such group."""
    wrong = (g_idx < 0) | (g_idx >= groups)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise part.error(suffix, f"group {g_idx[at]} for row {at}", f"groups from 0 to {groups - 1}")
    return np.ascontiguousarray(g_idx)


@dataclass(frozen=True, eq=False)
class GroupedWords(Matrix):
    """w[n, k] = (q[k, n] - zero[g, n]) * scales[g, n], codes along K.

    qweight : int32 [K * bits / 32, N]. scales : [G, N] in the model's dtype. qzeros : int32 [G, N * bits / 32], less 1
    unless `v2`. g_idx : int32 [K], the group of every row, or None where they are neighbours.
    """

    qweight: np.ndarray
    scales: np.ndarray
    qzeros: np.ndarray
    g_idx: np.ndarray | None
    bits: int
    v2: bool

    @property
    def rows(self) -> int:
        return self.qweight.shape[1]

    @property
    def columns(self) -> int:
        return self.qweight.shape[0] * 32 // self.bits

    def multiply(self, x, out=None, room=new_memory):
        return ops.gptq_gemm(
            x, self.qweight, self.qzeros, self.scales, self.g_idx, use_v2_format=self.v2, bits=self.bits, out=out
        )

    def expanded(self) -> np.ndarray:
        w = ops.gptq_dequantize(
            self.qweight, self.scales, self.qzeros, self.g_idx, bits=self.bits, use_v2_format=self.v2
        )
        return np.ascontiguousarray(w.T)

    def joins(self, other: Self) -> bool:
        if (self.g_idx is None) != (other.g_idx is None):
            return False
        return self.g_idx is None or np.array_equal(self.g_idx, other.g_idx)

    @classmethod
    def stacked(cls, parts: Sequence[Self]) -> Self:
        arrays = (np.concatenate([getattr(p, name) for p in parts], 1) for name in ("qweight", "scales", "qzeros"))
        return cls(*arrays, parts[0].g_idx, parts[0].bits, parts[0].v2)


@dataclass(frozen=True)
class Gptq(Scheme):
    """GPTQ's tensors: qweight, qzeros, scales, g_idx.

    v2 : zero points are stored as they are, not less one. order : rows are in activation order.
    """

    ops: ClassVar = ("gptq_gemm",)

    bits: int
    group_size: int
    symmetric: bool
    order: bool
    v2: bool

    def stored(self, site: Site) -> Mapping[str, Stored]:
        groups, run = groups_of(site, "qweight", self.group_size), lowbit.run_length(self.bits)
        site.divides("qweight", "K", run, site.columns)
        site.divides("qzeros", "N", run, site.rows)
        return {
            "qweight": Stored((site.columns * self.bits // 32, site.rows), WORDS),
            "qzeros": Stored((groups, site.rows * self.bits // 32), WORDS),
            "scales": Stored((groups, site.rows), FLOATS),
            "g_idx": Stored((site.columns,), WORDS, optional=not self.order),
        }

    def matrix(self, part: Part, dtype: np.dtype) -> GroupedWords:
        scales, qzeros = part.scales("scales", dtype), np.ascontiguousarray(part.tensors["qzeros"])
        g_idx = part.get("g_idx")
        if g_idx is not None:
            g_idx = check_groups(part, "g_idx", g_idx, len(scales))
            neighbours = np.arange(part.columns) // (part.columns // len(scales))
            if np.array_equal(g_idx, neighbours):
                g_idx = None
            elif not self.order:
                raise part.error("g_idx", "rows in activation order", "neighbours in a group, as desc_act is false")
        if self.symmetric:
            middle = (1 << (self.bits - 1)) - (0 if self.v2 else 1)
            found = np.unique(lowbit.unpack(qzeros, self.bits, 1))
            if found.tolist() != [middle]:
                raise part.error("qzeros", f"zero points {found.tolist()[:8]}", f"{middle} alone, as sym is true")
        return GroupedWords(np.ascontiguousarray(part.tensors["qweight"]), scales, qzeros, g_idx, self.bits, self.v2)


@dataclass(frozen=True)
class PackQuantized(Scheme):
    """compressed-tensors' pack-quantized: GPTQ's words, lying along the rows of W, zero points as they are.

    order : rows are in activation order.
    """

    ops: ClassVar = ("gptq_gemm",)

    bits: int
    group_size: int
    symmetric: bool
    order: bool

    def stored(self, site: Site) -> Mapping[str, Stored]:
        groups, run = groups_of(site, "weight_packed", self.group_size), lowbit.run_length(self.bits)
        site.divides("weight_packed", "K", run, site.columns)
        site.divides("weight_packed", "N", run, site.rows)
        found = {
            "weight_packed": Stored((site.rows, site.columns * self.bits // 32), WORDS),
            "weight_scale": Stored((site.rows, groups), FLOATS),
            "weight_shape": Stored((2,), ("int64", "int32")),
        }
        if not self.symmetric:
            found["weight_zero_point"] = Stored((site.rows * self.bits // 32, groups), WORDS)
        if self.order:
            found["weight_g_idx"] = Stored((site.columns,), WORDS)
        return found

    def matrix(self, part: Part, dtype: np.dtype) -> GroupedWords:
        if part.tensors["weight_shape"].tolist() != [part.rows, part.columns]:
            raise part.error("weight_shape", part.tensors["weight_shape"].tolist(), [part.rows, part.columns])
        scales = np.ascontiguousarray(part.scales("weight_scale", dtype).T)
        if self.symmetric:
            middle = np.full(scales.shape, 1 << (self.bits - 1), np.int32)
            qzeros = lowbit.pack(middle, self.bits, 1)
        else:
            qzeros = np.ascontiguousarray(part.tensors["weight_zero_point"].T)
        g_idx = check_groups(part, "weight_g_idx", part.tensors["weight_g_idx"], len(scales)) if self.order else None
        qweight = np.ascontiguousarray(part.tensors["weight_packed"].T)
        return GroupedWords(qweight, scales, qzeros, g_idx, self.bits, True)


@dataclass(frozen=True, eq=False)
class InterleavedWords(Matrix):
    """w[n, k] = (q[k, n] - zero[g, n]) * scales[g, n], codes of 4 bits along N in AWQ's order.

    qweight : int32 [K, N / 8]. scales : [G, N] in the model's dtype. qzeros : int32 [G, N / 8].
    """

    qweight: np.ndarray
    scales: np.ndarray
    qzeros: np.ndarray

    @property
    def rows(self) -> int:
        return self.qweight.shape[1] * 8

    @property
    def columns(self) -> int:
        return self.qweight.shape[0]

    def multiply(self, x, out=None, room=new_memory):
        return ops.awq_gemm(x, self.qweight, self.scales, self.qzeros, out=out)

    def expanded(self) -> np.ndarray:
        return np.ascontiguousarray(ops.awq_dequantize(self.qweight, self.scales, self.qzeros).T)

    def joins(self, other: Self) -> bool:
        return True

    @classmethod
    def stacked(cls, parts: Sequence[Self]) -> Self:
        return cls(*(np.concatenate([getattr(p, name) for p in parts], 1) for name in ("qweight", "scales", "qzeros")))


@dataclass(frozen=True)
class Awq(Scheme):
    """AWQ's tensors in the layout of its GEMM kernel: qweight, qzeros, scales."""

    ops: ClassVar = ("awq_gemm",)

    group_size: int

    def stored(self, site: Site) -> Mapping[str, Stored]:
        groups = groups_of(site, "qweight", self.group_size)
        site.divides("qweight", "N", 8, site.rows)
        return {
            "qweight": Stored((site.columns, site.rows // 8), WORDS),
            "qzeros": Stored((groups, site.rows // 8), WORDS),
            "scales": Stored((groups, site.rows), FLOATS),
        }

    def matrix(self, part: Part, dtype: np.dtype) -> InterleavedWords:
        words = (np.ascontiguousarray(part.tensors[name]) for name in ("qweight", "qzeros"))
        qweight, qzeros = words
        return InterleavedWords(qweight, part.scales("scales", dtype), qzeros)
