"""Recorded launches one after the other: the thread that leads, and those that help it with the large ones.

A row of the table is a launch: adapter, kernel, arguments, items, items in a piece, pieces. `control` has two numbers
on lines of their own: the ticket, which is the launch on offer (counted from 1) above the next of its pieces, and how
many pieces the helpers have done. Who adds to a ticket owns the piece that it named, whichever launch it is of by then;
the next launch begins when all pieces of the last are done, so that a helper that sleeps holds nobody up. LATE becomes
1 when one that has a piece does.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic
from numba.core.typing.templates import signature

from ..compiling import device, kernel
from ..tier import tier
from .adapters import native
from .memory import Address, address, get_i64, set_at
from .vectors import I32, I64

ROW = 8
TICKET, DONE, LATE = 0, 16, 2
PIECE = 24
OVER = 1 << 62
PATIENCE = 400  # looks before the core is given away: some 40 microseconds
APART = 0 if tier() == "neon" else 256  # ticks between looks: a hypervisor takes the core from who pauses without pause
_VOID = ir.VoidType()


def _word(builder, base, index):
    return builder.inttoptr(builder.add(base, builder.mul(index, I64(8))), I64.as_pointer())


@intrinsic
def load_acquire(typing, base, index):
    """int64 `index` at `base`; what its writer wrote before is seen after."""

    def generate(context, builder, sig, args):
        return builder.load_atomic(_word(builder, *args), "acquire", 8)

    return signature(types.int64, Address, types.int64), generate


@intrinsic
def store_release(typing, x, base, index):
    """Write int64 `index` at `base`, after all that was written before."""

    def generate(context, builder, sig, args):
        builder.store_atomic(args[0], _word(builder, *args[1:]), "release", 8)
        return context.get_dummy_value()

    return signature(types.void, types.int64, Address, types.int64), generate


@intrinsic
def take(typing, base, index):
    """int64 `index` at `base`, which is one more from then on."""

    def generate(context, builder, sig, args):
        return builder.atomic_rmw("add", _word(builder, *args), I64(1), "seq_cst")

    return signature(types.int64, Address, types.int64), generate


@intrinsic
def pause(typing):
    """A moment for the other thread of a core."""

    def generate(context, builder, sig, args):
        arm = tier() == "neon"
        kind = ir.FunctionType(_VOID, [I32] if arm else [])
        name = "llvm.aarch64.hint" if arm else "llvm.x86.sse2.pause"
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [I32(1)] if arm else [])
        return context.get_dummy_value()

    return signature(types.void), generate


@intrinsic
def ticks(typing):
    """A clock's reading, in whatever unit the processor counts."""

    def generate(context, builder, sig, args):
        name = "llvm.readsteadycounter" if tier() == "neon" else "llvm.readcyclecounter"
        return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I64, []), name), [])

    return signature(types.int64), generate


@intrinsic
def give_way(typing):
    """Let another thread have the core."""

    def generate(context, builder, sig, args):
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield"), [])
        return context.get_dummy_value()

    return signature(types.void), generate


@intrinsic
def invoke(typing, adapter, begin, end, entry, block, scratch):
    """Items begin ... end of a launch."""

    def generate(context, builder, sig, args):
        native(builder, args[0], [I64] * 5, list(args[1:]))
        return context.get_dummy_value()

    return signature(types.void, *[types.int64] * 6), generate


@device
def _piece(row, piece, scratch):
    """One piece of a launch."""
    step = get_i64(row, 4)
    begin = piece * step
    invoke(get_i64(row, 0), begin, min(begin + step, get_i64(row, 3)), get_i64(row, 1), get_i64(row, 2), scratch)


@device
def _waited(spins):
    """One look later: soon, or when others had the core."""
    if spins < PATIENCE:
        since = ticks()
        pause()
        while ticks() - since < APART:
            pass
    else:
        give_way()
    return spins + 1


@device
def _alone(row, pieces, scratch):
    """A launch without help."""
    for piece in range(pieces):
        _piece(row, piece, scratch)


@device
def _shared(row, index, pieces, shared, scratch):
    """A launch with help; whether a helper kept this thread waiting much longer than a piece takes."""
    store_release(0, shared, DONE)
    store_release((index + 1) << PIECE, shared, TICKET)
    began, mine = ticks(), 0
    piece = take(shared, TICKET) & ((1 << PIECE) - 1)
    while piece < pieces:
        _piece(row, piece, scratch)
        mine += 1
        piece = take(shared, TICKET) & ((1 << PIECE) - 1)
    ended, spins, late = ticks(), 0, False
    limit = 4 * (ended - began) // max(mine, 1)
    while load_acquire(shared, DONE) + mine < pieces:
        spins = _waited(spins)
        late = spins > PATIENCE and ticks() - ended > limit
    return late


@kernel("aaia")
def lead(control, table, launches, scratch):
    """All launches of the table in turn. When a helper loses its core in the middle of a piece, there are others that
    want the cores: the rest is done without help, instead of waiting for one again and again, and `control` says so."""
    shared, helped = address(control), True
    for index in range(launches):
        row = address(table) + 8 * ROW * index
        pieces = get_i64(row, 5)
        if pieces == 1 or not helped:
            _alone(row, pieces, address(scratch))
        elif _shared(row, index, pieces, shared, address(scratch)):
            helped = False
            store_release(OVER, shared, TICKET)
            set_at(1, shared, LATE)
    store_release(OVER, shared, TICKET)


@kernel("aaa")
def follow(control, table, scratch):
    """Pieces of whatever launch is on offer, until there are no more launches."""
    shared, spins = address(control), 0
    while True:
        ticket = load_acquire(shared, TICKET)
        if ticket >= OVER:
            return
        row = address(table) + 8 * ROW * ((ticket >> PIECE) - 1)
        if ticket == 0 or (ticket & ((1 << PIECE) - 1)) >= get_i64(row, 5):
            spins = _waited(spins)
            continue
        ticket = take(shared, TICKET)
        if ticket >= OVER:
            return
        row, piece = address(table) + 8 * ROW * ((ticket >> PIECE) - 1), ticket & ((1 << PIECE) - 1)
        if piece < get_i64(row, 5):
            _piece(row, piece, address(scratch))
            take(shared, DONE)
            spins = 0
