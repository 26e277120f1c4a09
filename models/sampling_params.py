"""How one request wants its tokens drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vtlab.ops.errors import ContractError


@dataclass(frozen=True)
class SamplingParams:
    """vLLM's sampling parameters, by vLLM's names.

    temperature : 0 is greedy. top_k : 0 keeps all. top_p, min_p : in (0, 1] and [0, 1].
    seed : the same seed draws the same tokens for the same prompt, whatever else is in the batch; None takes one
        from the engine.
    max_tokens : None goes on to the model's limit. min_tokens : stop tokens are masked before that many.
    stop_token_ids : ends a generation, with the model's own stop tokens unless `ignore_eos`.
    bad_words : token sequences that must not be completed. allowed_token_ids : None allows all.
    logprobs : how many of the most likely tokens to report for each step besides the one taken; None for no report.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None

    def __post_init__(self):
        for name in ("stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, str) or not hasattr(value, "__iter__")):
                raise ContractError("SamplingParams", name, repr(value), "a collection of tokens")
        if not isinstance(self.logit_bias, Mapping):
            raise ContractError("SamplingParams", "logit_bias", repr(self.logit_bias), "a mapping from token to bias")
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, exclusive=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, exclusive=True)
        for name, least in (("top_k", 0), ("min_tokens", 0), ("max_tokens", 1), ("logprobs", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ContractError("SamplingParams", name, repr(value), f"an integer of at least {least}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ContractError("SamplingParams", "seed", repr(self.seed), "an integer or None")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ContractError(
                "SamplingParams", "min_tokens", self.min_tokens, f"at most max_tokens {self.max_tokens}"
            )
        for word in self.bad_words:
            if isinstance(word, str) or not hasattr(word, "__len__") or len(word) == 0:
                raise ContractError("SamplingParams", "bad_words", repr(word), "sequences of at least one token")
        for token, bias in self.logit_bias.items():
            _number(f"logit_bias[{token}]", bias, -math.inf, math.inf)
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise ContractError("SamplingParams", "allowed_token_ids", "an empty list", "at least one token, or None")

    def check(self, vocab_size: int) -> None:
        """Refuse ids and counts that a vocabulary of this size does not have."""
        for name in ("top_k", "logprobs"):
            value = getattr(self, name)
            if value is not None and value > vocab_size:
                raise ContractError("SamplingParams", name, value, f"at most the vocabulary's {vocab_size}")
        ids = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias,
            "bad_words": [token for word in self.bad_words for token in word],
            "allowed_token_ids": self.allowed_token_ids or (),
        }
        for name, tokens in ids.items():
            check_ids("SamplingParams", name, tokens, vocab_size)


def check_ids(op: str, argument: str, tokens, vocab_size: int) -> None:
    """Refuse anything but integers in [0, vocab_size)."""
    for token in tokens:
        if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= token < vocab_size:
            raise ContractError(op, argument, f"token {token!r}", f"integers from 0 to {vocab_size - 1}")


def _number(name: str, value: object, low: float, high: float, *, exclusive: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high or (exclusive and value == low):
        want = f"a number {'above' if exclusive else 'of at least'} {low:g}"
        raise ContractError(
            "SamplingParams", name, repr(value), want + ("" if high == math.inf else f" and at most {high:g}")
        )
