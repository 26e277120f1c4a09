"""Who owns which block of the KV cache."""

from __future__ import annotations

from collections.abc import Hashable

from vtlab.ops.errors import ContractError


class BlockManager:
    """Blocks of `block_size` KV slots, handed to owners on demand and given back whole.

    Every block is either free or in exactly one owner's table, in the order of that owner's tokens.
    """

    def __init__(self, num_blocks: int, block_size: int):
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ContractError("BlockManager", name, repr(value), "an integer of at least 1")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._tables: dict[Hashable, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def table(self, owner: Hashable) -> tuple[int, ...]:
        """The owner's blocks, first tokens first; empty for a stranger."""
        return tuple(self._tables.get(owner, ()))

    def grow(self, owner: Hashable, num_tokens: int) -> bool:
        """Give `owner` room for `num_tokens` tokens in all; False, and nothing changed, where blocks run out."""
        held = len(self._tables.get(owner, ()))
        needed = -(-num_tokens // self.block_size) - held
        if needed > len(self._free):
            return False
        if needed > 0:
            self._tables.setdefault(owner, []).extend(self._free.pop() for _ in range(needed))
        return True

    def release(self, owner: Hashable) -> None:
        """Take back all blocks of `owner`; nothing happens where it has none."""
        self._free.extend(reversed(self._tables.pop(owner, ())))
