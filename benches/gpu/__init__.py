"""Kernels on a GPU beside their peers on the same chip: one module a family, each with a generator `benches()`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from .bench import Bench

_MACHINERY = ("__main__", "arrays", "bench", "ceilings", "decode", "measure", "report", "results")


def families() -> list[str]:
    """The families that have GPU benches: the modules of this package that are no machinery."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _MACHINERY)


def benches(names: tuple[str, ...] = ()) -> Iterator[Bench]:
    """Every bench whose family or name contains one of `names`; all of them without. Needs no GPU."""
    for family in families():
        for bench in importlib.import_module(f".{family}", __name__).benches():
            if not names or any(name in family or name in bench.name for name in names):
                yield bench
