"""One device case from arguments to verdict, on a GPU or on the emulated one: bytes against the mirror.

python -m vtlab.parity.device_run   # every small case once on the GPU; what the sanitizers watch
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vtlab import ops
from vtlab.device import runtime
from vtlab.device.launch import PROVIDER
from vtlab.ops import checking, providers
from vtlab.ops.numerics import MIRROR
from vtlab.ops.table import lookup

from .compare import ParityError, assert_bytes
from .device_cases import MOVES, DeviceCase, cases, device_ops, halves
from .emulation import EmulatedRuntime

_SENTINELS = 64


class Emulated:
    """NumPy arrays through launchers and emulated kernels."""

    def __init__(self, emulated: EmulatedRuntime | None = None):
        self.runtime = emulated or EmulatedRuntime()

    def send(self, value):
        if not isinstance(value, np.ndarray):
            return value
        copy = self.runtime.empty(value.shape, value.dtype)
        copy[...] = value
        return copy

    def fetch(self, value) -> np.ndarray:
        return value

    def raw(self, count: int):
        return self.runtime.empty((count,), np.uint8)

    def call(self, op: str, arguments: dict):
        found = lookup(op)
        out = arguments.pop("out", None)
        bound = found.bind((), arguments)
        checking.check(found.contract, bound)
        with runtime.using(self.runtime), ops.using(PROVIDER):
            return providers.get_op(op, "cuda")(**bound, **({} if out is None else {"out": out}))


class Cuda:
    """CuPy arrays through the public ops."""

    def __init__(self):
        import cupy

        self.cupy = cupy

    def send(self, value):
        return self.cupy.asarray(value) if isinstance(value, np.ndarray) else value

    def fetch(self, value) -> np.ndarray:
        return self.cupy.asnumpy(value)

    def raw(self, count: int):
        return self.cupy.empty(count, np.uint8)

    def call(self, op: str, arguments: dict):
        with ops.using(PROVIDER):
            return getattr(ops, op)(**arguments)


def tupled(results) -> tuple:
    return results if isinstance(results, tuple) else (results,)


def mirror_of(op: str, arguments: dict) -> tuple:
    """The mirror's results on fresh copies of the arguments."""
    fresh = {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    return tupled(lookup(op).evaluate(MIRROR, **fresh))


def assert_equal(op: str, got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Bytes; for ops that compute, one NaN is as good as another."""
    if op not in MOVES and want.dtype.kind not in "iu" and got.shape == want.shape and got.dtype == want.dtype:
        both = np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32))
        got = np.where(both, want, got)
    assert_bytes(got, want, what)


def check_case(device, case: DeviceCase) -> None:
    """The call gives the mirror's bytes: with fresh results, into poisoned `out`, and with fewer rows beside it."""
    op, host = case.op, case.arguments()
    want = mirror_of(op, host)
    sent = {name: device.send(value) for name, value in host.items()}
    first = tupled(device.call(op, dict(sent)))
    for index, (got, expected) in enumerate(zip(first, want, strict=True)):
        assert_equal(op, device.fetch(got), expected, f"{case}, result {index}")
    _check_out(device, case, sent, want)
    for name, value in host.items():
        if isinstance(value, np.ndarray):
            assert_bytes(device.fetch(sent[name]), value, f"{case}: argument {name} was changed")
    if (fewer := halves(lookup(op), host)) is not None:
        part, rows = fewer
        results = tupled(device.call(op, {name: device.send(value) for name, value in part.items()}))
        for index, (got, expected) in enumerate(zip(results, want, strict=True)):
            assert_equal(op, device.fetch(got), expected[:rows], f"{case} in a batch of {rows}, result {index}")


def _check_out(device, case: DeviceCase, sent: dict, want: tuple) -> None:
    """Fill poisoned arrays between sentinels: nothing is left out, nothing is written beside them."""
    whole, targets = [], []
    for expected in want:
        size = expected.nbytes
        raw = device.raw(_SENTINELS + size + _SENTINELS)
        raw[...] = 0xA5
        raw[_SENTINELS : _SENTINELS + size] = 0xFF
        whole.append(raw)
        targets.append(raw[_SENTINELS : _SENTINELS + size].view(expected.dtype).reshape(expected.shape))
    device.call(case.op, dict(sent) | {"out": targets[0] if len(targets) == 1 else tuple(targets)})
    for index, (raw, target, expected) in enumerate(zip(whole, targets, want)):
        assert_equal(case.op, device.fetch(target), expected, f"{case} into out, result {index}")
        around = np.concatenate([device.fetch(raw)[:_SENTINELS], device.fetch(raw)[_SENTINELS + expected.nbytes :]])
        if np.any(around != 0xA5):
            raise ParityError(f"{case}: wrote outside of out, result {index}")


def small(case: DeviceCase) -> bool:
    """Whether the case is quick under a tool that slows everything down."""
    sizes = [value.size for value in case.arguments().values() if isinstance(value, np.ndarray)]
    return max(sizes, default=0) <= 20_000


def main(check: Callable = check_case) -> None:
    device, count = Cuda(), 0
    for case in cases(device_ops()):
        if not case.special and small(case):
            check(device, case)
            count += 1
    print(f"{count} cases")


if __name__ == "__main__":
    main()
