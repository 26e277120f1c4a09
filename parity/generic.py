"""Checks that every op passes, made from its contract alone: mirror against truth, results' form, the door, `out=`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vtlab import ops
from vtlab.ops.contract import Tensor, example
from vtlab.ops.dtypes import dtype
from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import MIRROR, TRUTH
from vtlab.ops.nvfp4 import unpack
from vtlab.ops.table import Op

from .compare import ParityError, assert_bytes, assert_within

_UNIT_ROUNDOFF = 2.0**-24


def generic_checks(found: Op) -> Iterator[tuple[str, object]]:
    """(name, check) for every example of the op's contract."""
    for number in range(len(found.contract.examples)):
        for check in (mirror_stays_near_truth, results_have_the_promised_form, bad_input_is_refused, out_is_filled):
            yield f"{check.__name__}[{found.contract.name}-{number}]", lambda c=check, n=number: c(found, n)


def arguments_of(found: Op, number: int) -> dict[str, object]:
    """Fresh arguments of the contract's example `number`, the same ones every time."""
    seed = [number, *found.contract.name.encode()]
    return example(found.contract, found.contract.examples[number], np.random.Generator(np.random.PCG64(seed)))


def _copied(arguments: dict[str, object]) -> dict[str, object]:
    """The arguments with arrays of their own, strides kept."""
    return {
        name: value.copy(order="K") if isinstance(value, np.ndarray) else value for name, value in arguments.items()
    }


def evaluate(found: Op, nx, arguments: dict[str, object]) -> tuple:
    """Results of one evaluation, with the tensors that it updated in place appended."""
    fresh = _copied(arguments)
    results = found.evaluate(nx, **fresh)
    results = () if results is None else results if isinstance(results, tuple) else (results,)
    for name, value in arguments.items():
        if isinstance(value, np.ndarray) and name not in found.contract.mutates:
            assert_bytes(fresh[name], value, f"{found.contract.name}: argument {name} was changed")
    return results + tuple(fresh[name] for name in found.contract.mutates)


def mirror_stays_near_truth(found: Op, number: int) -> None:
    """The float32 mirror lies within the contract's stated bound of the truth."""
    arguments = arguments_of(found, number)
    assert_within_bound(
        found, arguments, evaluate(found, TRUTH, arguments), evaluate(found, MIRROR, arguments), "mirror"
    )


def assert_within_bound(found: Op, arguments: dict[str, object], truth: tuple, other: tuple, what: str) -> None:
    """Each of the `other` results lies within the bound that the contract states for its mirror around the truth."""
    from vtlab.ops.checking import check

    contract = found.contract
    axes = check(contract, found.bind((), arguments))
    scales = contract.mirror.scale
    if callable(scales):
        scales = scales(found.bind((), arguments), truth)
    specs = list(contract.returns.values())
    for index, (want, got) in enumerate(zip(truth, other, strict=True)):
        where = f"{contract.name} {what}, result {index}"
        if index < len(specs) and specs[index].holds == "float4_e2m1fn":
            want, got = unpack(want), unpack(got)
        if index < len(specs) and specs[index].holds and want.dtype == np.uint8:
            want, got = (codes.view(dtype(specs[index].holds)) for codes in (want, got))
        if want.dtype.kind in "iub" or (contract.mirror.ulps == 0 and contract.mirror.roundings == "0"):
            assert_bytes(got, want, where)
            continue
        scale = scales[index] if isinstance(scales, tuple) else scales
        wide = np.abs(want.astype(np.float64))
        if isinstance(scale, str):
            scale = {"self": wide, "row": wide.max(axis=-1, keepdims=True, initial=0)}[scale]
        bound = contract.mirror.count(axes) * _UNIT_ROUNDOFF * scale + contract.mirror.ulps * _spacing(want)
        assert_within(got, want, bound, where)


def _spacing(values: np.ndarray) -> np.ndarray:
    """The gap to the next storage value away from zero."""
    import ml_dtypes

    wide = np.abs(values.astype(np.float64))
    info = ml_dtypes.finfo(values.dtype)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        exponent = np.floor(np.log2(np.maximum(wide, float(info.smallest_normal))))
        return np.where(np.isfinite(wide), np.exp2(exponent) * float(info.eps), 0.0)


def results_have_the_promised_form(found: Op, number: int) -> None:
    """Shapes and dtypes are those the contract's `returns` name, and a second call gives the same bytes."""
    from vtlab.ops.checking import check
    from vtlab.ops.shapes import check_sizes

    contract, arguments = found.contract, arguments_of(found, number)
    bound = found.bind((), arguments)
    axes = check(contract, bound)
    first, second = evaluate(found, TRUTH, arguments), evaluate(found, TRUTH, arguments)
    returned = len(first) - len(contract.mutates)
    if not sum(not spec.optional for spec in contract.returns.values()) <= returned <= len(contract.returns):
        raise ParityError(f"{contract.name}: {returned} results, the contract names {list(contract.returns)}")
    for (name, spec), result in zip(contract.returns.items(), first[:returned]):
        fault = check_sizes(dict(axes), spec.shape, result.shape)
        if fault or (result.ndim != len(spec.shape.split()) and "..." not in spec.shape):
            raise ParityError(f"{contract.name}: {name} has shape {result.shape}, promised {fault or spec.shape}")
        wanted = (bound[spec.like].dtype.name,) if spec.like else spec.dtypes
        if result.dtype.name not in wanted:
            raise ParityError(f"{contract.name}: {name} is {result.dtype}, promised {wanted}")
    for one, two in zip(first, second):
        assert_bytes(two, one, f"{contract.name}: a second call")


def bad_input_is_refused(found: Op, number: int) -> None:
    """A wrong rank, size, dtype, type or layout of any tensor argument raises ContractError naming it."""
    contract, arguments = found.contract, arguments_of(found, number)
    for name, spec in contract.args.items():
        value = arguments.get(name)
        if not isinstance(spec, Tensor) or not isinstance(value, np.ndarray):
            continue
        for wrong in _spoilt(spec, value):
            before = {m: arguments[m].copy(order="K") for m in contract.mutates}
            try:
                found(**{**arguments, name: wrong})
            except ContractError as error:
                if error.op != contract.name or not error.argument:
                    raise ParityError(
                        f"{contract.name}: refusal of {name} names op {error.op!r}, {error.argument!r}"
                    ) from None
            else:
                raise ParityError(f"{contract.name}: accepted {name} = {_form(wrong)}")
            for m, value_before in before.items():
                assert_bytes(arguments[m], value_before, f"{contract.name}: {m} after a refused call")


def _spoilt(spec: Tensor, value: np.ndarray) -> Iterator[object]:
    yield value.tolist()
    yield value.astype(np.complex64)
    if not spec.shape.startswith(("...", "*")):
        yield value[None]
    if spec.layout == "contiguous" and value.ndim and value.size > 1:
        yield np.repeat(value, 2, axis=-1)[..., ::2]


def _form(value: object) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


def out_is_filled(found: Op, number: int) -> None:
    """`ops.<op>(..., out=poisoned)` fills exactly `out`: no poison is left inside, the sentinels around it stay."""
    contract, arguments = found.contract, arguments_of(found, number)
    truth = evaluate(found, TRUTH, arguments)
    truth = truth[: len(truth) - len(contract.mutates)]
    if not truth:
        return
    padded = [np.full(result.size + 2 * _SENTINELS, 0xA5, np.uint8).repeat(result.dtype.itemsize) for result in truth]
    outs = []
    for result, raw in zip(truth, padded):
        item = result.dtype.itemsize
        inner = raw[_SENTINELS * item : raw.size - _SENTINELS * item]
        inner[...] = 0xFF
        outs.append(inner.view(result.dtype).reshape(result.shape))
    fresh = _copied(arguments)
    with ops.using("oracle"):
        getattr(ops, contract.name)(**fresh, out=outs[0] if len(outs) == 1 else tuple(outs))
    for result, raw, filled in zip(truth, padded, outs):
        assert_bytes(filled, result, f"{contract.name}(out=)")
        edge = _SENTINELS * result.dtype.itemsize
        if not (np.all(raw[:edge] == 0xA5) and np.all(raw[raw.size - edge :] == 0xA5)):
            raise ParityError(f"{contract.name}: wrote outside of out")


_SENTINELS = 64
