"""Lanes from and to memory: addresses are integers, `kind` says at run time what is there, counts mask the tails."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import NativeValue, intrinsic, lower_cast, models, register_model, unbox
from numba.core.typing.templates import signature

from .lanes import float32x16, float64x16, int32x16, int64x16, mask16
from .storage import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    from_bfloat16,
    from_float16,
    pointer,
    read,
    size_of,
    to_bfloat16,
    to_float16,
    widened_float16,
    write,
)
from .vectors import F32, F64, I8, I16, I32, I64, LANES, V, splat

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


@intrinsic
def load_f16(typing, address, index):
    """float32 lanes of float16 elements index ... of those at `address`, to be computed with."""

    def generate(context, builder, sig, args):
        return widened_float16(V(builder, read(builder, args[0], args[1], None, I16))).value

    return signature(float32x16, Address, types.int64), generate


def _scalar_reader(numba_type, llvm_type):
    @intrinsic
    def get(typing, address, index):
        def generate(context, builder, sig, args):
            at = pointer(builder, args[0], args[1], size_of(llvm_type), llvm_type)
            return builder.load(at, align=size_of(llvm_type))

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
        at = pointer(builder, args[1], args[2], size_of(args[0].type), args[0].type)
        builder.store(args[0], at, align=size_of(args[0].type))
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
