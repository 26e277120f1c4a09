"""`with using("oracle"):` lets only the named providers serve, in this thread or task and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..errors import ContractError

_names: ContextVar[frozenset[str] | None] = ContextVar("vtlab.providers.using", default=None)

steered = _names.get


@contextmanager
def using(*names: str) -> Iterator[None]:
    """Only providers called one of `names` are eligible inside; the innermost `using` counts.

    Priority, capabilities and disabled names hold as ever. An op that none of `names` serves raises
    ProviderError. Raises ContractError if no name is given or one is not a string.
    """
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ContractError("using", "names", repr(names), "one or more names of providers")
    token = _names.set(frozenset(names))
    try:
        yield
    finally:
        _names.reset(token)
