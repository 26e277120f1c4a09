"""The door: every argument of a call against the op's contract, before anything is computed or written."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Mapping

import numpy as np

from .contract import Choice, Contract, Flag, Scalar, Tensor
from .dtypes import dtype
from .errors import ContractError
from .shapes import bind_names, check_sizes

_DEVICE_OF_MODULE = {"numpy": "cpu", "cupy": "cuda"}
_INTEGER = (int, np.integer)


def check(contract: Contract, arguments: dict[str, object]) -> dict[str, int]:
    """Check all arguments and return the bound axes; errors as in `admit`."""
    return admit(contract, arguments, form_of(contract, arguments))[0]


def admit(contract: Contract, arguments: dict[str, object], form: tuple) -> tuple[dict[str, int], str]:
    """Check all arguments and return the bound axes, and where the arrays live.

    Raises ContractError naming the op, the argument, what was given and what the contract wants: for arrays
    that are none, dtypes, ranks, sizes, layouts, arrays on two devices, numbers out of range, unknown choices,
    and whatever the contract's own `requires` refuse.

    A decode step asks the same things hundreds of times, so what was found of a `form_of` arguments is kept;
    `requires`, which may look into arrays, run every time.
    """
    passed = contract.passed
    try:
        found = passed.get(form)
    except TypeError:  # an argument, such as a list, that no key can hold
        found = None
    if found is not None:
        axes, converted, device = found
        for name in converted:
            arguments[name] = _converted(contract, name, arguments[name])
    else:
        given = dict(arguments)
        axes, device = _check_form(contract, arguments), device_of(contract.name, arguments)
        converted = [name for name, value in arguments.items() if value is not given[name]]
        with contextlib.suppress(TypeError):
            if len(passed) >= _FORMS:
                passed.clear()
            passed[form] = axes, converted, device
    try:
        for require in contract.requires:
            require(arguments, axes)
    except ContractError as error:
        raise ContractError(contract.name, error.argument, error.got, error.want) from None
    return axes, device


def _converted(contract: Contract, name: str, value: object) -> object:
    """A number or a choice as the op takes it; by value, for 0.0 and -0.0 are one key."""
    spec = contract.args[name]
    return (_check_scalar if isinstance(spec, Scalar) else _check_choice)(contract.name, name, spec, value)


_FORMS = 1 << 10
"""Forms of calls that are kept for each op."""


def form_of(contract: Contract, arguments: Mapping[str, object]) -> tuple:
    """All that the checks of a form look at; numbers with their type, for True is no 1 there."""
    form = []
    for name in contract.args:
        value = arguments[name]
        kind = type(value)
        form.append(kind)
        if kind is np.ndarray or (hasattr(value, "strides") and hasattr(value, "dtype")):
            form += value.shape, value.strides, value.dtype
        else:
            form.append(value)
    return tuple(form)


def _check_form(contract: Contract, arguments: dict[str, object]) -> dict[str, int]:
    """Everything but `requires`."""
    axes: dict[str, int] = {}
    op = contract.name
    tensors = []
    for name, spec in contract.args.items():
        value = arguments[name]
        if value is None:
            if not getattr(spec, "optional", False):
                raise ContractError(op, name, "None", "a value")
        elif isinstance(spec, Tensor):
            _check_tensor(op, name, spec, value, arguments)
            tensors.append((name, spec, value))
        elif isinstance(spec, Scalar):
            arguments[name] = value = _check_scalar(op, name, spec, value)
            if spec.axis is not None:
                axes[spec.axis] = value
        elif isinstance(spec, Choice):
            arguments[name] = _check_choice(op, name, spec, value)
        elif isinstance(spec, Flag) and not isinstance(value, (bool, np.bool_)):
            raise ContractError(op, name, repr(value), "True or False")
    for find in (bind_names, check_sizes):
        for name, spec, value in tensors:
            fault = find(axes, spec.shape, value.shape)
            if fault is not None:
                raise ContractError(op, name, f"shape {tuple(value.shape)}", fault)
    return axes


def device_of(op: str, arguments: Mapping[str, object]) -> str:
    """Where the call's arrays live: "cpu" or "cuda"; "cpu" for a call without arrays. All must agree."""
    found = None
    for name, value in arguments.items():
        if not hasattr(value, "strides"):
            continue
        module = type(value).__module__.partition(".")[0]
        if module == "vtlab":  # a result in name only, of a chain that is being checked
            continue
        device = _DEVICE_OF_MODULE.get(module, "cpu")
        if found not in (None, device):
            raise ContractError(op, name, f"an array on {device}", f"all arrays on {found}")
        found = device
    return found or "cpu"


def _check_tensor(op: str, name: str, spec: Tensor, value: object, arguments: Mapping[str, object]) -> None:
    if not (hasattr(value, "strides") and hasattr(value, "dtype")):
        raise ContractError(op, name, type(value).__name__, "an array")
    if spec.like is not None and arguments.get(spec.like) is not None:
        wanted = getattr(arguments[spec.like], "dtype", None)
        if value.dtype != wanted:
            raise ContractError(op, name, f"dtype {value.dtype}", f"dtype {wanted}, that of {spec.like}")
    elif value.dtype.name not in spec.dtypes:
        codes = f": its codes, as .view({spec.dtypes[0]!r}) gives them" if value.dtype.name == spec.holds else ""
        raise ContractError(op, name, f"dtype {value.dtype}", "dtype " + " or ".join(spec.dtypes) + codes)
    if not value.dtype.isnative:
        raise ContractError(op, name, f"dtype {value.dtype.str}", "this machine's order of bytes")
    if not _layout_holds(value, spec.layout):
        raise ContractError(
            op, name, f"strides {tuple(value.strides)} for shape {tuple(value.shape)}", _LAYOUTS[spec.layout]
        )


_LAYOUTS = {
    "contiguous": "a C-contiguous array",
    "rows": "unit inner stride and non-overlapping rows",
    "strided": "unit inner stride",
}


def _layout_holds(value, layout: str) -> bool:
    if layout == "any" or value.flags.c_contiguous:
        return True
    if layout == "contiguous":
        return False
    sizes, strides, item = value.shape, value.strides, value.dtype.itemsize
    if sizes and sizes[-1] > 1 and strides[-1] != item:
        return False
    if layout == "strided":
        return all(stride >= 0 for stride in strides)
    extent = item
    for size, stride in zip(reversed(sizes), reversed(strides)):
        if size > 1 and stride < extent:
            return False
        extent = stride * size if size > 1 else extent
    return True


def _check_scalar(op: str, name: str, spec: Scalar, value: object) -> object:
    kinds = _INTEGER if spec.type is int else (numbers.Real, np.number)
    if not isinstance(value, kinds) or isinstance(value, (bool, np.bool_)):
        raise ContractError(op, name, repr(value), "an integer" if spec.type is int else "a number")
    if spec.minimum is not None and not value >= spec.minimum:
        raise ContractError(op, name, value, f">= {spec.minimum}")
    if spec.above is not None and not value > spec.above:
        raise ContractError(op, name, value, f"> {spec.above}")
    if spec.maximum is not None and not value <= spec.maximum:
        raise ContractError(op, name, value, f"<= {spec.maximum}")
    return spec.type(value)


def _check_choice(op: str, name: str, spec: Choice, value: object) -> object:
    if isinstance(value, str) and value in spec.options:
        return dtype(value) if name.endswith("dtype") else value
    if name.endswith("dtype") and not isinstance(value, str):
        try:
            found = np.dtype(value)
        except TypeError:
            found = None
        if found is not None and found.name in spec.options:
            return found
    raise ContractError(op, name, repr(value), "one of " + ", ".join(spec.options))
