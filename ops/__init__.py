"""The ops of the table as functions: ``ops.rms_norm(x, weight)`` runs where `x` lives.

A call is checked against the op's contract and handed to the best provider on that device; `ops.providers`
says which that is and steers it (`ops.using`). `out=` takes a preallocated result, or a tuple of them.
"""

from __future__ import annotations

from .dispatch import dispatcher
from .errors import ContractError, FormatError
from .providers import using

__all__ = ["ContractError", "FormatError", "using"]


def __getattr__(name: str):
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        function = dispatcher(name)
    except ContractError as error:
        raise AttributeError(str(error)) from None
    globals()[name] = function
    return function


def __dir__() -> list[str]:
    from .table import table

    return sorted([*globals(), *table()])
