"""The registry: several named implementations of one op on one device, of which one is chosen."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..capabilities import Capabilities, Device
from .selection import Selection
from .slot import REFERENCE_TIER, OpProvider, OpStats, ProviderError, native
from .steering import steered
from .tiers import Backend


class Registry(Selection):
    """choice(op, device) = the first provider by (priority descending, name ascending) that is not disabled and
    whose predicate accepts the device's capabilities.

    known_ops : predicate that closes the enumeration of ops; None admits every name.
    environ : where VTLAB_DISABLE (names to disable, comma-separated) and VTLAB_PROVIDER_STATS=1 (call statistics,
        and a line on stderr at each slot's first selection) are read, once, at first use.

    `get_op`, `get_op_fallback` and `call` raise ProviderError when nothing serves. All methods are thread-safe;
    a cached `get_op` takes no lock.
    """

    def __init__(self, known_ops: Callable[[str], bool] | None = None, environ: Mapping[str, str] = os.environ):
        super().__init__(known_ops, environ)

    def register_op_provider(self, op: str, device: str, provider: OpProvider) -> bool:
        """Adds `provider`; False, and nothing changes, where it is malformed, its name taken, or the slot full."""
        return self._register(op, device, provider) is None

    def register_op(self, op: str, device: str, fn: Callable) -> bool:
        """Adds `fn` as the provider "vt-native" of priority 0, without a predicate."""
        return self.register_op_provider(op, device, OpProvider("vt-native", fn))

    def provider(self, op: str, device: str, name: str, *, priority: int = 0,
                 supports: Callable[[Capabilities], bool] | None = None) -> Callable:  # fmt: skip
        """Decorator that registers a launcher; raises ProviderError where `register_op_provider` returns False."""

        def register(fn: Callable) -> Callable:
            why = self._register(op, device, OpProvider(name, fn, priority, supports))
            if why is not None:
                got = f"provider {name!r} for op {op} on device {device} refused: {why}"
                raise ProviderError(op, device, got, self._exist(op))
            return fn

        return register

    def _register(self, op: str, device: str, provider: OpProvider) -> str | None:
        with self._lock:
            if not self._known(op, device):
                return "no such op or device"
            why = self._slot(op, device).refusal(provider)
            if why is None:
                self._slot(op, device).insert(provider)
                self._invalidate()
            return why

    def get_op(self, op: str, device: str) -> Callable:
        """The function that serves `op` on `device`; a dict read once it has been resolved."""
        try:
            return self._hot[steered()][device][op].fn
        except (KeyError, TypeError):
            pass
        return self._select(op, device, steered()).fn

    def get_op_fallback(self, op: str, device: str, declining_name: str) -> Callable:
        """For a provider that cannot serve its arguments: the next eligible one below it. The choice stays."""
        return self._next(op, device, steered(), declining_name).fn

    def call(self, op: str, device: str, kwargs: Mapping[str, object]) -> object:
        """get_op(op, device)(**kwargs), going down the slot while providers return NotImplemented."""
        return self.serve(op, device, steered(), kwargs)

    def op_registered(self, op: str, device: str) -> bool:
        """Whether a provider of the device's own is eligible; the tiers do not count and are not installed."""
        with self._lock:
            self._read_environment()
            slot = self._slots.get((op, device)) if self._known(op, device) else None
            return slot is not None and self._first(op, device, steered(), native(slot.providers)) is not None

    def op_provider_count(self, op: str, device: str) -> int:
        """Number of providers, eligible or not."""
        return len(self._providers(op, device))

    def op_provider_name_at(self, op: str, device: str, i: int) -> str | None:
        """Name of the i-th provider in selection order, eligible or not; None outside the list."""
        providers = self._providers(op, device)
        return providers[i].name if 0 <= i < len(providers) else None

    def _providers(self, op: str, device: str) -> tuple[OpProvider, ...]:
        slot = self._slots.get((op, device))
        return () if slot is None else slot.providers

    def set_device_provider_caps(self, caps: Capabilities) -> None:
        """Replaces the capabilities of `caps.device`; every choice is made anew."""
        with self._lock:
            self._caps[caps.device] = caps
            self._invalidate()

    def device_provider_caps(self, device: str) -> Capabilities:
        """Capabilities of `device`; not valid before they were set."""
        return self._caps[Device(device)]

    def disable_op_provider(self, name: str) -> bool:
        """Takes `name` out of every slot; False where it is longer than 63 bytes or 8 others are disabled."""
        return self._change(lambda: self._disabled.add(name))

    def enable_op_provider(self, name: str) -> bool:
        """Takes back `disable_op_provider`; False where `name` was not disabled."""
        return self._change(lambda: self._disabled.remove(name))

    def clear_disabled(self) -> None:
        """Enables every provider, those of VTLAB_DISABLE included."""
        self._change(self._disabled.clear)

    def register_backend(self, device: str, backend: Backend) -> None:
        """Names the array library of `device`, which the tiers need."""
        self._change(lambda: self._backends.update({Device(device): backend}))

    def enable_copy_through(self, device: str, enabled: bool = True) -> None:
        """Lets `copy-through` (priority -900) serve what `device` lacks, by copies to the CPU and back."""
        change = self._copying.add if enabled else self._copying.discard
        self._change(lambda: change(Device(device)))

    def register_reference_tier(self, device: str) -> int:
        """Installs `vt-cpu-ref` for every op that the CPU serves and `device` does not; how many were added."""
        with self._lock:
            self._read_environment()
            device = Device(device)
            ops = [op for op, on in self._slots if on is Device.CPU]
            lacking = [op for op in ops if not self._first(op, device, None, native(self._providers(op, device)))]
            return sum(self._install_tiers(op, device, None, [REFERENCE_TIER]) for op in lacking)

    def _change(self, change: Callable) -> object:
        with self._lock:
            self._read_environment()
            done = change()
            self._invalidate()
            return done

    def enable_op_provider_call_stats(self, enabled: bool) -> None:
        """Counts every `get_op` from now on, which then takes the lock."""
        with self._lock:
            self._read_environment()
            self._counting = bool(enabled)
            self._hot = {}

    def op_provider_stats(self, op: str, device: str) -> OpStats:
        """Statistics of one slot, as a copy."""
        with self._lock:
            slot = self._slots.get((op, device))
            return OpStats() if slot is None else replace(slot.stats)

    def stats(self) -> dict[tuple[str, str], OpStats]:
        """Statistics of every slot by (op, device), as copies."""
        with self._lock:
            return {key: replace(slot.stats) for key, slot in self._slots.items()}

    def reset_op_provider_stats(self) -> None:
        """Zeroes the counters; choices and `last_selected` stay."""
        with self._lock:
            for slot in self._slots.values():
                slot.stats = OpStats(slot.stats.last_selected)

    def reference_tier_hits(self) -> int:
        """Number of (op, device) slots that `vt-cpu-ref` came to serve."""
        with self._lock:
            return len(self._tier_hits)
