"""Speculation: tokens that a guess proposes and one forward verifies, with recurrent states that can be taken back.

Keys and values of rejected tokens lie behind a request's length, where nothing reads them and later ones replace them.
A state has no length: it is copied before a guess and put back where a part of it is rejected, and then takes the
accepted tokens again. No cut of a sequence changes a byte of a state, so it is as if nothing had been guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from vtlab import ops
from vtlab.ops.errors import ContractError

from .batch import Slice, build
from .cache import StateCache
from .decoder import Decoder

_F32 = np.dtype(np.float32)


class Speculation:
    """One request on caches of its own, decoded greedily.

    tokens : its prompt and what was generated. accepted, rejected : guessed tokens so far.
    """

    def __init__(self, decoder: Decoder, prompt: Sequence[int], room: int, block_size: int = 16):
        if not prompt:
            raise ContractError("Speculation", "prompt", "no tokens", "at least one")
        if len(prompt) >= room:
            raise ContractError("Speculation", "room", room, f"more than the {len(prompt)} tokens of the prompt")
        blocks = -(-room // block_size)
        self.decoder, self.block_size, self._room = decoder, block_size, room
        self.caches, self._table = decoder.new_caches(blocks, block_size, 1), list(range(blocks))
        self.tokens, self.accepted, self.rejected = list(prompt), 0, 0
        self._prompt = len(prompt)
        self.tokens.append(self._run(self.tokens, 0)[-1])

    @property
    def generated(self) -> list[int]:
        return self.tokens[self._prompt :]

    def snapshot(self) -> list[tuple]:
        """Its recurrent states as they are now; empty for a model without."""
        return [cache.copied(0) for cache in self._states]

    def roll_back(self, snapshot: list[tuple], start: int, accepted: Sequence[int]) -> None:
        """The states of `snapshot`, taken before position `start`, and the accepted tokens since then."""
        for cache, states in zip(self._states, snapshot):
            cache.put(0, states)
        if snapshot and accepted:
            self._run(accepted, start)

    def step(self, guess: Sequence[int]) -> list[int]:
        """The next tokens: as much of the guess as is right, and the one after it."""
        start, last = len(self.tokens) - 1, self.tokens[-1]
        guess = list(guess)[: self._room - len(self.tokens) - 1]
        snapshot = self.snapshot() if guess else []
        found = self._run([last, *guess], start)
        right = next((at for at, token in enumerate(guess) if token != found[at]), len(guess))
        if right < len(guess):
            self.roll_back(snapshot, start, [last, *guess[:right]])
        self.accepted, self.rejected = self.accepted + right, self.rejected + len(guess) - right
        new = found[: right + 1]
        self.tokens += new
        return new

    @property
    def _states(self) -> list[StateCache]:
        return [cache for cache in self.caches if isinstance(cache, StateCache)]

    def _run(self, tokens: Sequence[int], start: int) -> list[int]:
        """The most likely token after each of `tokens`, which stand at start, start + 1, …"""
        batch = build([Slice(tokens, start, self._table, True, 0)], self.block_size)
        batch = replace(batch, sample_rows=np.arange(len(tokens)))
        arrays = self.decoder.arrays
        logits = self.decoder.forward(batch.on(arrays), self.caches)
        return arrays.fetch(ops.greedy_argmax(logits if logits.dtype == _F32 else ops.cast_f32(logits))).tolist()


def generate(
    decoder: Decoder, prompt: Sequence[int], count: int, guess: Callable[[list[int]], Sequence[int]]
) -> list[int]:
    """`count` greedy tokens after the prompt, whatever `guess(tokens so far)` proposes: only speed depends on it."""
    run = Speculation(decoder, prompt, len(prompt) + count + 1)
    while len(run.generated) < count:
        run.step(guess(run.tokens))
    return run.generated[:count]
