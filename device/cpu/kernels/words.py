"""Sixteen 32-bit words whose bytes and halves are integers of their own: what block formats are unpacked and summed in.

A word of one lane belongs to one of sixteen rows. Integer results are exact, so that instruction sets may differ in how
they are reached: products of pairs take one instruction with AVX-512 VNNI, two with AVX-512 or AVX2.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.core.extending import intrinsic
from numba.core.typing.templates import signature

from ..tier import tier
from .lanes import float32x16, function, int32x16
from .memory import Address
from .storage import from_float16
from .vectors import F32, I8, I16, I32, I64, LANES, V, splat

HALVES = ir.VectorType(I16, 2 * LANES)
WORDS = ir.VectorType(I32, LANES)
_BYTES = ir.VectorType(I8, 4 * LANES)


def inlined(function):
    """Decorator of a function that stands in its callers' own code: vectors that it returns stay in registers."""
    return njit(nogil=True, error_model="numpy", forceinline=True)(function)


def _mask(places):
    return ir.Constant(ir.VectorType(I32, len(places)), [I32(place) for place in places])


def _at(builder, address, offset, kind):
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def _join(builder, parts):
    """Vectors end to end."""
    while len(parts) > 1:
        width = parts[0].type.count
        parts = [
            builder.shuffle_vector(parts[i], parts[i + 1], _mask(range(2 * width))) for i in range(0, len(parts), 2)
        ]
    return parts[0]


def _halves(x: V) -> V:
    return V(x.b, x.b.bitcast(x.value, HALVES))


def _words(b, value) -> V:
    return V(b, b.bitcast(value, WORDS))


def _half_constant(b, number: int):
    return ir.Constant(HALVES, [I16(number)] * (2 * LANES))


@intrinsic
def four_rows(typing, address, step):
    """Sixteen bytes each at `address`, `address + step` ... `address + 3 step`."""

    def generate(context, builder, sig, args):
        address, step = args
        kind = ir.VectorType(I32, 4)
        parts = []
        for i in range(4):
            at = _at(builder, address, builder.mul(step, I64(i)), kind)
            parts.append(builder.load(at, align=1))
        return _join(builder, parts)

    return signature(int32x16, Address, types.int64), generate


@intrinsic
def words_of_rows(typing, address, step):
    """The 32-bit word at `address + i step` for i = 0 ... 15."""

    def generate(context, builder, sig, args):
        return _gathered(builder, args[0], args[1], I32)

    return signature(int32x16, Address, types.int64), generate


@intrinsic
def float16_of_rows(typing, address, step):
    """The float16 at `address + i step` for i = 0 ... 15, as float32."""

    def generate(context, builder, sig, args):
        return widened(V(builder, _gathered(builder, args[0], args[1], I16))).value

    return signature(float32x16, Address, types.int64), generate


def _gathered(builder, address, step, element):
    found = ir.Constant(ir.VectorType(element, LANES), ir.Undefined)
    for i in range(LANES):
        at = _at(builder, address, builder.mul(step, I64(i)), element)
        found = builder.insert_element(found, builder.load(at, align=1), I32(i))
    return found


def widened(codes: V) -> V:
    """float16 codes as float32: by the instruction, where the tier has it."""
    if tier() in ("avx512", "avx2"):
        halves = codes.b.bitcast(codes.value, ir.VectorType(ir.HalfType(), LANES))
        return V(codes.b, codes.b.fpext(halves, ir.VectorType(F32, LANES)))
    return from_float16(codes)


@function
def low_float16(x):
    """The lower half of each word, a float16, as float32."""
    return widened(x.to(I16))


@function
def high_float16(x):
    """The upper half of each word, a float16, as float32."""
    return widened(x.shifted_down(16).to(I16))


@function
def transposed(a, b, c, d):
    """Four times four rows of four words -> word 0 of all sixteen rows, word 1, 2 and 3.

    a holds rows 0, 4, 8 and 12, b the rows after these, and so on.
    """
    low, high = [0, 16, 1, 17], [2, 18, 3, 19]
    spread = lambda places: [p + 4 * quarter for quarter in range(4) for p in places]
    ab, ab_high = a.shuffled(b, spread(low)), a.shuffled(b, spread(high))
    cd, cd_high = c.shuffled(d, spread(low)), c.shuffled(d, spread(high))
    first, second = spread([0, 1, 16, 17]), spread([2, 3, 18, 19])
    return (
        ab.shuffled(cd, first),
        ab.shuffled(cd, second),
        ab_high.shuffled(cd_high, first),
        ab_high.shuffled(cd_high, second),
    )


@function
def spread_bytes(a, b):
    """Sixteen bytes a and b of four rows -> words (a[l], b[l], a[l + 8], b[l + 8]) for l = 0 ... 3, and for 4 ... 7.

    With b the bytes after a, the bytes of a word are elements l, l + 16, l + 8 and l + 24 of 32.
    """
    one, two = a.b.bitcast(a.value, _BYTES), a.b.bitcast(b.value, _BYTES)
    results = []
    for first in (0, 4):
        places = []
        for quarter in range(4):
            for lane in range(first, first + 4):
                at = 16 * quarter + lane
                places += [at, 64 + at, at + 8, 64 + at + 8]
        results.append(_words(a.b, a.b.shuffle_vector(one, two, _mask(places))))
    return tuple(results)


@function
def low_bytes(x):
    """Bytes 0 and 2 of each word, signed, as halves."""
    h = _halves(x)
    shift = _half_constant(x.b, 8)
    return _words(x.b, x.b.ashr(x.b.shl(h.value, shift), shift))


@function
def high_bytes(x):
    """Bytes 1 and 3 of each word, signed, as halves."""
    return _words(x.b, x.b.ashr(_halves(x).value, _half_constant(x.b, 8)))


@function
def unsigned_right(x, bits):
    """Each word shifted to the right, zeros from the left."""
    return V(x.b, x.b.lshr(x.value, bits.value))


@function
def less(x, y):
    """Differences of halves."""
    return _words(x.b, x.b.sub(_halves(x).value, _halves(y).value))


@function
def scaled(x, y):
    """Products of halves, which fit."""
    return _words(x.b, x.b.mul(_halves(x).value, _halves(y).value))


@function
def twice(x):
    """The lower half of each word in both its halves."""
    low = x & 0xFFFF
    return low | (low << 16)


def _external(builder, name, result, *kinds):
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, ir.FunctionType(result, kinds), name)


def _has_vnni() -> bool:
    from llvmlite import binding

    return tier() == "avx512" and bool(binding.get_host_cpu_features().get("avx512vnni"))


def _pairs(builder, x, y):
    """x0 y0 + x1 y1 of the halves of each word."""
    if tier() == "avx512":
        multiply = _external(builder, "llvm.x86.avx512.pmaddw.d.512", WORDS, HALVES, HALVES)
        return builder.call(multiply, [builder.bitcast(x, HALVES), builder.bitcast(y, HALVES)])
    if tier() == "avx2":
        kind, out = ir.VectorType(I16, 16), ir.VectorType(I32, 8)
        multiply = _external(builder, "llvm.x86.avx2.pmadd.wd", out, kind, kind)
        parts = []
        for half in (range(8), range(8, 16)):
            one, two = (builder.bitcast(builder.shuffle_vector(v, v, _mask(half)), kind) for v in (x, y))
            parts.append(builder.call(multiply, [one, two]))
        return _join(builder, parts)
    x, y = V(builder, x), V(builder, y)
    low = ((x << 16) >> 16) * ((y << 16) >> 16)
    return (low + (x >> 16) * (y >> 16)).value


def added_pairs(builder, total, x, y):
    """total + x0 y0 + x1 y1 of the halves of each word. LLVM brings older types of the intrinsic up to date."""
    if _has_vnni():
        name = "llvm.x86.avx512.vpdpwssd.512"
        return builder.call(_external(builder, name, WORDS, WORDS, WORDS, WORDS), [total, x, y])
    return builder.add(total, _pairs(builder, x, y))


def _added_fours(builder, total, x, y):
    """total + x0 y0 + ... + x3 y3 of the bytes of each word, x unsigned, y signed."""
    if _has_vnni():
        name = "llvm.x86.avx512.vpdpbusd.512"
        return builder.call(_external(builder, name, WORDS, WORDS, WORDS, WORDS), [total, x, y])
    one, two = V(builder, x), V(builder, y)
    even, odd = one & 0x00FF00FF, one.shifted_down(8) & 0x00FF00FF
    signed = _halves(two)
    shift = _half_constant(builder, 8)
    low = builder.bitcast(builder.ashr(builder.shl(signed.value, shift), shift), WORDS)
    high = builder.bitcast(builder.ashr(signed.value, shift), WORDS)
    total = builder.add(total, _pairs(builder, even.value, low))
    return builder.add(total, _pairs(builder, odd.value, high))


def _dots(name: str, rows: int, count: int, stride: int, add):
    """Sums over `count` words of products of sixteen rows of weights and `rows` rows of a, every `stride`-th word.

    Written out whole, each sum in two halves, so that none waits for the one before it.
    """

    def typed(typing, words, at, step):
        def generate(context, builder, sig, args):
            words, at, step = args
            sums = [[ir.Constant(WORDS, [I32(0)] * LANES)] * 2 for _ in range(rows)]
            starts = [
                builder.inttoptr(builder.add(at, builder.mul(step, I64(row))), I32.as_pointer()) for row in range(rows)
            ]
            first = builder.inttoptr(words, WORDS.as_pointer())
            for k in range(count):
                w = builder.load(builder.gep(first, [I64(stride * k)]), align=64)
                for row in range(rows):
                    word = builder.load(builder.gep(starts[row], [I64(stride * k)]), align=4)
                    sums[row][k % 2] = add(builder, sums[row][k % 2], w, splat(builder, word).value)
            totals = [builder.add(*halves) for halves in sums]
            return context.make_tuple(builder, sig.return_type, totals)

        return signature(types.UniTuple(int32x16, rows), Address, Address, types.int64), generate

    typed.__name__ = name
    return intrinsic(typed)


four_rows_of_bytes = _dots("four_rows_of_bytes", 4, 8, 1, _added_fours)
one_row_of_halves = _dots("one_row_of_halves", 1, 16, 1, added_pairs)
one_row_of_minimums = _dots("one_row_of_minimums", 1, 8, 1, added_pairs)


@intrinsic
def add_fours(typing, total, x, word):
    """total + x0 w0 + ... + x3 w3: unsigned bytes of each word of x by the signed bytes of one word."""

    def generate(context, builder, sig, args):
        return _added_fours(builder, args[0], args[1], splat(builder, args[2]).value)

    return signature(int32x16, int32x16, int32x16, types.int32), generate


@intrinsic
def no_words(typing):
    """Sixteen zeros."""
    return signature(int32x16), lambda context, builder, sig, args: ir.Constant(WORDS, [I32(0)] * LANES)


@intrinsic
def as_float(typing, x):
    """Integers rounded to float32."""

    def generate(context, builder, sig, args):
        return V(builder, args[0]).to(F32).value

    return signature(float32x16, int32x16), generate


@intrinsic
def ahead(typing, address):
    """Ask for the cache line at `address`, which need not exist."""

    def generate(context, builder, sig, args):
        kind = I8.as_pointer()
        fetch = _external(builder, "llvm.prefetch.p0", ir.VoidType(), kind, I32, I32, I32)
        builder.call(fetch, [builder.inttoptr(args[0], kind), I32(0), I32(3), I32(1)])
        return context.get_dummy_value()

    return signature(types.void, Address), generate


@intrinsic
def word_everywhere(typing, x):
    """One word in every lane."""

    def generate(context, builder, sig, args):
        return splat(builder, builder.trunc(args[0], I32)).value

    return signature(int32x16, types.int64), generate


@function
def whole(x):
    """float32 of moderate size as integers, what is behind the point cut off."""
    return V(x.b, x.b.fptosi(x.value, WORDS))


@function
def as_word(mask):
    """1 where a mask holds, else 0."""
    return mask.to(I32)


@function
def paired_16(a):
    """Sixteen codes as eight words, twice: element l beside element l + 8."""
    turned = a.shuffled(a, [(i + 8) % 16 for i in range(16)])
    return (a & 0xFFFF) | (turned << 16)


@function
def swapped(x):
    """The halves of x, the other way round."""
    return x.shuffled(x, [(i + 8) % LANES for i in range(LANES)])


def _reduced(x: V, combine):
    for span in (8, 4, 2, 1):
        x = combine(x, x.shuffled(x, [(i + span) % LANES for i in range(LANES)]))
    return x


@function
def largest(x):
    """The largest float32 of the lanes, in every lane; none is NaN."""
    return _reduced(x, lambda a, b: (a > b).where(a, b))


@function
def summed(x):
    """The sum of the words of the lanes, in every lane."""
    return _reduced(x, lambda a, b: a + b)


@intrinsic
def put_eight(typing, x, address, index):
    """Write the first eight words to words index ... of those at `address`."""

    def generate(context, builder, sig, args):
        x, address, index = args
        half = builder.shuffle_vector(x, x, _mask(range(8)))
        at = _at(builder, address, builder.mul(index, I64(4)), half.type)
        builder.store(half, at, align=4)
        return context.get_dummy_value()

    return signature(types.void, x, Address, types.int64), generate


@intrinsic
def put_bytes(typing, x, address, offset):
    """Write the lowest byte of each word to sixteen bytes at `address + offset`."""

    def generate(context, builder, sig, args):
        x, address, offset = args
        kind = ir.VectorType(I8, LANES)
        builder.store(builder.trunc(x, kind), _at(builder, address, offset, kind), align=1)
        return context.get_dummy_value()

    return signature(types.void, x, Address, types.int64), generate
