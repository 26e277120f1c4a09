"""One device case from arguments to verdict, on a GPU or on the emulated one: the mirror's bytes, or near the truth.

python -m vtlab.parity.device_run [FAMILY …]   # every small case once on the GPU; what the sanitizers watch
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from vtlab import ops
from vtlab.device import runtime
from vtlab.device.judged import cut_of, is_coarse, parity_of
from vtlab.device.launch import PROVIDER
from vtlab.ops import checking, providers
from vtlab.ops.contract import Parity
from vtlab.ops.table import lookup

from .compare import ParityError, assert_bytes, assert_nmse, assert_rel_l2, nmse
from .device_cases import MOVES, DeviceCase, cases, device_ops, halves
from .emulation import EmulatedRuntime

_SENTINELS = 64


def elements_of(value: np.ndarray) -> np.ndarray:
    """A broadcast view's own elements, each once; any other array itself."""
    repeated = [step == 0 and size > 1 and value.size > 0 for size, step in zip(value.shape, value.strides)]
    return value[tuple(slice(0, 1) if again else slice(None) for again in repeated)] if any(repeated) else value


class Emulated:
    """NumPy arrays through launchers and emulated kernels."""

    place = "cuda"

    def __init__(self, emulated: EmulatedRuntime | None = None, provider: str = PROVIDER):
        self.runtime, self.provider = emulated or EmulatedRuntime(), provider

    def send(self, value):
        if not isinstance(value, np.ndarray):
            return value
        if value.ndim > 1 and value.T.flags.c_contiguous and not value.flags.c_contiguous:
            return self.send(value.T).T  # columns of neighbours stay that
        if (once := elements_of(value)) is not value:
            return np.broadcast_to(self.send(once), value.shape)
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
        with runtime.using(self.runtime), ops.using(self.provider):
            return providers.get_op(op, "cuda")(**bound, **({} if out is None else {"out": out}))


class Cuda:
    """CuPy arrays through the public ops."""

    place = "cuda"

    def __init__(self, provider: str = PROVIDER):
        import cupy

        self.cupy, self.provider, self.runtime = cupy, provider, runtime.current()

    def send(self, value):
        if not isinstance(value, np.ndarray):
            return value
        once = elements_of(value)
        there = self.cupy.asarray(once)
        return there if once is value else self.cupy.broadcast_to(there, value.shape)

    def fetch(self, value) -> np.ndarray:
        return self.cupy.asnumpy(value)

    def raw(self, count: int):
        return self.cupy.empty(count, np.uint8)

    def call(self, op: str, arguments: dict):
        with ops.using(self.provider):
            if not any(hasattr(value, "strides") for value in arguments.values()):  # dispatch would stay on the host
                return providers.get_op(op, "cuda")(**lookup(op).bind((), arguments))
            return getattr(ops, op)(**arguments)


def tupled(results) -> tuple:
    return () if results is None else results if isinstance(results, tuple) else (results,)


def mirror_of(op: str, arguments: dict, place: str = "cuda") -> tuple[tuple, dict[str, np.ndarray]]:
    """The mirror's results on fresh copies of the arguments, and what it left in those that the op updates."""
    return _outcome(op, lambda **fresh: lookup(op).mirror_on(place, **fresh), arguments)


def _outcome(op: str, call, arguments: dict) -> tuple[tuple, dict[str, np.ndarray]]:
    fresh = {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    results = tupled(call(**fresh))
    return results, {name: fresh[name] for name in lookup(op).contract.mutates if fresh.get(name) is not None}


class Framed:
    """An array on the device between sentinels: `inner` is what a call gets."""

    def __init__(self, device, shape: tuple[int, ...], dtype):
        self._device, self._size = device, int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.raw = device.raw(_SENTINELS + self._size + _SENTINELS)
        self.raw[...] = 0xA5
        self._held = self.raw[_SENTINELS : _SENTINELS + self._size]
        self._held[...] = 0xFF
        self.inner = self._held.view(dtype).reshape(shape)

    def fill(self, host: np.ndarray) -> None:
        self._held[...] = self._device.send(np.ascontiguousarray(host).reshape(-1).view(np.uint8))

    def check_frame(self, what: str) -> None:
        bytes_ = self._device.fetch(self.raw)
        if np.any(bytes_[:_SENTINELS] != 0xA5) or np.any(bytes_[_SENTINELS + self._size :] != 0xA5):
            raise ParityError(f"{what}: wrote outside of it")


def assert_equal(op: str, got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Bytes; for ops that compute, one NaN is as good as another."""
    if op not in MOVES and want.dtype.kind not in "iu" and got.shape == want.shape and got.dtype == want.dtype:
        both = np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32))
        got = np.where(both, want, got)
    assert_bytes(got, want, what)


def check_case(device, case: DeviceCase) -> float:
    """The call gives the mirror's bytes: with fresh results, into poisoned `out`, and with fewer rows beside it.

    What the op updates in place must end as the mirror leaves it, each byte it does not touch included, whether it
    held the case's values before or poison; nothing beside it is written. Calls on tensor cores are judged by their
    contract's norm instead (`check_by_norm`). Returns the largest error against truth, 0 where bytes are compared.
    """
    op, host = case.op, case.arguments()
    parity = parity_of(op, host)
    if parity.kind != "bytes":
        return check_by_norm(device, case, host, parity)
    want, updated = mirror_of(op, host, device.place)
    _check_call(device, case, host, want, updated, str(case))
    if want:
        _check_call(device, case, host, want, updated, f"{case} into out", into=True)
    if poisoned := _poisoned(case, host):
        _check_call(device, case, host | poisoned, *mirror_of(op, host | poisoned, device.place), f"{case} on poison")
    if (fewer := halves(lookup(op), host)) is not None:
        part, rows = fewer
        left = mirror_of(op, part, device.place)[1] if updated else {}
        _check_call(device, case, part, tuple(a[:rows] for a in want), left, f"{case} in a batch of {rows}")
    return 0.0


def check_by_norm(device, case: DeviceCase, host: dict, parity: Parity) -> float:
    """Results lie within the contract's norm of the truth, and at most twice as far from it as the mirror.

    The same bytes come again, into poisoned `out`, and with fewer rows beside them; of what the op updates, rows that
    the mirror leaves alone keep their bytes. Returns the largest error by the norm.
    """
    op = case.op
    with np.errstate(over="ignore", invalid="ignore"):  # NumPy's own products, on special values
        truth, kept = _outcome(op, lookup(op), host)
    mirror, left = mirror_of(op, host, device.place)
    got, updated = _call(device, case, host, mirror, tuple(left), str(case))
    errors, ulps = [0.0], [float(ml_dtypes.finfo(a.dtype).eps) for a in mirror if a.dtype.kind not in "iub"]
    for what, one, near, true in [
        *((f"{case}, result {i}", *each) for i, each in enumerate(zip(got, mirror, truth, strict=True))),
        *((f"{case}, updated {name}", updated[name], left[name], kept[name]) for name in left),
    ]:
        errors.append(_judge(one, near, true, parity, what, is_coarse(op), max(ulps, default=0.0), cut_of(op, host)))
    for name, after in left.items():
        bits = f"u{after.dtype.itemsize}"
        still = np.all(after.view(bits) == np.ascontiguousarray(host[name]).view(bits), axis=-1)
        assert_equal(op, updated[name][still], after[still], f"{case}, rows of {name} that it should leave alone")
    again, same = _call(device, case, host, mirror, tuple(left), f"{case} into out", into=True)
    for what, one, first in [*zip(range(len(got)), again, got), *((name, same[name], updated[name]) for name in left)]:
        assert_equal(op, one, first, f"{case} again, {what}")
    if (fewer := halves(lookup(op), host)) is not None:
        part, rows = fewer
        like = tuple(a[:rows] for a in mirror)
        for index, one in enumerate(_call(device, case, part, like, tuple(left), f"{case} in a batch of {rows}")[0]):
            assert_equal(op, one, got[index][:rows], f"{case} in a batch of {rows}, result {index}")
    return max(errors)


def _judge(
    got: np.ndarray,
    mirror: np.ndarray,
    truth: np.ndarray,
    parity: Parity,
    what: str,
    coarse: bool = False,
    ulp: float = 0.0,
    cut: float = 2.0**-24,
) -> float:
    """The error of `got`, which obeys the bound and is at most twice the mirror's; integers must be the truth's.

    ulp : the largest of the op's results, whose roundings a state has gone through.
    A mirror may happen to be exact: sums that are off by `cut` round to a neighbour, an ulp off, once in ulp / cut,
    and four elements that do so are chance. The bound alone judges sums that are `coarse`: the mirror's have more bits.
    """
    if truth.dtype.kind in "iub":
        assert_bytes(got, truth, what)
        return 0.0
    within = {"nmse": assert_nmse, "rel_l2": assert_rel_l2}[parity.kind]
    within(got, truth, parity.bound, what)
    finite = np.isfinite(truth.astype(np.float64))
    found, plain = (nmse(a[finite], truth[finite]) ** 0.5 for a in (got, mirror))
    ulp = max(ulp, float(ml_dtypes.finfo(truth.dtype).eps))
    if not coarse and found > max(2 * plain, (cut * ulp) ** 0.5, ulp * (4 / max(truth.size, 1)) ** 0.5):
        raise ParityError(f"{what}: rel_l2 {found:.3g} from the truth, the mirror {plain:.3g}: more than twice as far")
    return found if parity.kind == "rel_l2" else found**2


def _check_call(device, case: DeviceCase, host: dict, want: tuple, updated: dict, what: str, into=False) -> None:
    """One call gives `want` and leaves `updated`, and changes no other argument; `into`: poisoned `out` is given."""
    results, left = _call(device, case, host, want, tuple(updated), what, into)
    for index, (got, expected) in enumerate(zip(results, want, strict=True)):
        assert_equal(case.op, got, expected, f"{what}, result {index}")
    for name, expected in updated.items():
        assert_equal(case.op, left[name], expected, f"{what}, updated {name}")


def _call(
    device, case: DeviceCase, host: dict, like: tuple, updated: tuple[str, ...], what: str, into=False
) -> tuple[tuple, dict[str, np.ndarray]]:
    """(results, what is left in the arguments called `updated`) of a call that writes nothing else.

    like : arrays of the results' forms; `into`: such arrays, poisoned, are given as `out`.
    """
    sent = {name: device.send(value) for name, value in host.items() if name not in updated}
    frames = {name: Framed(device, host[name].shape, host[name].dtype) for name in updated}
    for name, frame in frames.items():
        frame.fill(host[name])
    outs = [Framed(device, expected.shape, expected.dtype) for expected in like] if into else []
    arguments = sent | {name: frame.inner for name, frame in frames.items()}
    if outs:
        arguments["out"] = outs[0].inner if len(outs) == 1 else tuple(frame.inner for frame in outs)
    results = tupled(device.call(case.op, arguments))
    made = tuple(device.fetch(each) for each in ([frame.inner for frame in outs] or results))
    left = {name: device.fetch(frame.inner) for name, frame in frames.items()}
    for name, frame in [*enumerate(outs), *frames.items()]:
        frame.check_frame(f"{what}, {name}")
    for name, value in sent.items():
        if isinstance(host[name], np.ndarray):
            assert_bytes(device.fetch(value), host[name], f"{what}: argument {name} was changed")
    return made, left


def _poisoned(case: DeviceCase, host: dict) -> dict[str, np.ndarray]:
    """What the op updates, with NaN in every float."""
    updated = {name: host[name] for name in lookup(case.op).contract.mutates}
    floats = {name: a for name, a in updated.items() if isinstance(a, np.ndarray) and a.dtype.kind not in "iub"}
    return {name: np.full(a.nbytes, 0xFF, np.uint8).view(a.dtype).reshape(a.shape) for name, a in floats.items()}


def small(case: DeviceCase) -> bool:
    """Whether the case is quick under a tool that slows everything down."""
    sizes = [value.size for value in case.arguments().values() if isinstance(value, np.ndarray)]
    return max(sizes, default=0) <= 20_000


def main(chosen: Sequence[str] = ()) -> None:
    from .chain_cases import chain_cases, check_chain

    device, count = Cuda(), 0
    for check, found in ((check_case, cases(device_ops())), (check_chain, chain_cases())):
        for case in found:
            if not case.special and (not chosen or case.family in chosen) and small(case):
                check(device, case)
                count += 1
    print(f"{count} cases")


if __name__ == "__main__":
    main(sys.argv[1:])
