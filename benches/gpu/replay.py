"""Time by CUDA-graph replay: the same call many times in one captured graph, median over replays."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

REPLAYS = 15


@dataclass(frozen=True)
class Bench:
    """One shape of one op. `make(xp)` gives (call without arguments, bytes that must move) for CuPy or torch."""

    family: str
    name: str
    ours: Callable[[], Callable[[], object]]
    torch: Callable[[], Callable[[], object]] | None
    bytes: int

    @property
    def calls(self) -> int:
        """Calls in one graph: enough that a replay takes a millisecond or so."""
        return 10 if self.bytes > 1 << 26 else 50


def cupy_time(call: Callable[[], object], calls: int) -> float:
    """Microseconds a call. Everything it writes to is preallocated, or the capture fails."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(calls):
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
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / calls)
    return statistics.median(times)


def torch_time(call: Callable[[], object], calls: int) -> float:
    """Microseconds a call, the same way."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
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
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """GB/s of negating 1 GiB of float32 into another in PyTorch: a copy by a kernel, read and written bytes counted.

    The driver's own copy is no ceiling: on an H200 it moves 2,700 GB/s where kernels reach 4,200.
    """
    import torch

    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / torch_time(lambda: torch.neg(source, out=target), 3) / 1e3
