"""The token gate: our greedy tokens and log-probabilities against those that vLLM gave for the same checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vtlab import ops
from vtlab.models.batch import Slice, build
from vtlab.models.decoder import Decoder
from vtlab.models.engine import Engine
from vtlab.models.sampling_params import SamplingParams
from vtlab.ops.errors import ContractError

_BLOCK = 16


@dataclass(frozen=True)
class Position:
    """A step at which our arg-max on vLLM's prefix is not vLLM's token.

    gap : nats between the two in vLLM's own log-probabilities; infinite where ours is not among its top ones.
    allowed : the nats within which the two count as tied there.
    """

    prompt: int
    step: int
    ours: int
    vllm: int
    gap: float
    allowed: float


@dataclass(frozen=True)
class Verdict:
    """kind : "strict" (the greedy tokens are vLLM's), "near-tie" or "diverged"; `positions` lists every difference.

    max_error : the largest |ours - vLLM's| over the log-probabilities that vLLM reported. least_gap : the smallest
    gap between vLLM's two most likely tokens; an error below half of it cannot change a greedy token.
    our_error, their_error : the same against float32 evaluation, ours and vLLM's, for a 16-bit golden.
    """

    kind: str
    positions: tuple[Position, ...]
    max_error: float
    least_gap: float
    our_error: float | None = None
    their_error: float | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.kind}: largest log-probability error {self.max_error:.3g}, least gap {self.least_gap:.3g} nats"
        ]
        lines += [
            f"  prompt {at.prompt} step {at.step}: ours {at.ours}, theirs {at.vllm}, {at.gap:.3g} nats apart "
            f"({at.allowed:.3g} allowed)"
            for at in self.positions
        ]
        return "\n".join(lines)


def token_gate(golden: Mapping, decoder: Decoder, exact: Decoder | None = None) -> Verdict:
    """Compare `decoder` with a token golden (goldens/tokens/*.json).

    strict: the engine's greedy tokens equal vLLM's, prompt by prompt. Otherwise, with vLLM's tokens as the prefix,
    near-tie: at every step our arg-max is vLLM's token, or lies within the allowed nats of it in vLLM's own
    log-probabilities. diverged: neither. A float32 golden knows no ties: there it is strict or diverged.

    exact : for a 16-bit golden, the same checkpoint evaluated in float32. Let e be the largest error of our 16-bit
    log-probabilities against it at a step. If we prefer another token than vLLM, their true gap is at most 2 e, and
    vLLM, whose errors are as large as ours, sees at most 4 e: that much is allowed. Likewise for llama.cpp's goldens of
    weights in blocks, where the eight bits of activations take the place of 16.
    """
    prompts = [prompt["ids"] for prompt in golden["prompts"]]
    outputs = golden["outputs"]
    if len(prompts) != len(outputs) or not prompts:
        raise ContractError(
            "token_gate", "golden", f"{len(prompts)} prompts, {len(outputs)} outputs", "as many, not none"
        )
    if exact is None and golden["dtype"] != "float32":
        raise ContractError("token_gate", "exact", "None", f"a float32 decoder, for a {golden['dtype']} golden")
    positions, errors, exact_errors, gaps = [], [], [], []
    for index, (prompt, output) in enumerate(zip(prompts, outputs)):
        ours = logprobs(decoder, prompt, output["tokens"])
        true = None if exact is None else logprobs(exact, prompt, output["tokens"])
        for step, (vllm, top) in enumerate(zip(output["tokens"], output["logprobs"])):
            ids, theirs = np.array([token for token, _ in top]), np.array([value for _, value in top])
            errors.append(np.abs(ours[step, ids] - theirs).max())
            own = 0.0 if true is None else np.abs(ours[step, ids] - true[step, ids]).max()
            if true is not None:
                exact_errors.append((own, np.abs(theirs - true[step, ids]).max()))
            best = np.sort(theirs)[::-1]
            gaps.append(best[0] - best[1])
            token = int(ours[step].argmax())
            if token != vllm:
                gap = float(theirs[ids == vllm][0] - max(theirs[ids == token], default=-np.inf))
                positions.append(Position(index, step, token, vllm, gap, 4 * float(own)))
    if not positions and greedy(decoder, prompts, len(outputs[0]["tokens"])) == [list(o["tokens"]) for o in outputs]:
        kind = "strict"
    else:
        kind = "near-tie" if positions and exact and all(at.gap <= at.allowed for at in positions) else "diverged"
    own, theirs = np.max(exact_errors, axis=0) if exact_errors else (None, None)
    return Verdict(kind, tuple(positions), float(max(errors)), float(min(gaps)), own, theirs)


def logprobs(decoder: Decoder, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """Natural-log probabilities [len(tokens), V] of what follows the prompt and the tokens before each of `tokens`."""
    logits = teacher_forced(decoder, prompt, tokens)
    return ops.compute_logprobs(ops.cast_f32(logits) if logits.dtype != np.float32 else logits)


def teacher_forced(decoder: Decoder, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """Logits [len(tokens), V] for each of `tokens`, given the prompt and the tokens before it; one forward."""
    context = [*prompt, *tokens[:-1]]
    blocks = list(range(-(-len(context) // _BLOCK)))
    rows = np.arange(len(prompt) - 1, len(context))
    batch = replace(build([Slice(context, 0, blocks, sample=True)], _BLOCK), sample_rows=rows)
    arrays = decoder.arrays
    return arrays.fetch(decoder.forward(batch.on(arrays), decoder.new_caches(len(blocks), _BLOCK)))


def greedy(decoder: Decoder, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens after each prompt, by the engine, all prompts together."""
    longest = max(len(prompt) for prompt in prompts) + count
    blocks = len(prompts) * -(-(longest + 1) // _BLOCK)
    engine = Engine(decoder, num_blocks=blocks, block_size=_BLOCK)
    outputs = engine.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
    return [list(output.tokens) for output in outputs]
