"""What kernels need to know of a GPU beyond its version: asked once for each device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from vtlab.ops.errors import ContractError


@dataclass(frozen=True)
class DeviceCaps:
    """Facts of one GPU. smem_per_block_optin : bytes that a block may have once its kernel has opted in."""

    sm_major: int
    sm_minor: int
    smem_per_block_optin: int
    sm_count: int
    pageable_memory_access: bool
    integrated: bool
    l2_bytes: int
    total_mem: int

    @property
    def sm_arch(self) -> int:
        """10 * sm_major + sm_minor, e.g. 90."""
        return 10 * self.sm_major + self.sm_minor

    @property
    def unified_memory(self) -> bool:
        """Whether the host may follow its pointers at the speed of memory: the GPU shares it."""
        return self.integrated


@cache
def device_caps(ordinal: int) -> DeviceCaps:
    """The facts of GPU number `ordinal`.

    Errors: ContractError for a number that no GPU has, DeviceError where CuPy or the driver is missing.
    """
    from .cupy_runtime import import_cupy

    runtime = import_cupy().cuda.runtime
    count = runtime.getDeviceCount()
    if not 0 <= ordinal < count:
        raise ContractError("device_caps", "ordinal", ordinal, f"0 ... {count - 1}")
    return read_caps(runtime.getDeviceProperties(ordinal))


def read_caps(facts: dict) -> DeviceCaps:
    """From what cudaGetDeviceProperties says."""
    return DeviceCaps(
        facts["major"], facts["minor"], facts["sharedMemPerBlockOptin"], facts["multiProcessorCount"],
        bool(facts["pageableMemoryAccess"]), bool(facts["integrated"]), facts["l2CacheSize"], facts["totalGlobalMem"],
    )  # fmt: skip
