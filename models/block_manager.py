"""Who owns which block of the KV cache, and which slot of recurrent states."""

from __future__ import annotations

from collections.abc import Hashable

from vtlab.ops.errors import ContractError


class BlockManager:
    """Blocks of `block_size` KV slots, handed to owners on demand and given back whole, and a slot of states for each.

    Every block is either free or in exactly one owner's table, in the order of that owner's tokens. num_slots : how
    many owners may have states at a time; None where the model has none. paged : whether it has keys and values.
    """

    def __init__(self, num_blocks: int, block_size: int, num_slots: int | None = None, paged: bool = True):
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size), ("num_slots", num_slots or 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ContractError("BlockManager", name, repr(value), "an integer of at least 1")
        self.num_blocks, self.block_size, self.num_slots, self.paged = num_blocks, block_size, num_slots, paged
        self._free = list(range(num_blocks - 1, -1, -1))
        self._free_slots = list(range((num_slots or 0) - 1, -1, -1))
        self._tables: dict[Hashable, list[int]] = {}
        self._slots: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def table(self, owner: Hashable) -> tuple[int, ...]:
        """The owner's blocks, first tokens first; empty for a stranger."""
        return tuple(self._tables.get(owner, ()))

    def slot(self, owner: Hashable) -> int:
        """Where the owner's states are; -1 for a stranger, and in models without states."""
        return self._slots.get(owner, -1)

    def grow(self, owner: Hashable, num_tokens: int) -> bool:
        """Give `owner` room for `num_tokens` tokens in all, and at first a slot for its states; False, and nothing
        changed, where blocks or slots run out."""
        held = len(self._tables.get(owner, ()))
        needed = -(-num_tokens // self.block_size) - held if self.paged else 0
        slotless = self.num_slots is not None and owner not in self._slots
        if needed > len(self._free) or (slotless and not self._free_slots):
            return False
        if needed > 0:
            self._tables.setdefault(owner, []).extend(self._free.pop() for _ in range(needed))
        if slotless:
            self._slots[owner] = self._free_slots.pop()
        return True

    def release(self, owner: Hashable) -> None:
        """Take back all blocks of `owner`, and its slot; nothing happens where it has none."""
        self._free.extend(reversed(self._tables.pop(owner, ())))
        if owner in self._slots:
            self._free_slots.append(self._slots.pop(owner))
