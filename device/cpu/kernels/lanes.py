"""Sixteen lanes as one value of Numba's: `float32x16` and its kin, with the operators and functions of IEEE arithmetic.

LLVM cuts a vector of 16 into the registers a processor has, so one source serves AVX-512, AVX2, SSE2 and NEON, and
each lane is one IEEE operation in all of them. Nothing contracts a product and a sum; `fma` is asked for by name.
"""

from __future__ import annotations

import operator

from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic, lower_builtin, models, register_model
from numba.core.typing.templates import AbstractTemplate, infer_global, signature

LANES = 16
I1, I8, I16, I32, I64, F32, F64 = (
    *(ir.IntType(n) for n in (1, 8, 16, 32, 64)),
    ir.FloatType(),
    ir.DoubleType(),
)
_ELEMENTS = {types.float32: F32, types.float64: F64, types.int32: I32, types.int64: I64, types.boolean: I1}


class Lanes(types.Type):
    """The Numba type of 16 lanes of `element`."""

    def __init__(self, element):
        self.element = element
        super().__init__(f"{element}x{LANES}")


@register_model(Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, ir.VectorType(_ELEMENTS[fe_type.element], LANES))


float32x16, float64x16 = Lanes(types.float32), Lanes(types.float64)
int32x16, int64x16, mask16 = Lanes(types.int32), Lanes(types.int64), Lanes(types.boolean)
_NUMBA = {F32: float32x16, F64: float64x16, I32: int32x16, I64: int64x16, I1: mask16}


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


def _is(kind) -> bool:
    return isinstance(kind, Lanes)


def lower(context, builder, kind, value, element) -> V:
    """An argument as lanes: vectors as they are, a scalar cast to `element` and spread."""
    if _is(kind):
        return V(builder, value)
    scalar = next(numba for numba, llvm in _ELEMENTS.items() if llvm == element)
    return splat(builder, context.cast(builder, value, kind, scalar))


def function(make):
    """make(V, V, ...) -> V as a function of kernels; scalar arguments are spread over the lanes.

    All vectors of a call have one element; the result may have another.
    """
    count = make.__code__.co_argcount
    names = ", ".join(make.__code__.co_varnames[:count])
    scope = {"build": lambda *kinds: _typed(make, kinds)}
    exec(f"def {make.__name__}(typing, {names}):\n    return build({names})", scope)
    return intrinsic(scope[make.__name__])


_RESULTS: dict = {}


def _element(kinds):
    """The element that scalar arguments are cast to: that of the first vector that is no mask, if there is one."""
    vectors = [_ELEMENTS[kind.element] for kind in kinds if _is(kind)]
    return next((element for element in vectors if element != I1), vectors[0])


def _typed(make, kinds):
    """(signature, code generator); the type of the result is found by making the code once, in a module of its own."""
    vectors = [kind for kind in kinds if _is(kind)]
    if not vectors:
        return None
    element = _element(kinds)
    key = make, tuple(kinds)
    if key not in _RESULTS:
        llvm = [ir.VectorType(_ELEMENTS[k.element] if _is(k) else element, LANES) for k in kinds]
        trial = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), llvm), "trial")
        builder = ir.IRBuilder(trial.append_basic_block())
        _RESULTS[key] = _numba_of(make(*(V(builder, value) for value in trial.args)))
    result = _RESULTS[key]

    def generate(context, builder, sig, args):
        made = make(*(lower(context, builder, k, value, element) for k, value in zip(sig.args, args)))
        if isinstance(made, tuple):
            return context.make_tuple(builder, sig.return_type, [part.value for part in made])
        return made.value

    return signature(result, *kinds), generate


def _numba_of(made):
    if isinstance(made, tuple):
        return types.Tuple([_NUMBA[part.element] for part in made])
    return _NUMBA[made.element]


_OPERATORS = {
    operator.add: lambda a, b: a + b, operator.sub: lambda a, b: a - b, operator.mul: lambda a, b: a * b,
    operator.truediv: lambda a, b: a / b, operator.and_: lambda a, b: a & b, operator.or_: lambda a, b: a | b,
    operator.xor: lambda a, b: a ^ b, operator.lt: lambda a, b: a < b, operator.le: lambda a, b: a <= b,
    operator.gt: lambda a, b: a > b, operator.ge: lambda a, b: a >= b, operator.eq: V.equals, operator.ne: V.differs,
    operator.lshift: lambda a, b: a << b, operator.rshift: lambda a, b: a >> b,
}  # fmt: skip


def _operator(symbol, make):
    compares = symbol in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)

    @infer_global(symbol)
    class _Template(AbstractTemplate):
        def generic(self, args, kws):
            vectors = [kind for kind in args if _is(kind)]
            if len(args) != 2 or not vectors or any(not isinstance(k, (Lanes, types.Number)) for k in args):
                return None
            return signature(mask16 if compares else vectors[0], *args)

    def generate(context, builder, sig, args):
        element = _ELEMENTS[next(kind for kind in sig.args if _is(kind)).element]
        return make(*(lower(context, builder, k, value, element) for k, value in zip(sig.args, args))).value

    for left, right in ((Lanes, Lanes), (Lanes, types.Number), (types.Number, Lanes)):
        lower_builtin(symbol, left, right)(generate)


for _symbol, _make in _OPERATORS.items():
    _operator(_symbol, _make)


@infer_global(operator.neg)
class _Negation(AbstractTemplate):
    def generic(self, args, kws):
        return signature(args[0], *args) if len(args) == 1 and _is(args[0]) else None


@lower_builtin(operator.neg, Lanes)
def _negate(context, builder, sig, args):
    return (-V(builder, args[0])).value


@function
def fma(a, b, c):
    """a * b + c, rounded once."""
    return fused(a, b, c)


@function
def sqrt(x):
    """The square root."""
    return library(x.b, "sqrt", x)


@function
def absolute(x):
    """|x|."""
    return library(x.b, "fabs", x)


@function
def where(mask, a, b):
    """a where the mask holds, else b."""
    return mask.where(a, b)


def _picked(name, places, doc):
    def pick(a, b):
        return a.shuffled(b, places)

    pick.__name__, pick.__doc__ = name, doc
    return function(pick)


even = _picked("even", list(range(0, 32, 2)), "Lanes 0, 2, 4 ... of a, then of b.")
odd = _picked("odd", list(range(1, 32, 2)), "Lanes 1, 3, 5 ... of a, then of b.")
woven_low = _picked("woven_low", [i // 2 + 16 * (i % 2) for i in range(16)], "a0 b0 a1 b1 ... a7 b7.")
woven_high = _picked("woven_high", [8 + i // 2 + 16 * (i % 2) for i in range(16)], "a8 b8 a9 b9 ... a15 b15.")


@intrinsic
def zeros(typing):
    """Sixteen +0."""
    return signature(float32x16), lambda context, builder, sig, args: constant(builder, F32, 0).value


@intrinsic
def spread(typing, x):
    """A float32 in every lane."""
    return signature(float32x16, types.float32), lambda context, builder, sig, args: splat(builder, args[0]).value


@intrinsic
def lane(typing, x, index):
    """Lane `index` of x."""

    def generate(context, builder, sig, args):
        return builder.extract_element(args[0], builder.trunc(args[1], I32))

    return signature(x.element, x, types.int64), generate


def _places(builder, element) -> V:
    """0, 1 ... 15."""
    return V(builder, ir.Constant(ir.VectorType(element, LANES), [ir.Constant(element, i) for i in range(LANES)]))


@intrinsic
def lanes_below(typing, count):
    """The mask of lanes 0 ... count - 1."""

    def generate(context, builder, sig, args):
        return (_places(builder, I64) < splat(builder, args[0])).value

    return signature(mask16, types.int64), generate


@intrinsic
def lanes_between(typing, first, last):
    """The mask of lanes first ... last."""

    def generate(context, builder, sig, args):
        places = _places(builder, I64)
        return ((places >= splat(builder, args[0])) & (places <= splat(builder, args[1]))).value

    return signature(mask16, types.int64, types.int64), generate


@intrinsic
def lanes_from(typing, start):
    """start, start + 1 ... start + 15 as float32, for an integer of 31 bits."""

    def generate(context, builder, sig, args):
        return (_places(builder, I32) + splat(builder, builder.trunc(args[0], I32))).to(F32).value

    return signature(float32x16, types.int64), generate


def _larger(a: V, b: V) -> V:
    return ((a >= b) | a.differs(a)).where(a, b)


@function
def maximum(a, b):
    """The larger of the two; NaN if either is."""
    return _larger(a, b)


@intrinsic
def top_lane(typing, x):
    """The largest lane; NaN if there is one."""

    def generate(context, builder, sig, args):
        top = V(builder, args[0])
        for span in (8, 4, 2, 1):
            top = _larger(top, top.shuffled(top, [(i + span) % LANES for i in range(LANES)]))
        return top.lane(0)

    return signature(x.element, x), generate


@intrinsic
def places_from(typing, start):
    """start, start + 1 ... start + 15 as int32."""

    def generate(context, builder, sig, args):
        return (_places(builder, I32) + splat(builder, builder.trunc(args[0], I32))).value

    return signature(int32x16, types.int64), generate


@intrinsic
def spread_int(typing, x):
    """A number in every int32 lane."""

    def generate(context, builder, sig, args):
        return splat(builder, builder.trunc(args[0], I32)).value

    return signature(int32x16, types.int64), generate


@function
def codes_of(x):
    """float32 as 32 unsigned bits that ascend with the value: -0 is +0, and every NaN is the same, above +inf."""
    bits = x.differs(x).where(x.of(float("nan")), x + 0.0).bits(I32)
    return (bits < 0).where(bits ^ -1, bits | -0x80000000)
