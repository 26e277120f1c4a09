"""Every GPU bench under pytest-benchmark: rounds of CUDA-graph replays. Needs a GPU with CuPy and torch.

A round is one replay; `calls` in the extra figures says how many calls it holds. Peers and cold caches:
``python -m vtlab.benches.gpu``.
"""

from __future__ import annotations

import pytest

from .gpu import benches


def _missing() -> str | None:
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # no CuPy, no driver, no device: each has an exception of its own
        return f"needs a GPU with CuPy: {type(error).__name__}"
    return None


MISSING = _missing()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("bench", list(benches()), ids=lambda bench: bench.name)
def test_on_a_gpu(benchmark, bench):
    import cupy

    call, stream = bench.ours(), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        call()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(bench.calls):
            call()
        graph = stream.end_capture()

    def replay() -> None:
        graph.launch(stream)
        stream.synchronize()

    benchmark.group = bench.family
    benchmark.extra_info.update(calls=bench.calls, bytes=bench.bytes, flops=bench.flops)
    benchmark.pedantic(replay, rounds=15, warmup_rounds=1)
