"""Lanes from and to memory: addresses are integers, `kind` says at run time what stands there, counts mask the tails.

Reading widens exactly and writing rounds once, to nearest even, in integer steps that every processor has.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import NativeValue, intrinsic, lower_cast, models, register_model, unbox
from numba.core.typing.templates import signature

from .lanes import (
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    LANES,
    V,
    constant,
    float32x16,
    float64x16,
    int32x16,
    int64x16,
    mask16,
    splat,
)  # fmt: skip

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
_HEADER = object.__basicsize__  # what stands before `data`, the first field of PyArrayObject
Address = types.int64


class Array(types.Opaque):
    """A NumPy array of any dtype as a kernel's argument, which gets the address of its first element."""

    def __init__(self):
        super().__init__("Array")


array = Array()


@register_model(Array)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, I64)


@unbox(Array)
def _address(typ, obj, c):
    """The field `data` of a NumPy array; 0 for None."""
    none = c.builder.icmp_unsigned("==", obj, c.pyapi.borrow_none())
    result = cgutils.alloca_once_value(c.builder, I64(0))
    with c.builder.if_then(c.builder.not_(none)):
        at = c.builder.add(c.builder.ptrtoint(obj, I64), I64(_HEADER))
        c.builder.store(c.builder.load(c.builder.inttoptr(at, I64.as_pointer())), result)
    return NativeValue(c.builder.load(result))


@lower_cast(Array, types.Integer)
def _as_integer(context, builder, fromty, toty, value):
    return value


@intrinsic
def address(typing, x):
    """An array's address as an integer, for arithmetic."""
    return signature(Address, x), lambda context, builder, sig, args: args[0]


@intrinsic
def given(typing, x):
    """Whether an array is there, not None."""
    return signature(types.boolean, x), lambda context, builder, sig, args: builder.icmp_signed("!=", args[0], I64(0))


@intrinsic
def aligned(typing, x):
    """The first address of an array, or number, that is a multiple of 64."""

    def generate(context, builder, sig, args):
        return builder.and_(builder.add(args[0], I64(63)), I64(-64))

    return signature(Address, x), generate


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


def _size(element) -> int:
    return {F32: 4, F64: 8}.get(element) or element.width // 8


def read(builder, address, index, count, element, align=None):
    """Elements index ... index + 15 of those at `address`, 0 from `count` on; all of them where `count` is None."""
    kind = ir.VectorType(element, LANES)
    at = pointer(builder, address, index, _size(element), kind)
    if count is None:
        return builder.load(at, align=align or _size(element))
    full = builder.icmp_signed(">=", count, I64(LANES))
    with builder.if_else(full, likely=True) as (then, otherwise):
        with then:
            whole, from_whole = builder.load(at, align=_size(element)), builder.block
        with otherwise:
            left = splat(builder, builder.trunc(count, I32)).value
            mask = builder.icmp_signed("<", _iota(I32), left)
            none = ir.Constant(kind, [element(0)] * LANES)
            part, from_part = _masked(builder, "load", element, at, I32(_size(element)), mask, none), builder.block
    result = builder.phi(kind)
    result.add_incoming(whole, from_whole)
    result.add_incoming(part, from_part)
    return result


def write(builder, value, address, index, count):
    """The first `count` lanes to elements index ... of those at `address`; all of them where `count` is None."""
    element = value.type.element
    at = pointer(builder, address, index, _size(element), value.type)
    if count is None:
        builder.store(value, at, align=_size(element))
        return
    full = builder.icmp_signed(">=", count, I64(LANES))
    with builder.if_else(full, likely=True) as (then, otherwise):
        with then:
            builder.store(value, at, align=_size(element))
        with otherwise:
            left = splat(builder, builder.trunc(count, I32)).value
            mask = builder.icmp_signed("<", _iota(I32), left)
            _masked(builder, "store", element, value, at, I32(_size(element)), mask)


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


@intrinsic
def load(typing, address, index, count, kind):
    """float32 lanes of elements index ... of those at `address`, 0 from `count` on; kind 0 float32, 1 bf16, 2 f16."""

    def generate(context, builder, sig, args):
        address, index, count, kind = args
        with builder.if_else(builder.icmp_signed("==", kind, I64(FLOAT32))) as (then, otherwise):
            with then:
                single = read(builder, address, index, count, F32)
                from_single = builder.block
            with otherwise:
                codes = V(builder, read(builder, address, index, count, I16))
                short = from_bfloat16(codes).value
                before = builder.block
                with builder.if_then(builder.icmp_signed("==", kind, I64(FLOAT16))):
                    half, from_half = from_float16(codes).value, builder.block
                either = builder.phi(short.type)
                either.add_incoming(short, before)
                either.add_incoming(half, from_half)
                from_either = builder.block
        result = builder.phi(single.type)
        result.add_incoming(single, from_single)
        result.add_incoming(either, from_either)
        return result

    return signature(float32x16, Address, types.int64, types.int64, types.int64), generate


@intrinsic
def store(typing, x, address, index, count, kind):
    """Write float32 lanes, rounded once to `kind`, to elements index ... of those at `address`, `count` at most."""

    def generate(context, builder, sig, args):
        x, address, index, count, kind = args
        with builder.if_else(builder.icmp_signed("==", kind, I64(FLOAT32))) as (then, otherwise):
            with then:
                write(builder, x, address, index, count)
            with otherwise:
                half = builder.icmp_signed("==", kind, I64(FLOAT16))
                with builder.if_else(half) as (then, otherwise):
                    with then:
                        write(builder, to_float16(V(builder, x)).value, address, index, count)
                    with otherwise:
                        write(builder, to_bfloat16(V(builder, x)).value, address, index, count)
        return context.get_dummy_value()

    return signature(types.void, float32x16, Address, types.int64, types.int64, types.int64), generate


@intrinsic
def through(typing, x, kind):
    """float32 lanes after a store to `kind` and a load: one rounding point."""

    def generate(context, builder, sig, args):
        x, kind = args
        result = cgutils.alloca_once_value(builder, x)
        for number, there, back in (
            (BFLOAT16, to_bfloat16, from_bfloat16),
            (FLOAT16, to_float16, from_float16),
        ):
            with builder.if_then(builder.icmp_signed("==", kind, I64(number))):
                builder.store(back(there(V(builder, x))).value, result)
        return builder.load(result)

    return signature(float32x16, float32x16, types.int64), generate


_PLAIN = {"float32x16": (F32, float32x16), "float64x16": (F64, float64x16), "int32x16": (I32, int32x16),
          "int64x16": (I64, int64x16)}  # fmt: skip


def _reader(name):
    element, result = _PLAIN[name]

    @intrinsic
    def get(typing, address, index):
        def generate(context, builder, sig, args):
            return read(builder, args[0], args[1], None, element)

        return signature(result, Address, types.int64), generate

    get.__doc__ = f"{name} at element `index` of those at `address`."
    return get


load_f32, load_f64, load_i32, load_i64 = (_reader(name) for name in _PLAIN)


@intrinsic
def put(typing, x, address, index):
    """Write lanes, as they are, to elements index ... of those at `address`."""

    def generate(context, builder, sig, args):
        write(builder, args[0], args[1], args[2], None)
        return context.get_dummy_value()

    return signature(types.void, x, Address, types.int64), generate


def _scalar_reader(numba_type, llvm_type):
    @intrinsic
    def get(typing, address, index):
        def generate(context, builder, sig, args):
            at = pointer(builder, args[0], args[1], _size(llvm_type), llvm_type)
            return builder.load(at, align=_size(llvm_type))

        return signature(numba_type, Address, types.int64), generate

    get.__doc__ = f"The {numba_type} at element `index` of those at `address`."
    return get


get_f32, get_f64 = _scalar_reader(types.float32, F32), _scalar_reader(types.float64, F64)
get_i32, get_i64 = _scalar_reader(types.int32, I32), _scalar_reader(types.int64, I64)
get_u8, get_u16 = _scalar_reader(types.uint8, I8), _scalar_reader(types.uint16, I16)
get_u32 = _scalar_reader(types.uint32, I32)


@intrinsic
def set_at(typing, x, address, index):
    """Write a scalar, as it is, to element `index` of those at `address`."""

    def generate(context, builder, sig, args):
        at = pointer(builder, args[1], args[2], _size(args[0].type), args[0].type)
        builder.store(args[0], at, align=_size(args[0].type))
        return context.get_dummy_value()

    return signature(types.void, x, Address, types.int64), generate


@intrinsic
def copy_bytes(typing, target, source, count):
    """Copy `count` bytes from `source` to `target`, which do not overlap."""

    def generate(context, builder, sig, args):
        target, source = (builder.inttoptr(a, I8.as_pointer()) for a in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return signature(types.void, Address, Address, types.int64), generate


@intrinsic(prefer_literal=True)
def scratch(typing, count):
    """The address of `count` float32 of this call's own, of unspecified content; `count` is a literal."""
    if not isinstance(count, types.IntegerLiteral):
        return None

    def generate(context, builder, sig, args):
        kind = ir.ArrayType(ir.VectorType(F32, LANES), -(-count.literal_value // LANES))
        return builder.ptrtoint(cgutils.alloca_once(builder, kind), I64)

    return signature(Address, count), generate


@intrinsic
def get_any(typing, address, index, kind):
    """Element `index` of those at `address`, widened to float32."""

    def generate(context, builder, sig, args):
        address, index, kind = args
        with builder.if_else(builder.icmp_signed("==", kind, I64(FLOAT32))) as (then, otherwise):
            with then:
                single = builder.load(pointer(builder, address, index, 4, F32), align=4)
                from_single = builder.block
            with otherwise:
                code = splat(builder, builder.load(pointer(builder, address, index, 2, I16), align=2))
                half = builder.icmp_signed("==", kind, I64(FLOAT16))
                either = builder.select(half, from_float16(code).lane(0), from_bfloat16(code).lane(0))
                from_either = builder.block
        result = builder.phi(F32)
        result.add_incoming(single, from_single)
        result.add_incoming(either, from_either)
        return result

    return signature(types.float32, Address, types.int64, types.int64), generate


@intrinsic
def allocate(typing, count):
    """The address of `count` bytes of fresh memory, a multiple of 64."""

    def generate(context, builder, sig, args):
        kind = ir.FunctionType(I8.as_pointer(), [I64, I64])
        found = cgutils.get_or_insert_function(builder.module, kind, "aligned_alloc")
        size = builder.and_(builder.add(args[0], I64(127)), I64(-64))
        return builder.ptrtoint(builder.call(found, [I64(64), size]), I64)

    return signature(Address, types.int64), generate


@intrinsic
def release(typing, address):
    """Give memory of `allocate` back."""

    def generate(context, builder, sig, args):
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer()])
        found = cgutils.get_or_insert_function(builder.module, kind, "free")
        builder.call(found, [builder.inttoptr(args[0], I8.as_pointer())])
        return context.get_dummy_value()

    return signature(types.void, Address), generate


@intrinsic
def flags(typing, address, index, count):
    """The mask of bytes index ... that are not 0, of `count` at most."""

    def generate(context, builder, sig, args):
        return V(builder, read(builder, args[0], args[1], args[2], I8)).to(I32).differs(0).value

    return signature(mask16, Address, types.int64, types.int64), generate


@intrinsic
def counts(typing, address, index, count):
    """int32 numbers index ... as float32 lanes, 0 from `count` on."""

    def generate(context, builder, sig, args):
        return V(builder, read(builder, args[0], args[1], args[2], I32)).to(F32).value

    return signature(float32x16, Address, types.int64, types.int64), generate
