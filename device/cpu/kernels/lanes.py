"""Sixteen lanes as one value of Numba's: `float32x16` and its kin, with the operators and functions of IEEE arithmetic.

A function of `vectors.V` becomes one of kernels by the decorator `function`.
"""

from __future__ import annotations

import operator

from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic, lower_builtin, models, register_model
from numba.core.typing.templates import AbstractTemplate, infer_global, signature

from .vectors import F32, F64, I1, I32, I64, LANES, V, constant, fused, larger, library, places, splat

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


@intrinsic
def lanes_below(typing, count):
    """The mask of lanes 0 ... count - 1."""

    def generate(context, builder, sig, args):
        return (places(builder, I64) < splat(builder, args[0])).value

    return signature(mask16, types.int64), generate


@intrinsic
def lanes_between(typing, first, last):
    """The mask of lanes first ... last."""

    def generate(context, builder, sig, args):
        at = places(builder, I64)
        return ((at >= splat(builder, args[0])) & (at <= splat(builder, args[1]))).value

    return signature(mask16, types.int64, types.int64), generate


@intrinsic
def lanes_from(typing, start):
    """start, start + 1 ... start + 15 as float32, for an integer of 31 bits."""

    def generate(context, builder, sig, args):
        return (places(builder, I32) + splat(builder, builder.trunc(args[0], I32))).to(F32).value

    return signature(float32x16, types.int64), generate


@function
def maximum(a, b):
    """The larger of the two; NaN if either is."""
    return larger(a, b)


@intrinsic
def top_lane(typing, x):
    """The largest lane; NaN if there is one."""

    def generate(context, builder, sig, args):
        top = V(builder, args[0])
        for span in (8, 4, 2, 1):
            top = larger(top, top.shuffled(top, [(i + span) % LANES for i in range(LANES)]))
        return top.lane(0)

    return signature(x.element, x), generate


@intrinsic
def places_from(typing, start):
    """start, start + 1 ... start + 15 as int32."""

    def generate(context, builder, sig, args):
        return (places(builder, I32) + splat(builder, builder.trunc(args[0], I32))).value

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
