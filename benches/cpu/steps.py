"""What a captured decode step of one GGUF file spends on products: its launches with and without them, in turns.

python -m vtlab.benches.cpu.steps FILE [--threads 2] [--context 290] [--kv-dtype float32]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from vtlab.device.cpu import threads as team
from vtlab.device.cpu.launch import Kernels
from vtlab.device.cpu.natives import natives
from vtlab.device.cpu.replay import Launch, Plan
from vtlab.ops.blocks import WEIGHT_TYPES

_QUANTISERS = "words_32", "words_256"
PRODUCTS = {kind.lower() for kind in WEIGHT_TYPES} | {*_QUANTISERS, "product"}
"""Kernels of `matmul_bt_quant`: the products, and the activations' way into eight bits."""


def names() -> dict[int, str]:
    """The kernels that are loaded, by address."""
    held = [vars(one) for one in gc.get_objects() if isinstance(one, Kernels)]
    return {natives[entry].address: name for one in held for name, entry in one.items() if entry in natives}


def step_of(file: Path, threads: int, context: int, kv_dtype: str | None) -> tuple[object, Plan]:
    """(the engine, whose arrays the plan reads; the plan of a step of one request after about `context` tokens)."""
    from vtlab.models import SamplingParams, load

    engine = load(file, kv_dtype=kv_dtype)
    ids = np.random.Generator(np.random.PCG64(0)).integers(1000, 20000, context - 4).tolist()
    plans = []
    before, Plan.run = Plan.run, lambda plan: (plans.append(plan), before(plan))
    try:
        for _ in engine.stream(ids, SamplingParams(max_tokens=6, ignore_eos=True)):
            pass
    finally:
        Plan.run = before
    return engine, plans[-1]


def timed(plans: dict[str, Plan], seconds: float) -> dict[str, float]:
    """The least seconds of each, in turns: what a machine does while others leave it alone."""
    took, end = defaultdict(list), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, plan in plans.items():
            start = time.perf_counter()
            plan.run()
            took[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in took.items()}


def by_kernel(launches: tuple[Launch, ...], called: dict[int, str], threads: int, seconds: float) -> dict[str, float]:
    """The least seconds that each kernel's launches take in the step on one thread, in the step's own order."""
    alone = [Plan([one], 1) for one in launches]
    took, end = defaultdict(list), time.perf_counter() + seconds
    while time.perf_counter() < end:
        step = Counter()
        for one, plan in zip(launches, alone):
            start = time.perf_counter()
            plan.run()
            step[called[one.kernel.address]] += time.perf_counter() - start
        for name, value in step.items():
            took[name].append(value)
    return {name: min(values) for name, values in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=290)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--kv-dtype", default=None)
    given = parser.parse_args()
    with team.using(given.threads):
        engine, plan = step_of(given.file, given.threads, given.context, given.kv_dtype)
        called = names()
        product = [called[one.kernel.address] in PRODUCTS for one in plan.launches]
        chosen = {
            "step": plan,
            "products": Plan([one for one, of in zip(plan.launches, product) if of], given.threads),
            "rest": Plan([one for one, of in zip(plan.launches, product) if not of], given.threads),
        }
        found = timed(chosen, given.seconds)
        print(f"{given.file.name}, {given.threads} threads, {given.context} tokens, cache {engine.decoder.kv_dtype}")
        for name, value in found.items():
            print(
                f"  {name:9s} {value * 1e3:7.3f} ms {value / found['step']:6.1%}  {len(chosen[name].launches)} launches"
            )
        print(f"  products {1 - found['rest'] / found['step']:.1%} of the step by what is left without them")
        one = by_kernel(plan.launches, called, given.threads, given.seconds / 2)
        whole, counts = sum(one.values()), Counter(called[launch.kernel.address] for launch in plan.launches)
        print("on one thread, launch by launch:")
        for name, value in sorted(one.items(), key=lambda pair: -pair[1]):
            print(f"  {name:12s} {counts[name]:4d} {value * 1e3:8.3f} ms {value / whole:6.1%}")
        print(f"  products {sum(one.get(name, 0.0) for name in PRODUCTS) / whole:.1%}")


if __name__ == "__main__":
    main()
