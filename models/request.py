"""A request on its way through the engine, and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .sampling_params import SamplingParams


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities of one step, before any processing: the token's own, and the most likely tokens'.

    rank : 1 for the most likely token; tokens that tie share the worst rank.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Output:
    """A finished generation; finish_reason is "stop" or "length". `text` leaves a stop token out, `tokens` does not."""

    tokens: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    text: str | None = None


@dataclass(eq=False)
class Request:
    """Tokens so far, and how many of them have keys and values in the cache."""

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_tokens: int
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_computed: int = 0
    finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens start..stop of prompt and generation together."""
        split = len(self.prompt)
        return [*self.prompt[start:stop], *self.generated[max(start - split, 0) : max(stop - split, 0)]]

    def accept(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Take a sampled token; it is the last one where it stops the request or fills it."""
        stops = token in self.stop_ids and len(self.generated) >= self.params.min_tokens
        self.generated.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if stops:
            self.finish_reason = "stop"
        elif len(self.generated) >= self.max_tokens:
            self.finish_reason = "length"

    @property
    def num_text_tokens(self) -> int:
        """How many generated tokens belong to the text: a token that stopped the request does not."""
        return len(self.generated) - (self.finish_reason == "stop")

    def output(self, text: str | None = None) -> Output:
        logprobs = None if self.params.logprobs is None else tuple(self.logprobs)
        return Output(tuple(self.generated), self.finish_reason or "length", logprobs, text)
