"""One slot of the registry: the providers of one op on one device, in selection order, and their statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..capabilities import Capabilities
from ..errors import ContractError

CAPACITY = 4
REFERENCE_TIER, REFERENCE_PRIORITY = "vt-cpu-ref", -1000
COPY_THROUGH, COPY_PRIORITY = "copy-through", -900
TIERS = (COPY_THROUGH, REFERENCE_TIER)


class ProviderError(ContractError):
    """No provider serves `op` on `device`, or a provider was refused; lists the providers that exist."""

    def __init__(self, op: str, device: str, got: str, exists: str):
        super().__init__(op, "", got, exists)
        self.device = str(device)
        self.args = (f"{got}; providers of {op}: {exists}",)

    def __reduce__(self):
        return type(self), (self.op, self.device, self.got, self.want)


@dataclass(frozen=True, slots=True)
class OpProvider:
    """One implementation of an op on one device. `supports` reads the device's capabilities; None: any device."""

    name: str
    fn: Callable
    priority: int = 0
    supports: Callable[[Capabilities], bool] | None = None


@dataclass(slots=True)
class OpStats:
    """last_selected: winner of the last resolution outside `using`; selections: `get_op` calls while call
    statistics are on; declines: calls of `get_op_fallback`; fallbacks: resolutions without a native provider."""

    last_selected: str | None = None
    selections: int = 0
    declines: int = 0
    fallbacks: int = 0


@dataclass(slots=True)
class Slot:
    """Providers by priority descending, then name ascending; registration order has no influence.

    The four places are for native providers. The tiers stand beside them: one that was installed on a miss must
    not take the place of a native provider that registers later.
    """

    providers: tuple[OpProvider, ...] = ()
    stats: OpStats = field(default_factory=OpStats)

    def refusal(self, provider: OpProvider) -> str | None:
        """Why this native provider may not enter, or None."""
        if not isinstance(provider, OpProvider) or not callable(provider.fn):
            return "a provider needs a function"
        if not isinstance(provider.name, str) or not provider.name:
            return "a provider needs a name"
        if not isinstance(provider.priority, int) or not (provider.supports is None or callable(provider.supports)):
            return "priority is an integer and supports a predicate or None"
        if provider.name in TIERS:
            return f"the name {provider.name} is reserved"
        if self.has(provider.name):
            return f"the name {provider.name} is taken"
        if len(native(self.providers)) >= CAPACITY:
            return f"there are {CAPACITY} providers already"
        return None

    def insert(self, provider: OpProvider) -> None:
        # str compares by code point, which is the order of the UTF-8 bytes.
        self.providers = tuple(sorted((*self.providers, provider), key=lambda p: (-p.priority, p.name)))

    def has(self, name: str) -> bool:
        return any(p.name == name for p in self.providers)

    def below(self, name: str) -> tuple[OpProvider, ...] | None:
        """The providers strictly after `name`; None if `name` is not here."""
        names = [p.name for p in self.providers]
        return self.providers[names.index(name) + 1 :] if name in names else None


def native(providers: Iterable[OpProvider]) -> tuple[OpProvider, ...]:
    """All but the tiers, which run the CPU's function."""
    return tuple(p for p in providers if p.name not in TIERS)
