"""The names that a user has switched off, for every op on every device."""

from __future__ import annotations

NAMES, BYTES = 8, 63


class DisabledNames:
    """At most 8 names of at most 63 bytes (UTF-8); more and longer ones are ignored."""

    def __init__(self):
        self._names: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> bool:
        """True iff `name` is disabled now."""
        if not isinstance(name, str) or not 0 < len(name.encode("utf-8", "surrogatepass")) <= BYTES:
            return False
        if name not in self._names and len(self._names) >= NAMES:
            return False
        self._names.add(name)
        return True

    def remove(self, name: str) -> bool:
        """True iff `name` was disabled."""
        found = name in self._names
        self._names.discard(name)
        return found

    def clear(self) -> None:
        self._names.clear()

    def add_list(self, text: str) -> list[str]:
        """Adds the names of a comma-separated list; returns those that were ignored."""
        return [name for part in text.split(",") if (name := part.strip()) and not self.add(name)]
