"""The runtime of a real GPU: arrays, streams and launches through CuPy."""

from __future__ import annotations

from vtlab.ops.capabilities import Capabilities, Device

from .errors import DeviceError
from .loader import Loader


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
        self._loader = Loader(self._cupy)

    def empty(self, shape, dtype):
        return self._cupy.empty(shape, dtype)

    def pointer(self, array) -> int:
        return array.data.ptr

    def place(self, array):
        return array.data.device_id

    def here(self):
        return self._cupy.cuda.runtime.getDevice()

    def stream(self) -> int:
        return self._cupy.cuda.get_current_stream().ptr

    def capturing(self) -> bool:
        return bool(self._cupy.cuda.runtime.streamIsCapturing(self.stream()))

    def read(self, array):
        return self._cupy.asnumpy(array)

    def launch(self, family, kernel, grid, block, shared, args) -> None:
        function = self._loader.function(family, kernel, self.here())
        function((grid,), (*block, 1), args, shared_mem=shared)
