"""The CPU tier's machinery: what importing costs, the cache folder, instruction sets, threads, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from vtlab import ops, oracle
from vtlab.device.cpu import compiling, images, launch
from vtlab.device.cpu import threads as pool
from vtlab.device.cpu.tier import TIERS, tier

from .cpu_tiers import digests

X, W = np.linspace(-3, 3, 48, dtype=np.float32).reshape(3, 16), np.ones(16, np.float32)


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=240
    )


def test_importing_brings_neither_numba_nor_the_tier():
    code = """import sys
from vtlab import ops, oracle
print([name for name in ("numba", "llvmlite", "vtlab.device") if name in sys.modules])
import vtlab.device.cpu
print([name for name in ("numba", "llvmlite") if name in sys.modules])"""
    assert python(code).stdout.splitlines() == ["[]", "[]"]


def test_without_numba_the_oracle_serves(monkeypatch):
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    ops.providers.registry.set_device_provider_caps(ops.providers.device_provider_caps("cpu"))  # choose anew
    try:
        np.testing.assert_array_equal(ops.rms_norm(X, W), oracle.rms_norm(X, W))
    finally:
        monkeypatch.undo()
        ops.providers.registry.set_device_provider_caps(ops.providers.device_provider_caps("cpu"))
    np.testing.assert_array_equal(ops.rms_norm(X, W), oracle.rms_norm.mirror(X, W))


def test_the_oracle_can_be_asked_for():
    with ops.using("oracle"):
        np.testing.assert_array_equal(ops.gelu_and_mul(X), oracle.gelu_and_mul(X))


def test_kernels_are_compiled_once_and_said_once(tmp_path):
    code = """import numpy as np
from vtlab import ops
from vtlab.device.cpu import compiling
for _ in range(2): ops.greedy_argmax(np.zeros((1, 4), "f4"))
print(compiling.compiled()[0])
import sys; print("numba" in sys.modules, file=sys.stderr)"""
    first, second = (python(code, VTLAB_CACHE=str(tmp_path)) for _ in range(2))
    assert (first.stdout, second.stdout) == ("1\n", "0\n")
    assert first.stderr.count("compiling CPU kernels") == 1 and first.stderr.endswith("True\n")
    assert second.stderr == ("False\n" if images.available() else "True\n")


def test_several_processes_share_a_cold_cache(tmp_path):
    code = """import numpy as np
from vtlab import ops
print(ops.greedy_argmax(np.float32([[1, 3, 2]]))[0])"""
    with ThreadPoolExecutor(2) as both:
        runs = list(both.map(lambda _: python(code, VTLAB_CACHE=str(tmp_path)), range(2)))
    assert [run.stdout for run in runs] == ["1\n"] * 2, [run.stderr for run in runs]


def test_a_cache_folder_that_cannot_be_written_costs_only_time(tmp_path):
    (tmp_path / "cpu").write_text("a file where the folder should be")
    code = """import numpy as np
from vtlab import ops
print(ops.greedy_argmax(np.float32([[1, 3, 2]]))[0])"""
    run = python(code, VTLAB_CACHE=str(tmp_path))
    assert run.stdout == "1\n", run.stderr


def test_another_source_is_another_cache_entry(tmp_path, monkeypatch):
    before = compiling.source_digest()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "norm.py").write_text("another")
    (tmp_path / "tier.py").write_text("and another")
    monkeypatch.setattr(compiling, "__file__", str(tmp_path / "compiling.py"))
    compiling.source_digest.cache_clear()
    try:
        assert compiling.source_digest() != before
    finally:
        compiling.source_digest.cache_clear()


LOWER = [name for name in ("avx2", "portable") if tier() in {"avx2": ("avx512",), "portable": ("avx512", "avx2")}[name]]


@pytest.mark.parametrize("name", LOWER)
def test_every_tier_gives_the_same_bytes(name):
    wanted = ["rms_norm", "silu_and_mul", "matmul_bt"][: 3 if name == "avx2" else 1]  # fma is a call there, and slow
    run = subprocess.run(
        [sys.executable, "-m", "vtlab.parity.cpu_tiers", *wanted], capture_output=True, text=True, check=True,
        env={**os.environ, "VTLAB_CPU_TIER": name}, timeout=280,
    )  # fmt: skip
    found = json.loads(run.stdout)
    assert found["tier"] == name
    assert found["digests"] == digests(wanted)


def test_an_impossible_tier_is_refused(monkeypatch):
    assert tier() in TIERS
    monkeypatch.setenv("VTLAB_CPU_TIER", "sse9")
    tier.cache_clear()
    try:
        with pytest.raises(ops.ContractError, match="VTLAB_CPU_TIER"):
            tier()
    finally:
        tier.cache_clear()


@pytest.mark.parametrize("text, count", [("0", None), ("-1", None), ("two", None), ("3", 3)])
def test_the_number_of_threads_is_positive(text, count, monkeypatch):
    monkeypatch.setattr(pool, "_count", 0)
    monkeypatch.setenv("VTLAB_THREADS", text)
    if count is None:
        with pytest.raises(ops.ContractError, match="VTLAB_THREADS"):
            pool.threads()
    else:
        assert pool.threads() == count


def test_an_error_on_another_thread_reaches_the_caller(monkeypatch):
    monkeypatch.setattr(pool, "_WORTH_IT", 0)

    def kernel(begin, end):
        if threading.current_thread() is not threading.main_thread():
            raise ArithmeticError("there")
        threading.Event().wait(0.05)

    with pool.using(2), pytest.raises(ArithmeticError, match="there"):
        pool.split(kernel, 16, 1)
    done = []
    with pool.using(2):
        pool.split(lambda begin, end: done.extend(range(begin, end)), 16, 1)  # and the team still works
    assert sorted(done) == list(range(16))


def test_callers_on_several_threads_do_not_meet(monkeypatch):
    monkeypatch.setattr(pool, "_WORTH_IT", 0)
    x = np.random.Generator(np.random.PCG64(0)).standard_normal((40, 256), np.float32)
    want = oracle.silu_and_mul.mirror(x)
    with pool.using(2), ThreadPoolExecutor(4) as callers:
        for got in callers.map(lambda _: ops.silu_and_mul(x), range(64)):
            np.testing.assert_array_equal(got, want)


def test_a_forked_child_makes_threads_of_its_own():
    code = """import os, sys
import numpy as np
from vtlab import ops
from vtlab.device.cpu import threads
threads._WORTH_IT = 0
x = np.ones((64, 64), "f4")
with threads.using(2):
    ops.relu(np.tile(x, 64))
    if (child := os.fork()) == 0:
        ops.relu(np.tile(x, 64))
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"""
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    assert python(code).stdout == "7\n"


def test_rows_with_other_strides_and_results_that_are_strided():
    wide = np.random.Generator(np.random.PCG64(1)).standard_normal((4, 3, 40), np.float32)
    x = wide[::2, :, 4:20]
    np.testing.assert_array_equal(ops.rms_norm(x, W), oracle.rms_norm.mirror(x, W))
    out = np.zeros((2, 3, 32), np.float32)
    ops.rms_norm(x, W, out=out[..., ::2])
    np.testing.assert_array_equal(out[..., ::2], oracle.rms_norm.mirror(x, W))
    assert not out[..., 1::2].any()


def test_what_a_kernel_cannot_follow_is_refused():
    swapped, fixed = X.astype(X.dtype.newbyteorder()), np.zeros_like(X)
    fixed.flags.writeable = False
    with pytest.raises(ops.ContractError, match="order of bytes"):
        ops.relu(swapped)
    with pytest.raises(ops.ContractError, match="read-only"):
        ops.relu(X, out=fixed)
    assert not fixed.any()
