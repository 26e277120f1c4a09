"""Speculation: whatever is guessed, tokens and states are those of a run that never guessed."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab.models.speculation import Speculation, generate
from vtlab.ops.errors import ContractError

from .generating_tiny import RECURRENT, tiny_model

PROMPT = [7, 300, 41, 5, 99]
COUNT = 8


def plain(name: str, dtype: str = "float32") -> tuple[list[int], list[list[bytes]]]:
    """The tokens of a run without guesses, and its states after each."""
    run = Speculation(tiny_model(name, dtype), PROMPT, 40)
    states = [raw(run)]
    while len(run.generated) < COUNT:
        run.step([])
        states.append(raw(run))
    return run.generated, states


def raw(run: Speculation) -> list[bytes]:
    return [part.tobytes() for states in run.snapshot() for part in states]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in (*RECURRENT, "gemma3")), ("qwen3_5", "bfloat16")]
)
def test_tokens_and_states_after_a_reject_are_those_without_a_guess(name, dtype):
    """Guesses of four of which the first 0, 1, 2, 3 or 4 are right: each length is rolled back to."""
    want, states = plain(name, dtype)
    assert bool(states[0]) == (name != "gemma3")
    for right in range(5):
        run = Speculation(tiny_model(name, dtype), PROMPT, 40)
        guess = want[1 : 1 + right] + [(token + 1) % 512 for token in want[1 + right : 5]]
        assert run.step(guess) == want[1 : 2 + right]
        assert (run.accepted, run.rejected) == (right, 4 - right)
        assert raw(run) == states[1 + right]
        while right == 1 and len(run.generated) < COUNT:
            run.step([])
        assert run.generated == want[: len(run.generated)]


@pytest.mark.parametrize("name", ["qwen3_5", "mamba"])
def test_a_rollback_that_is_left_out_is_noticed(name, monkeypatch):
    want = plain(name)[0]
    monkeypatch.setattr(Speculation, "roll_back", lambda *_: None)
    run = Speculation(tiny_model(name), PROMPT, 40)
    run.step([(token + 1) % 512 for token in want[1:5]])
    while len(run.generated) < COUNT:
        run.step([])
    assert run.generated != want


def test_guesses_change_no_token():
    want, rng = plain("mamba2")[0], np.random.default_rng(1)
    some = lambda tokens: [*want[len(tokens) - len(PROMPT) :][: rng.integers(3)], *rng.integers(0, 512, 2).tolist()]
    assert generate(tiny_model("mamba2"), PROMPT, COUNT, some) == want
    assert generate(tiny_model("mamba2"), PROMPT, COUNT, lambda tokens: [0] * 99) == want


def test_impossible_runs_are_refused():
    for argument, prompt, room in (("prompt", [], 4), ("room", [1, 2], 2)):
        with pytest.raises(ContractError) as error:
            Speculation(tiny_model("mamba"), prompt, room)
        assert error.value.argument == argument
