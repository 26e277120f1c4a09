"""`out=`: preallocated results, checked before the work and written only when all of it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .errors import ContractError


def oracle_provider(evaluate: Callable, op: str) -> Callable:
    """The oracle as a provider: `evaluate(**arguments)`, copied into `out` once it is complete."""

    def run(out=None, **arguments):
        results = evaluate(**arguments)
        return results if out is None else write_out(op, out, results)

    return run


def check_out(op: str, out: object, arguments: dict[str, object]) -> None:
    """Refuse an `out` that is no array (or tuple of arrays), or that shares memory with an input."""
    for target in out if isinstance(out, tuple) else (out,):
        if not hasattr(target, "strides"):
            raise ContractError(op, "out", type(target).__name__, "an array or a tuple of arrays")
        for name, value in arguments.items():
            if isinstance(value, np.ndarray) and isinstance(target, np.ndarray) and np.may_share_memory(value, target):
                raise ContractError(op, "out", f"memory shared with {name}", "memory of its own")


def write_out(op: str, out: object, results: object) -> object:
    """Copy results into `out`, all or nothing: every shape and dtype is compared before the first byte is written."""
    targets = out if isinstance(out, tuple) else (out,)
    sources = results if isinstance(results, tuple) else (results,)
    check_form(op, targets, [(source.shape, source.dtype) for source in sources])
    for target, source in zip(targets, sources):
        target[...] = source
    return out


def check_form(op: str, targets: tuple, forms: Sequence[tuple[tuple[int, ...], object]]) -> None:
    """Refuse targets that are not one array to write into for each (shape, dtype) of `forms`."""
    if len(targets) != len(forms):
        raise ContractError(op, "out", f"{len(targets)} arrays", f"{len(forms)}")
    for target, (shape, dtype) in zip(targets, forms):
        if target.shape != shape or target.dtype != dtype:
            raise ContractError(op, "out", f"{target.dtype} {target.shape}", f"{np.dtype(dtype)} {shape}")
        if not target.flags.writeable:
            raise ContractError(op, "out", "a read-only array", "an array to write into")
