"""From a call to a provider: bind, check, find the device, call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

from . import checking, providers
from .outputs import check_out
from .table import lookup


@cache
def dispatcher(name: str) -> Callable:
    """The function behind ``ops.<name>``; ContractError for a name that is not in the table."""
    found = lookup(name)
    contract = found.contract

    def call(*args, out=None, **kwargs):
        arguments, form = found.enter(args, kwargs)
        _, device = checking.admit(contract, arguments, form)
        if out is not None:
            check_out(contract.name, out, arguments)
            arguments["out"] = out
            device = checking.device_of(name, arguments)
        bring_in(device)
        return providers.call(name, device, arguments)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = found.__doc__
    call.__signature__ = found.__signature__
    call.contract = contract
    return call


@cache
def bring_in(device: str) -> None:
    """Import the tier that registers the device's providers, at the first array that lives there."""
    if device == "cuda":
        importlib.import_module("vtlab.device").attach()
    elif device == "cpu":
        importlib.import_module("vtlab.device.cpu")
