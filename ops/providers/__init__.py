"""Which implementation of an op runs on a device.

A launcher module registers itself with the decorator::

    @provider("rms_norm", "cuda", "cupy-rawmodule", supports=lambda caps: caps.at_least(8))
    def rms_norm(x, weight, *, out=None, **options): ...

and ``call("rms_norm", "cuda", arguments)`` runs the best provider there. The functions below belong to the one
process-wide `registry`; tests make their own `Registry`. Same shape as vLLM 0.26.0's
``model_executor/kernels/linear/__init__.py`` (ordered lists, is_supported, VLLM_DISABLED_KERNELS).
"""

from ..capabilities import Capabilities, Device
from .registry import Registry
from .slot import COPY_THROUGH, REFERENCE_TIER, OpProvider, OpStats, ProviderError
from .steering import using
from .tiers import Backend

registry = Registry()

register_op_provider = registry.register_op_provider
register_op = registry.register_op
provider = registry.provider
get_op = registry.get_op
get_op_fallback = registry.get_op_fallback
call = registry.call
op_registered = registry.op_registered
op_provider_count = registry.op_provider_count
op_provider_name_at = registry.op_provider_name_at
set_device_provider_caps = registry.set_device_provider_caps
device_provider_caps = registry.device_provider_caps
disable_op_provider = registry.disable_op_provider
enable_op_provider = registry.enable_op_provider
clear_disabled = registry.clear_disabled
register_backend = registry.register_backend
enable_copy_through = registry.enable_copy_through
register_reference_tier = registry.register_reference_tier
reference_tier_hits = registry.reference_tier_hits
enable_op_provider_call_stats = registry.enable_op_provider_call_stats
op_provider_stats = registry.op_provider_stats
reset_op_provider_stats = registry.reset_op_provider_stats
stats = registry.stats

__all__ = [
    "COPY_THROUGH", "REFERENCE_TIER", "Backend", "Capabilities", "Device", "OpProvider", "OpStats", "ProviderError",
    "Registry", "call", "clear_disabled", "device_provider_caps", "disable_op_provider", "enable_copy_through",
    "enable_op_provider", "enable_op_provider_call_stats", "get_op", "get_op_fallback", "op_provider_count",
    "op_provider_name_at", "op_provider_stats", "op_registered", "provider", "reference_tier_hits",
    "register_backend", "register_op", "register_op_provider", "register_reference_tier", "registry",
    "reset_op_provider_stats", "set_device_provider_caps", "stats", "using",
]  # fmt: skip
