"""Time by CUDA-graph replay: the same call many times in one captured graph, median over replays.

Warm: the calls follow each other, so what fits into the second-level cache stays there. Cold: before every call a
kernel reads a buffer larger than that cache, and the time of a graph with those readers alone is taken off again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

REPLAYS = 15
_COLD_CALLS = 20
FLUSH = 1 << 27
"""Bytes read between cold calls: more than twice an H200's second-level cache."""

_READER = r"""
extern "C" __global__ void reader(const float* data, long long count, float* out) {
    float sum = 0.0f;
    for (long long i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) sum += data[i];
    if (sum == 12345.0f) out[0] = sum;
}
"""


def cupy_time(calls: list[Callable[[], object]]) -> float:
    """Microseconds for all `calls`, captured one after the other. They must not allocate, or the capture fails."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()  # operands were made on another stream
    with stream:
        for call in dict.fromkeys(calls):
            call()
        stream.synchronize()
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
        graph.launch(stream)
        times = []
        for _ in range(REPLAYS):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3)
    return statistics.median(times)


def torch_time(calls: list[Callable[[], object]]) -> float:
    """Microseconds for all `calls`, the same way in torch."""
    import torch

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in dict.fromkeys(calls):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    with torch.cuda.stream(stream):
        graph.replay()
        for _ in range(REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def warm(time: Callable, call: Callable[[], object], calls: int) -> float:
    """Microseconds a call, one right after the other."""
    return time([call] * calls) / calls


def cold(time: Callable, call: Callable[[], object], flush: Callable[[], object]) -> float:
    """Microseconds a call on an empty second-level cache."""
    readers = time([flush] * _COLD_CALLS)
    return (time([flush, call] * _COLD_CALLS) - readers) / _COLD_CALLS


def copy_time(nbytes: int, calls: int) -> float:
    """Microseconds, warm, of negating float32 into another array in PyTorch, `nbytes` read and written in all.

    A copy by a kernel: on an H200 the driver's own moves 2,700 GB/s where kernels reach 4,200.
    """
    import torch

    source = torch.randn(nbytes // 8, device="cuda")
    target = torch.empty_like(source)
    return warm(torch_time, lambda: torch.neg(source, out=target), calls)


def cupy_flush() -> Callable[[], object]:
    """A call that reads FLUSH bytes through the second-level cache."""
    import cupy

    kernel = cupy.RawKernel(_READER, "reader")
    data, out = cupy.zeros(FLUSH // 4, cupy.float32), cupy.zeros(1, cupy.float32)
    arguments = (data, cupy.int64(data.size), out)
    return lambda: kernel((1024,), (256,), arguments)


def torch_flush() -> Callable[[], object]:
    """The same in torch."""
    import torch

    data = torch.zeros(FLUSH // 4, device="cuda")
    out = torch.zeros((), device="cuda")
    return lambda: torch.amax(data, dim=0, out=out)
