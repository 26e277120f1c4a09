"""Which provider of an op serves on a device: a walk down the slot, remembered until something changes."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from ..capabilities import Capabilities, Device
from .disabled import BYTES, NAMES, DisabledNames
from .slot import COPY_PRIORITY, REFERENCE_PRIORITY, REFERENCE_TIER, TIERS, OpProvider, ProviderError, Slot
from .tiers import Backend, copy_through

log = logging.getLogger("vtlab.ops.providers")

Names = frozenset[str] | None
Hot = dict[Names, dict[str, dict[str, OpProvider]]]


class Selection:
    """The state of a registry and the walk over it; everything runs under the lock but calls and hot reads.

    `_hot` is what the lock-free read sees, by names of `using`, device and op: three reads of string keys take half
    the time of one with a tuple. An invalidation replaces it with a new dict instead of clearing it, so that a walk
    that began before (a predicate may call back into the registry) publishes into the old one.
    """

    def __init__(self, known_ops: Callable[[str], bool] | None, environ: Mapping[str, str]):
        self.known_ops = known_ops
        self._environ: Mapping[str, str] | None = environ
        self._lock = threading.RLock()
        self._slots: dict[tuple[str, str], Slot] = {}
        self._caps = {device: Capabilities(device) for device in Device}
        self._backends: dict[Device, Backend] = {}
        self._copying: set[Device] = set()
        self._disabled = DisabledNames()
        self._counting = self._verbose = False
        self._tier_hits: set[tuple[str, str]] = set()
        self._said: set[tuple] = set()
        self.generation = 0  # another number: other providers may serve
        self._invalidate()

    def serve(self, op: str, device: str, names: Names, kwargs: Mapping[str, object]) -> object:
        """Calls the selected provider, and the next one down for as long as they return NotImplemented."""
        provider = self._selected(op, device, names)
        while (result := provider.fn(**kwargs)) is NotImplemented:
            if provider.name == REFERENCE_TIER:  # its function is the CPU's first choice: go on below that
                device, names = Device.CPU, None
                provider = self._selected(op, device, names)
            declined, provider = provider.name, self._next(op, device, names, provider.name)
            with self._lock:
                self._say(("declined", op, device, declined), f"{declined} declined a call; {provider.name} serves it")
        return result

    def _selected(self, op: str, device: str, names: Names) -> OpProvider:
        try:
            return self._hot[names][device][op]
        except (KeyError, TypeError):
            pass
        return self._select(op, device, names)

    def _invalidate(self) -> None:
        self.generation += 1
        self._hot: Hot = {}
        self._resolved: dict[tuple[str, str, Names], OpProvider | None] = {}

    def _read_environment(self) -> None:
        environ, self._environ = self._environ, None
        if environ is None:
            return
        for name in self._disabled.add_list(environ.get("VTLAB_DISABLE", "")):
            log.warning("VTLAB_DISABLE: %r ignored: %d names of %d bytes are the most", name, NAMES, BYTES)
        self._counting = self._verbose = environ.get("VTLAB_PROVIDER_STATS") == "1"

    def _select(self, op: str, device: str, names: Names) -> OpProvider:
        with self._lock:
            self._read_environment()
            self._check(op, device)
            key, hot, resolved = (op, device, names), self._hot, self._resolved
            if key not in resolved:
                resolved[key] = self._resolve(op, device, names)
            provider = resolved[key]
            if provider is None:
                raise ProviderError(op, device, f"no kernel for op {op} on device {device}", self._exist(op))
            stats = self._slot(op, device).stats
            if names is None:
                stats.last_selected = provider.name
            if self._counting:
                stats.selections += 1
                if self._verbose:
                    self._say(("selected", op, device), f"{provider.name} selected")
            else:
                hot.setdefault(names, {}).setdefault(device, {})[op] = provider
            return provider

    def _resolve(self, op: str, device: str, names: Names) -> OpProvider | None:
        provider = self._walk(op, device, names, lambda slot: slot.providers)
        if names is None and (provider is None or provider.name in TIERS):
            self._slot(op, device).stats.fallbacks += 1
        return provider

    def _next(self, op: str, device: str, names: Names, declining: str) -> OpProvider:
        with self._lock:
            self._read_environment()
            self._check(op, device)
            slot = self._slots.get((op, device))
            if slot is None or not slot.has(declining):
                got = f"no kernel for op {op} on device {device} is called {declining!r}"
                raise ProviderError(op, device, got, self._exist(op))
            slot.stats.declines += 1
            provider = self._walk(op, device, names, lambda slot: slot.below(declining))
            if provider is None:
                got = f"no kernel for op {op} on device {device} below {declining}, which declined the call"
                raise ProviderError(op, device, got, self._exist(op))
            return provider

    def _walk(self, op: str, device: str, names: Names, part: Callable[[Slot], Iterable]) -> OpProvider | None:
        """The first eligible provider of `part` of the slot; a miss brings the tiers in and looks once more."""
        slot = self._slot(op, device)
        provider = self._first(op, device, names, part(slot))
        if provider is None and self._install_tiers(op, device, names, TIERS):
            provider = self._first(op, device, names, part(slot))
        if provider is not None and provider.name in TIERS:
            if provider.name == REFERENCE_TIER:
                self._tier_hits.add((op, Device(device)))
            self._say(("tier", op, device, provider.name), f"served by {provider.name}, the CPU's function")
        return provider

    def _first(self, op: str, device: str, names: Names, providers: Iterable[OpProvider]) -> OpProvider | None:
        for provider in providers:
            if not self._allowed(provider.name, names):
                continue
            if provider.name in TIERS:
                provider = self._tier(provider.name, op, Device(device))
                if provider is not None:
                    return provider
            elif self._supported(op, device, provider):
                return provider
        return None

    def _allowed(self, name: str, names: Names) -> bool:
        return name not in self._disabled and (names is None or name in names)

    def _supported(self, op: str, device: str, provider: OpProvider) -> bool:
        if provider.supports is None:
            return True
        try:
            return bool(provider.supports(self._caps[device]))
        except Exception:
            log.exception("%s on %s: unsupported by %s, whose predicate raised", op, device, provider.name)
            return False

    def _tier(self, name: str, op: str, device: Device) -> OpProvider | None:
        """The tier's provider as things stand: the CPU's choice may have changed since it was installed."""
        backend, cpu = self._backends.get(device), self._slots.get((op, Device.CPU))
        if device is Device.CPU or backend is None or cpu is None:
            return None
        chosen = self._first(op, Device.CPU, None, cpu.providers)
        if chosen is None:
            return None
        if name == REFERENCE_TIER:
            return OpProvider(name, chosen.fn, REFERENCE_PRIORITY) if backend.unified_memory() else None
        serve = partial(self.serve, op, Device.CPU, None)
        return OpProvider(name, copy_through(backend, serve), COPY_PRIORITY) if device in self._copying else None

    def _install_tiers(self, op: str, device: str, names: Names, tiers: Iterable[str]) -> int:
        slot, before = self._slot(op, device), len(self._slot(op, device).providers)
        for name in tiers:
            if self._allowed(name, names) and not slot.has(name):
                provider = self._tier(name, op, Device(device))
                if provider is not None:
                    slot.insert(provider)
        return len(slot.providers) - before

    def _slot(self, op: str, device: str) -> Slot:
        slot = self._slots.get((op, device))
        return self._slots.setdefault((op, Device(device)), Slot()) if slot is None else slot

    def _known(self, op: object, device: object) -> bool:
        if not isinstance(op, str) or not isinstance(device, str) or device not in self._caps:
            return False
        return self.known_ops is None or self.known_ops(op)

    def _check(self, op: str, device: str) -> None:
        if not self._known(op, device):
            raise ProviderError(op, device, f"no op {op!r} on device {device!r} is in the table", self._exist(op))

    def _exist(self, op: str) -> str:
        """Every provider of `op` in words, device by device."""
        slots = [(device, slot) for (name, device), slot in self._slots.items() if name == op]
        words = [
            f"{device}: " + ", ".join(p.name + " (disabled)" * (p.name in self._disabled) for p in slot.providers)
            for device, slot in slots
            if slot.providers
        ]
        return "; ".join(words) or "none on any device"

    def _say(self, what: tuple, text: str) -> None:
        """One line on stderr, once for each `what` = (kind, op, device, ...)."""
        if what not in self._said:
            self._said.add(what)
            print(f"vtlab: {what[1]} on {what[2]}: {text}", file=sys.stderr)
