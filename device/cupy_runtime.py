"""The runtime of a real GPU: arrays, streams and launches through CuPy."""

from __future__ import annotations

import contextlib
from collections import deque

import numpy as np

from vtlab.ops.capabilities import Capabilities, Device

from . import early
from .aot import store
from .caps import device_caps
from .errors import DeviceError
from .loader import Loader
from .tensor_maps import strip_map, tensor_map

_SHARED = 48 << 10
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def import_cupy():
    """CuPy with at least one GPU; DeviceError that says what is missing."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"CuPy is not installed ({error}): pip install vtlab[cuda13] or vtlab[cuda12]") from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"no usable CUDA driver: {error}") from None
    if count == 0:
        raise DeviceError("the CUDA driver sees no GPU")
    return cupy


def capabilities() -> Capabilities:
    """What the current GPU can do; DeviceError where there is none."""
    runtime = import_cupy().cuda.runtime
    facts = runtime.getDeviceProperties(runtime.getDevice())
    return Capabilities(Device.CUDA, True, facts["major"], facts["minor"], facts["multiProcessorCount"])


class CupyRuntime:
    """Launches on CuPy's current device and stream."""

    def __init__(self):
        self._cupy = import_cupy()
        self._loader = Loader(self._cupy, store())
        self._queues: dict[int, object] = {}
        self._opted: dict[int, int] = {}
        self._guard: contextlib.ExitStack | None = None
        self._last = deque(maxlen=4)

    def empty(self, shape, dtype):
        return self._cupy.empty(shape, dtype)

    def pointer(self, array) -> int:
        return array.data.ptr

    def place(self, array):
        return array.data.device_id

    def here(self):
        return self._cupy.cuda.runtime.getDevice()

    def shared_memory(self) -> int:
        return device_caps(self.here()).smem_per_block_optin

    def capability(self) -> tuple[int, int]:
        caps = device_caps(self.here())
        return caps.sm_major, caps.sm_minor

    def stream(self) -> int:
        return self._cupy.cuda.get_current_stream().ptr

    def capturing(self) -> bool:
        return bool(self._cupy.cuda.runtime.streamIsCapturing(self.stream()))

    def read(self, array):
        with self._naming():
            return self._cupy.asnumpy(array)

    def send(self, host):
        return self._cupy.asarray(host)

    def pinned(self, size):
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(max(size, 1)), np.uint8, size)

    def upload(self, host, target) -> None:
        target.data.copy_from_host_async(host.ctypes.data, host.nbytes, self._cupy.cuda.get_current_stream())

    def zero(self, array) -> None:
        array.data.memset_async(0, array.nbytes, self._cupy.cuda.get_current_stream())

    def wait(self) -> None:
        with self._naming():
            self._cupy.cuda.get_current_stream().synchronize()

    @contextlib.contextmanager
    def _naming(self):
        """A kernel's fault shows where the host waits next: say which ones were started last."""
        try:
            yield
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(f"{error}; the last kernels started: {', '.join(self._last) or 'none'}") from error

    def queue(self):
        """A stream that the default stream waits for, and that waits for it."""
        device = self.here()
        if device not in self._queues:
            self._queues[device] = self._cupy.cuda.Stream()
        return self._queues[device]

    def begin_capture(self) -> None:
        stream = self._cupy.cuda.get_current_stream()
        if stream.ptr == 0 or self.capturing():
            why = "the default stream cannot be captured" if stream.ptr == 0 else "a capture is under way"
            raise DeviceError(f"{why}: capture inside `queue()`, one at a time")
        stream.begin_capture()
        self._guard = contextlib.ExitStack()
        self._guard.enter_context(self._cupy.cuda.using_allocator(_refuse))

    def end_capture(self):
        if self._guard is None:
            raise DeviceError("no capture is under way")
        self._guard.close()
        self._guard = None
        return self._cupy.cuda.get_current_stream().end_capture()

    def replay(self, graph) -> None:
        graph.launch(self._cupy.cuda.get_current_stream())

    def _opt_in(self, function, kernel: str, shared: int) -> None:
        """Let the kernel have more dynamic shared memory than every block gets; asked for once for each size."""
        if shared <= self._opted.get(function.ptr, _SHARED):
            return
        most = self.shared_memory()
        if shared > most:
            raise DeviceError(f"{kernel} needs {shared} bytes of shared memory, a block of this GPU has {most}")
        self._cupy.cuda.driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED, shared)
        self._opted[function.ptr] = shared

    def tensor_map(self, address, width, rows, stride, high):
        return tensor_map(address, width, rows, stride, high)

    def strip_map(self, address, width, rows, stride, high):
        return strip_map(address, width, rows, stride, high)

    def launch(self, family, kernel, grid, block, shared, args) -> None:
        args = [np.asarray(value) if isinstance(value, np.void) else value for value in args]  # structures, by value
        function = self._loader.function(family, kernel, self.here())
        if shared > _SHARED:
            self._opt_in(function, kernel, shared)
        self._last.append(kernel)
        if kernel.endswith(early.EARLY) and early.starter() and self.capability() >= (9, 0):
            if error := early.start(function.ptr, grid, block, shared, self.stream(), args):
                raise DeviceError(f"{kernel}: cuLaunchKernelEx fails with error {error}")
            return
        function((grid,), (*block, 1), args, shared_mem=shared)


def _refuse(size: int):
    """Stands for the allocator during a capture: a graph would remember memory that others get later."""
    raise DeviceError(f"{size} bytes asked for during a capture: give every op its `out`")
