"""Kernels by address: for each form of arguments, a kernel that takes those of another from memory and calls it.

``adapters.of_iiaf`` calls kernels of the letters iiaf; ``of_iiaf_scratch`` those whose last argument is the memory of
their thread. Each is made when it is first asked for.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic
from numba.core.typing.templates import signature

from ..compiling import Kernel
from .vectors import F32, F64, I8, I32, I64

_KINDS = {"a": I64, "i": I64, "f": F32, "d": F64}
_THERE = I8.as_pointer()


def native(builder, address, kinds, values) -> None:
    """Call compiled code by Numba's own convention: where a result and an error would go, then the arguments."""
    kind = ir.FunctionType(I32, [_THERE.as_pointer()] * 2 + kinds)
    nowhere = [cgutils.alloca_once(builder, _THERE) for _ in range(2)]
    builder.call(builder.inttoptr(address, kind.as_pointer()), nowhere + values)


def __getattr__(name: str) -> Kernel:
    form, _, scratch = name.removeprefix("of_").partition("_")
    if not name.startswith("of_") or set(form) - set(_KINDS) or scratch not in ("", "scratch"):
        raise AttributeError(name)
    kinds = [_KINDS[letter] for letter in form]

    @intrinsic
    def passed(typing, kernel, begin, end, block, work):
        def generate(context, builder, sig, args):
            kernel, begin, end, block, work = args
            values = [begin, end]
            for index, kind in enumerate(kinds[2:-1] if scratch else kinds[2:]):
                at = builder.add(block, I64(8 * index))
                values.append(builder.load(builder.inttoptr(at, kind.as_pointer())))
            native(builder, kernel, kinds, values + [work] * bool(scratch))
            return context.get_dummy_value()

        return signature(types.void, *[types.int64] * 5), generate

    def adapter(begin, end, kernel, block, work):
        passed(kernel, begin, end, block, work)

    adapter.__name__ = adapter.__qualname__ = name
    adapter.__doc__ = f"Items begin ... end of the kernel at an address, of letters {form}."
    found = globals()[name] = Kernel(adapter, "iiiii")
    return found
