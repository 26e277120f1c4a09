"""Vectors from and to memory while code is being made: what stands there, masks of the tails, storage dtypes.

Reading widens exactly and writing rounds once, to nearest even, in integer steps that every processor has.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from ..tier import tier
from .vectors import F32, F64, I1, I8, I16, I32, I64, LANES, V, constant, splat

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
"""Storage dtypes by their numbers."""


def pointer(builder, address, index, size, kind):
    """A pointer to `kind` at element `index` of `size` bytes each."""
    at = builder.add(address, builder.mul(index, I64(size)))
    return builder.inttoptr(at, kind.as_pointer())


def _iota(element):
    return ir.Constant(ir.VectorType(element, LANES), [element(i) for i in range(LANES)])


def _masked(builder, name, element, *args):
    kind = ir.VectorType(element, LANES)
    tag = ("f" if element in (F32, F64) else "i") + str({F32: 32, F64: 64}.get(element) or element.width)
    full, mask = f"llvm.masked.{name}.v{LANES}{tag}.p0", ir.VectorType(I1, LANES)
    shape = (
        ir.FunctionType(kind, [kind.as_pointer(), I32, mask, kind])
        if name == "load"
        else ir.FunctionType(ir.VoidType(), [kind, kind.as_pointer(), I32, mask])
    )
    found = builder.module.globals.get(full) or ir.Function(builder.module, shape, full)
    return builder.call(found, args)


def size_of(element) -> int:
    return {F32: 4, F64: 8}.get(element) or element.width // 8


def read(builder, address, index, count, element, align=None):
    """Elements index ... index + 15 of those at `address`, 0 from `count` on; all of them where `count` is None."""
    kind = ir.VectorType(element, LANES)
    at = pointer(builder, address, index, size_of(element), kind)
    if count is None:
        return builder.load(at, align=align or size_of(element))
    full = builder.icmp_signed(">=", count, I64(LANES))
    with builder.if_else(full, likely=True) as (then, otherwise):
        with then:
            whole, from_whole = builder.load(at, align=size_of(element)), builder.block
        with otherwise:
            left = splat(builder, builder.trunc(count, I32)).value
            mask = builder.icmp_signed("<", _iota(I32), left)
            none = ir.Constant(kind, [element(0)] * LANES)
            part, from_part = _masked(builder, "load", element, at, I32(size_of(element)), mask, none), builder.block
    result = builder.phi(kind)
    result.add_incoming(whole, from_whole)
    result.add_incoming(part, from_part)
    return result


def write(builder, value, address, index, count):
    """The first `count` lanes to elements index ... of those at `address`; all of them where `count` is None."""
    element = value.type.element
    at = pointer(builder, address, index, size_of(element), value.type)
    if count is None:
        builder.store(value, at, align=size_of(element))
        return
    full = builder.icmp_signed(">=", count, I64(LANES))
    with builder.if_else(full, likely=True) as (then, otherwise):
        with then:
            builder.store(value, at, align=size_of(element))
        with otherwise:
            left = splat(builder, builder.trunc(count, I32)).value
            mask = builder.icmp_signed("<", _iota(I32), left)
            _masked(builder, "store", element, value, at, I32(size_of(element)), mask)


def prefetch(builder, at) -> None:
    """Send for the line of memory at an address that need not be mapped."""
    there = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [there, I32, I32, I32])
    found = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(found, [builder.inttoptr(at, there), I32(0), I32(2), I32(1)])


def from_bfloat16(codes: V) -> V:
    """int16 lanes as float32: exact."""
    return (codes.to(I32) << 16).bits(F32)


def from_float16(codes: V) -> V:
    """int16 or int32 lanes as float32, exact: a product moves the exponent, subnormals included; inf and NaN stay."""
    wide = codes.to(I32) if codes.element == I16 else codes
    magnitude = wide & 0x7FFF
    scaled = ((magnitude << 13).bits(F32) * 2.0**112).bits(I32)
    special = (magnitude << 13) | 0x7F800000
    return ((magnitude > 0x7BFF).where(special, scaled) | ((wide & 0x8000) << 16)).bits(F32)


def widened_float16(codes: V) -> V:
    """`from_float16` of int16 lanes by the processor's own conversion where it has one, which makes signalling NaN
    quiet, as the arithmetic that follows would: for numbers that are only computed with."""
    if tier() == "portable":
        return from_float16(codes)
    halves = codes.b.bitcast(codes.value, ir.VectorType(ir.HalfType(), LANES))
    return V(codes.b, codes.b.fpext(halves, ir.VectorType(F32, LANES)))


def to_bfloat16(x: V) -> V:
    """float32 lanes rounded to int16 codes of bfloat16; a NaN keeps its sign alone."""
    bits = x.bits(I32)
    rounded = (bits + 0x7FFF + (bits.shifted_down(16) & 1)).shifted_down(16)
    return x.differs(x).where((bits.shifted_down(16) & 0x8000) | 0x7FC0, rounded).to(I16)


def to_float16(x: V) -> V:
    """float32 lanes rounded to int16 codes of float16; overflow to infinity, NaN to a quiet one."""
    bits = x.bits(I32)
    sign, size = bits.shifted_down(16) & 0x8000, bits & 0x7FFFFFFF
    tiny = (size.bits(F32) + 0.5).bits(I32) - 0x3F000000  # the sum rounds at 2^-24, the unit of the subnormals
    normal = (size - 0x38000000 + 0xFFF + (size.shifted_down(13) & 1)).shifted_down(13)
    code = (size < 0x38800000).where(tiny, normal)
    code = (size >= 0x47800000).where((size > 0x7F800000).where(constant(x.b, I32, 0x7E00), 0x7C00), code)
    return (code | sign).to(I16)
