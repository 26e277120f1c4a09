"""From a Python function to machine code: compiled once for each processor, kept in vtlab's cache folder.

A kernel is a function of addresses and numbers. Its arguments are unboxed by a signature that is known beforehand, so
that a call costs no search for one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from . import images, tier
from .natives import Native, natives

_lock = threading.RLock()
_state = {"compiled": 0, "seconds": 0.0}


class Kernel:
    """One kernel; calling it compiles it first, or takes it from the cache folder.

    letters : its arguments, a letter each (a: an array of any dtype or None, i: int64, f: float32, d: float64).
    """

    def __init__(self, function: Callable, letters: str):
        self.function, self.letters, self.name = function, letters, function.__name__
        self.entry: Callable = self._first
        self.__doc__ = function.__doc__

    def __call__(self, *args):
        return self.entry(*args)

    def _first(self, *args):
        self.load()
        return self.entry(*args)

    def load(self) -> None:
        """Have the machine code ready."""
        with _lock:
            if self.entry == self._first:
                self.entry = self._compiled()

    def _compiled(self) -> Callable:
        tier.configure()
        from numba import njit, types

        from .kernels.memory import array

        known = {"a": array, "i": types.int64, "f": types.float32, "d": types.float64}
        signature = types.void(*(known[letter] for letter in self.letters))
        dispatcher = njit(nogil=True, error_model="numpy")(self.function)
        dispatcher._cache = _cache(self.function)
        loaded = dispatcher._cache.load_overload(signature, dispatcher.targetctx)
        if loaded is None:
            with _progress(f"{self.function.__module__.rpartition('.')[2]}.{self.name}"):
                dispatcher.compile(signature)
        else:
            dispatcher.add_overload(loaded)
            dispatcher.targetctx.insert_user_function(loaded.entry_point, loaded.fndesc, [loaded.library])
        found = dispatcher.overloads[signature.args]
        address = found.library.get_pointer_to_function(found.fndesc.llvm_func_name)
        natives[found.entry_point] = Native(self.letters, address)
        return found.entry_point


def kernel(letters: str) -> Callable[[Callable], Kernel]:
    """Decorator of a kernel: ``@kernel("iiaai")``. The first two arguments are the items begin ... end to work on."""
    return lambda function: Kernel(function, letters)


def device(function: Callable) -> Callable:
    """Decorator of a function that kernels call, compiled with each of them."""
    from numba import njit

    return njit(nogil=True, error_model="numpy", inline="never")(function)


def compiled() -> tuple[int, float]:
    """How many kernels this process has compiled, and in how many seconds; those from the cache do not count."""
    return _state["compiled"], _state["seconds"]


@cache
def source_digest() -> str:
    """A digest of all that kernels are made from."""
    import vtlab.ops.numerics as numerics

    digest = hashlib.sha256()
    for path in (*sorted((Path(__file__).parent / "kernels").glob("*.py")), Path(__file__).with_name("tier.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(Path(numerics.__file__).with_name("coefficients.py").read_bytes())
    return digest.hexdigest()[:16]


def _cache(function: Callable):
    """Numba's own on-disk cache (safe for several processes: written aside and renamed; keyed by the processor) in
    vtlab's folder, good for as long as no source of any kernel changes."""
    from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

    from ..build import cache_folder

    class Locator(_CacheLocator):
        def __init__(self, py_func):
            self.lineno = py_func.__code__.co_firstlineno

        def get_cache_path(self):
            return str(cache_folder() / "cpu")

        def get_source_stamp(self):
            return source_digest()

        def get_disambiguator(self):
            return None

        @classmethod
        def from_function(cls, py_func, py_file):
            return cls(py_func)

    class Implementation(CompileResultCacheImpl):
        _locator_classes = (Locator,)

        def check_cachable(self, result):
            return True

        def reduce(self, result):
            return self._imaged(super().reduce(result))

        def rebuild(self, target_context, payload):
            return super().rebuild(target_context, self._imaged(payload))

        def _imaged(self, payload):
            """What Numba keeps of a kernel, whose object is left to processes without Numba as well."""
            _, kind, data = payload[0]
            if kind == "object":
                images.keep(function.__module__.rpartition(".")[2], function.__name__, data[0])
            return payload

    class Cache(FunctionCache):
        """A folder that cannot be read or written costs compiling again, no more."""

        _impl_class = Implementation

        def load_overload(self, sig, target_context):
            with contextlib.suppress(OSError):
                return super().load_overload(sig, target_context)

        def save_overload(self, sig, data):
            with contextlib.suppress(OSError):
                super().save_overload(sig, data)

    return Cache(function)


class _progress:
    """Says on stderr what is being compiled: a spinner on a terminal, else a line at the first kernel."""

    _said = False

    def __init__(self, name: str):
        self.name, self.status = name, None

    def __enter__(self) -> None:
        self.began = time.perf_counter()
        text = f"vtlab: compiling CPU kernels for {tier.tier()}, once for this machine"
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console

            self.status = Console(stderr=True).status(f"{text}: {self.name}")
            self.status.start()
        elif not _progress._said and os.environ.get("VTLAB_QUIET") != "1":
            _progress._said = True
            print(f"{text} ({self.name} and others as they are needed)", file=sys.stderr, flush=True)

    def __exit__(self, *error) -> None:
        if self.status is not None:
            self.status.stop()
        _state["compiled"] += 1
        _state["seconds"] += time.perf_counter() - self.began
