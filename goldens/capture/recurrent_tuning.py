"""Triton's autotuner under control: goldens from one small configuration of each kernel, timings from the best of all.

Import it before anything of vLLM that defines kernels: it looks over the shoulder of `triton.autotune`.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import triton
from triton import testing

_TUNERS: list[tuple[object, list]] = []


def _cost(config) -> tuple:
    """Least shared memory first: that one fits every dtype and every GPU."""
    blocks = math.prod(value for value in config.kwargs.values() if isinstance(value, int))
    return blocks * config.num_stages, config.num_warps


def _watch() -> None:
    original = triton.autotune

    def autotune(configs, *args, **kwargs):
        configs = list(configs)

        def decorate(function):
            tuner = original([min(configs, key=_cost)], *args, **kwargs)(function)
            _TUNERS.append((tuner, configs))
            return tuner

        return decorate

    triton.autotune = autotune


def tune_all(workers: int = 16) -> None:
    """From now on every kernel tries all of its configurations, compiled side by side."""
    for tuner, configs in _TUNERS:
        tuner.configs = configs
        tuner.cache.clear()
        tuner.do_bench = _brief
        _compile_side_by_side(tuner, workers)


def _brief(call, quantiles):
    """Triton's own measurement, a few milliseconds long: a hundred configurations are measured for each chunked op."""
    return testing.do_bench(call, warmup=3, rep=15, quantiles=quantiles)


def _compile_side_by_side(tuner, workers: int) -> None:
    benchmark = tuner._bench
    seen = set()

    def bench(*args, config, **meta):
        marks = tuple(str(getattr(a, "dtype", a)) for a in args)
        key = (marks, tuple(sorted((k, str(getattr(v, "dtype", v))) for k, v in meta.items() if k != "grid")))
        if key not in seen:
            seen.add(key)
            launch = {name: value for name, value in meta.items() if name != "warmup"}
            try:
                with ThreadPoolExecutor(workers) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
                    for each in tuner.configs:
                        tuner.fn.warmup(*args, **launch, **each.all_kwargs())
            except Exception as error:  # compiled one by one then
                print(f"side by side: {type(error).__name__}: {error}", flush=True)
        return benchmark(*args, config=config, **meta)

    tuner._bench = bench


_watch()
