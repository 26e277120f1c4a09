"""Where what a layer knows of its requests lives: keys and values by block, recurrent states by slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of one layer, [num_blocks, block_size, kv heads, head_dim], written in place, in a dtype of their
    own."""

    key: np.ndarray
    value: np.ndarray


@dataclass(frozen=True, eq=False)
class StateCache:
    """States of one recurrent layer, a slot for each request, written in place.

    conv : the last inputs of its convolution, [slots, channels, taps], in the model's dtype. state : float32
    [slots, ...] in models of every dtype: a narrower one would depend on where a prompt is cut.
    """

    conv: np.ndarray
    state: np.ndarray

    def copied(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """The states in a slot, as they are now."""
        return self.conv[slot].copy(), self.state[slot].copy()

    def put(self, slot: int, states: tuple[np.ndarray, np.ndarray]) -> None:
        """Make the slot's states those that `copied` gave."""
        self.conv[slot], self.state[slot] = states
