"""Rows of memory turned into panels: 16 rows become the lanes of vectors, one vector for each place along them."""

from __future__ import annotations

from numba import types
from numba.core.extending import intrinsic
from numba.core.typing.templates import signature

from ..compiling import device
from .memory import get_any, get_i64, set_at
from .storage import FLOAT16, FLOAT32, prefetch, read, widened_float16, write
from .vectors import F32, I16, I32, I64, V


def _turned(rows: list[V]) -> list[V]:
    """16 vectors of 16 lanes transposed. Quarters of 128 bits first, which stay in place in every register size."""
    low = [x for q in range(0, 16, 4) for x in (q, q + 16, q + 1, q + 17)]
    pairs = [x for q in range(0, 16, 4) for x in (q, q + 1, q + 16, q + 17)]
    high, high_pairs = ([x + 2 for x in places] for places in (low, pairs))
    a = [rows[i & ~1].shuffled(rows[i | 1], high if i & 1 else low) for i in range(16)]
    starts = [i // 4 * 4 + i % 4 // 2 for i in range(16)]
    b = [a[at].shuffled(a[at + 2], high_pairs if i & 1 else pairs) for i, at in enumerate(starts)]

    def quarters(*places):
        return [4 * q + i for q in places for i in range(4)]

    out = [None] * 16
    for j in range(4):
        w = [b[4 * g + j] for g in range(4)]
        for shift, first in ((0, 0), (4, 1)):
            halves = [w[g].shuffled(w[g + 1], quarters(first, first + 4, first + 2, first + 6)) for g in (0, 2)]
            out[shift + j] = halves[0].shuffled(halves[1], quarters(0, 1, 4, 5))
            out[shift + 8 + j] = halves[0].shuffled(halves[1], quarters(2, 3, 6, 7))
    return out


def _rows(builder, table, offset, ahead, element, align) -> list[V]:
    """16 vectors, `offset` bytes past the 16 addresses at `table`; what lies `ahead` bytes further is sent for."""
    rows = []
    for lane in range(16):
        at = builder.add(builder.load(builder.inttoptr(builder.add(table, I64(8 * lane)), I64.as_pointer())), offset)
        prefetch(builder, builder.add(at, ahead))
        rows.append(V(builder, read(builder, at, I64(0), None, element, align=align)))
    return rows


@intrinsic
def turn_f32(typing, table, offset, ahead, panel, stride):
    """panel[i * stride ... + 15] = float32 i, 0 ... 15, past `offset` of 16 rows whose addresses `table` has."""

    def generate(context, builder, sig, args):
        table, offset, ahead, panel, stride = args
        for i, turned in enumerate(_turned(_rows(builder, table, offset, ahead, F32, 4))):
            write(builder, turned.value, panel, builder.mul(stride, I64(i)), None)
        return context.get_dummy_value()

    return signature(types.void, *[types.int64] * 5), generate


@intrinsic
def turn_16(typing, table, offset, ahead, panel, stride, kind):
    """Likewise 32 elements of 16 bits, which move in pairs and are widened on arrival."""

    def generate(context, builder, sig, args):
        table, offset, ahead, panel, stride, kind = args
        turned = _turned(_rows(builder, table, offset, ahead, I32, 2))

        def put_down(i, part, value):
            write(builder, value.value, panel, builder.mul(stride, I64(2 * i + part)), None)

        with builder.if_else(builder.icmp_signed("==", kind, I64(FLOAT16))) as (then, otherwise):
            with then:
                for i, pair in enumerate(turned):
                    for part, code in enumerate((pair & 0xFFFF, pair.shifted_down(16))):
                        put_down(i, part, widened_float16(code.to(I16)))
            with otherwise:
                for i, pair in enumerate(turned):
                    for part, code in enumerate((pair << 16, pair & -0x10000)):
                        put_down(i, part, code.bits(F32))
        return context.get_dummy_value()

    return signature(types.void, *[types.int64] * 6), generate


@intrinsic
def send_for(typing, address):
    """Have the line of memory at an address, which need not be mapped, brought near."""

    def generate(context, builder, sig, args):
        prefetch(builder, args[0])
        return context.get_dummy_value()

    return signature(types.void, types.int64), generate


@device
def turned(table, first, count, ahead, panel, stride, kind):
    """Elements first ... first + count - 1 of 16 rows as `count` vectors in `panel`, `stride` float32 apart."""
    i = 0
    if kind == FLOAT32:
        while i + 16 <= count:
            turn_f32(table, 4 * (first + i), ahead, panel + 4 * stride * i, stride)
            i += 16
    else:
        while i + 32 <= count:
            turn_16(table, 2 * (first + i), ahead, panel + 4 * stride * i, stride, kind)
            i += 32
    while i < count:
        for lane in range(16):
            set_at(get_any(get_i64(table, lane), first + i, kind), panel, stride * i + lane)
        i += 1
