"""From a kernel's name to a function of the current device: the verified cubin if there is one, else a compilation."""

from __future__ import annotations

import threading

from vtlab.ops.errors import ContractError

from .arch import serving
from .build import Store


class Loader:
    """Modules and functions by device; each family is loaded once a device. `compiled` counts what was not found."""

    def __init__(self, cupy, store: Store | None = None):
        self._cupy, self._store = cupy, store or Store()
        self._functions: dict[tuple[int, str], object] = {}
        self._modules: dict[tuple[int, str], object] = {}
        self._lock = threading.Lock()
        self.compiled = 0

    def function(self, family: str, kernel: str, device: int):
        """The kernel as a launchable function; a dict read once it has been loaded.

        Raises ContractError for a GPU older than compute capability 8.0 or a kernel that the family lacks, DeviceError
        where nothing was built and nothing can compile.
        """
        try:
            return self._functions[device, kernel]
        except KeyError:
            pass
        with self._lock:
            module = self._modules.get((device, family))
            if module is None:
                module = self._modules[device, family] = self._load(family)
            try:
                function = module.get_function(kernel)
            except self._cupy.cuda.driver.CUDADriverError:
                raise ContractError(family, "kernel", repr(kernel), f"a kernel of {family}.cu") from None
            return self._functions.setdefault((device, kernel), function)

    def _load(self, family: str):
        capability = self._cupy.cuda.Device().compute_capability
        target = serving(int(capability[:-1]), int(capability[-1]))
        build = self._store.find(family, target)
        if build is None:
            self.compiled += 1
            build = self._store.make(family, target)
        module = self._cupy.cuda.function.Module()
        module.load(build.image)
        return module
