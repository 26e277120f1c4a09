"""Sixteen lanes while code is being made: Python's operators append LLVM instructions.

LLVM cuts a vector of 16 into the registers a processor has, so one source serves AVX-512, AVX2, SSE2 and NEON, and
each lane is one IEEE operation in all of them. Nothing contracts a product and a sum; `fused` is asked for by name.
"""

from __future__ import annotations

from llvmlite import ir

LANES = 16
I1, I8, I16, I32, I64, F32, F64 = (
    *(ir.IntType(n) for n in (1, 8, 16, 32, 64)),
    ir.FloatType(),
    ir.DoubleType(),
)


class V:
    """A vector while code is being made: Python's operators append instructions. Integer shifts are arithmetic."""

    def __init__(self, builder, value):
        self.b, self.value = builder, value

    @property
    def element(self):
        return self.value.type.element

    def of(self, other) -> V:
        """A number or an LLVM scalar as lanes of this element; vectors as they are."""
        if isinstance(other, V):
            return other
        if isinstance(other, ir.Value):
            return splat(self.b, other)
        return constant(self.b, self.element, other)

    def _two(self, other, name, real, integer):
        make = getattr(self.b, real if self.element in (F32, F64) else integer)
        return V(self.b, make(self.value, self.of(other).value, name=name))

    def __add__(self, other):
        return self._two(other, "sum", "fadd", "add")

    def __sub__(self, other):
        return self._two(other, "difference", "fsub", "sub")

    def __mul__(self, other):
        return self._two(other, "product", "fmul", "mul")

    def __truediv__(self, other):
        return self._two(other, "quotient", "fdiv", "sdiv")

    def __rsub__(self, other):
        return self.of(other) - self

    def __rtruediv__(self, other):
        return self.of(other) / self

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self):
        return V(self.b, self.b.fneg(self.value)) if self.element in (F32, F64) else 0 - self

    def __lshift__(self, other):
        return V(self.b, self.b.shl(self.value, self.of(other).value))

    def __rshift__(self, other):
        return V(self.b, self.b.ashr(self.value, self.of(other).value))

    def shifted_down(self, bits: int) -> V:
        """A logical shift to the right."""
        return V(self.b, self.b.lshr(self.value, self.of(bits).value))

    def __and__(self, other):
        return V(self.b, self.b.and_(self.value, self.of(other).value))

    def __or__(self, other):
        return V(self.b, self.b.or_(self.value, self.of(other).value))

    def __xor__(self, other):
        return V(self.b, self.b.xor(self.value, self.of(other).value))

    def _compare(self, how, other):
        if self.element in (F32, F64):
            make = self.b.fcmp_unordered if how == "!=" else self.b.fcmp_ordered
        else:
            make = self.b.icmp_signed
        return V(self.b, make(how, self.value, self.of(other).value))

    def __lt__(self, other):
        return self._compare("<", other)

    def __le__(self, other):
        return self._compare("<=", other)

    def __gt__(self, other):
        return self._compare(">", other)

    def __ge__(self, other):
        return self._compare(">=", other)

    def equals(self, other) -> V:
        """The mask of equal lanes; NaN equals nothing."""
        return self._compare("==", other)

    def differs(self, other) -> V:
        """The mask of lanes that are not equal; NaN differs from itself."""
        return self._compare("!=", other)

    def bits(self, element) -> V:
        """The same bits as lanes of another element of the same width."""
        return V(self.b, self.b.bitcast(self.value, ir.VectorType(element, LANES)))

    def where(self, a, b) -> V:
        """a where this mask holds, else b."""
        a = a if isinstance(a, V) else b.of(a)
        return V(self.b, self.b.select(self.value, a.value, a.of(b).value))

    def to(self, element) -> V:
        """Each lane converted: integers and floats widen exactly, float64 and integers round to float32 to even."""
        make = {
            (F32, F64): self.b.fpext, (F64, F32): self.b.fptrunc, (I32, F32): self.b.sitofp, (I32, F64): self.b.sitofp,
            (I64, F32): self.b.sitofp, (F32, I32): self.b.fptosi, (I32, I64): self.b.sext, (I64, I32): self.b.trunc,
            (I16, I32): self.b.zext, (I32, I16): self.b.trunc, (I1, I32): self.b.zext, (I1, I64): self.b.zext,
            (I8, I32): self.b.zext, (I32, I8): self.b.trunc,
        }[self.element, element]  # fmt: skip
        return V(self.b, make(self.value, ir.VectorType(element, LANES)))

    def shuffled(self, other: V, places) -> V:
        """Lanes `places` of this vector (0 ... 15) and `other` (16 ... 31)."""
        mask = ir.Constant(ir.VectorType(I32, len(places)), [I32(place) for place in places])
        return V(self.b, self.b.shuffle_vector(self.value, other.value, mask))

    def lane(self, index: int):
        """One lane as an LLVM scalar."""
        return self.b.extract_element(self.value, I32(index))


def constant(builder, element, number) -> V:
    """16 times the same number."""
    number = float(number) if element in (F32, F64) else int(number)
    return V(builder, ir.Constant(ir.VectorType(element, LANES), [ir.Constant(element, number)] * LANES))


def splat(builder, scalar) -> V:
    """16 times an LLVM scalar."""
    kind = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return V(builder, builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, LANES), [I32(0)] * LANES)))


def library(builder, name: str, *operands):
    """An LLVM intrinsic of one vector type, such as llvm.fma, on V or LLVM values."""
    values = [operand.value if isinstance(operand, V) else operand for operand in operands]
    kind = values[0].type
    if isinstance(kind, ir.VectorType):
        suffix = (
            f"v{LANES}" + ("f" if kind.element in (F32, F64) else "i") + str(32 if kind.element in (F32, I32) else 64)
        )
    else:
        suffix = "f32" if kind == F32 else "f64"
    module, full = builder.module, f"llvm.{name}.{suffix}"
    found = module.globals.get(full) or ir.Function(module, ir.FunctionType(kind, [kind] * len(values)), full)
    result = builder.call(found, values)
    return V(builder, result) if isinstance(kind, ir.VectorType) else result


def fused(a, b, c) -> V:
    """a * b + c, rounded once."""
    some = next(x for x in (a, b, c) if isinstance(x, V))
    return library(some.b, "fma", some.of(a), some.of(b), some.of(c))


def places(builder, element) -> V:
    """0, 1 ... 15."""
    return V(builder, ir.Constant(ir.VectorType(element, LANES), [ir.Constant(element, i) for i in range(LANES)]))


def larger(a: V, b: V) -> V:
    """The larger of the two; NaN if either is."""
    return ((a >= b) | a.differs(a)).where(a, b)
