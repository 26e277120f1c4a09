"""The engine: requests in, tokens out, over paged KV caches and slots of recurrent states, with continuous batching.

A request's tokens depend on its prompt and its parameters alone. Batch composition, chunked prefill, block size,
preemption and cancelled neighbours change when a token comes, never which.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from vtlab.ops.arrays import Arrays
from vtlab.ops.errors import ContractError

from .batch import Slice, build
from .block_manager import BlockManager
from .decoder import Decoder
from .request import Output, Request
from .runner import Runner
from .sampler import sample_rows
from .sampling_params import SamplingParams, check_ids
from .scheduler import Scheduled, Scheduler
from .tokenizer import Tokenizer

_GREEDY = SamplingParams()


class Engine:
    """Generates with one model.

    num_blocks * block_size is the KV cache in tokens, which a model without attention does not need;
    max_num_batched_tokens bounds the tokens of a step (longer prompts are prefilled in chunks), max_num_seqs its
    requests. `seed` is where requests without one get theirs.
    device : "cpu", "cuda" or the arrays of a device, where model, cache and sampling are; by default where the decoder
    is. graphs : replay decode steps from graphs instead of launching op by op; the same tokens. `runner.eager` says
    why a model's steps are not replayed.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        num_blocks: int = 128,
        block_size: int = 16,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 32,
        seed: int = 0,
        device: str | Arrays | None = None,
        graphs: bool = True,
    ):
        self.decoder = decoder if device is None else decoder.on(device)
        self.tokenizer, self.seed = tokenizer, seed
        config = self.decoder.config
        slots = max_num_seqs if config.recurrent else None
        self.blocks = BlockManager(num_blocks, block_size, slots, config.attends)
        self.scheduler = Scheduler(self.blocks, max_num_batched_tokens, max_num_seqs)
        room = num_blocks * block_size if config.attends else decoder.max_positions
        self.max_model_len = min(decoder.max_positions, room)
        self.runner = Runner(self.decoder, num_blocks, block_size, max_num_seqs, graphs)
        self._next_id = 0

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = _GREEDY,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Output]:
        """Generate for all prompts together; outputs in their order. `progress(finished, all)` is called each step.

        Errors: ContractError for a prompt that is empty, too long for the cache or out of the vocabulary, for
        parameters that the vocabulary does not have, for NaN logits. No request of this call stays behind then,
        nor when it is interrupted.
        """
        if isinstance(prompts, str):
            raise ContractError("generate", "prompts", "one text", "a list of prompts")
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ContractError("generate", "params", f"{len(params)} of them", f"one, or {len(prompts)}")
        requests = [self._request(prompt, wanted) for prompt, wanted in zip(prompts, params)]
        try:
            for request in requests:
                self.scheduler.add(request)
            while any(request.finish_reason is None for request in requests):
                self.step()
                if progress is not None:
                    progress(sum(request.finish_reason is not None for request in requests), len(requests))
        finally:
            for request in requests:
                self.scheduler.remove(request)
        return [request.output(self._text(request)) for request in requests]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams = _GREEDY) -> Iterator[int]:
        """The tokens of one prompt as they come; closing the iterator cancels the request. Errors: as `generate`."""
        request = self._request(prompt, params)
        return self._stream(request)

    def stream_text(self, prompt: str | Sequence[int], params: SamplingParams = _GREEDY) -> Iterator[str]:
        """The text of one prompt's continuation as it comes, in whole characters."""
        if self.tokenizer is None:
            raise ContractError("stream_text", "tokenizer", "None", "an engine with a tokenizer")
        request = self._request(prompt, params)
        text = self.tokenizer.stream(request.prompt)
        with contextlib.closing(self._stream(request)) as tokens:
            for count, token in enumerate(tokens, 1):
                if count <= request.num_text_tokens and self._spelled(token):
                    yield text.push(token)
        yield text.flush()

    def _stream(self, request: Request) -> Iterator[int]:
        sent = 0
        try:
            self.scheduler.add(request)
            while request.finish_reason is None or sent < len(request.generated):
                if sent == len(request.generated):
                    self.step()
                while sent < len(request.generated):
                    sent += 1
                    yield request.generated[sent - 1]
        finally:
            self.scheduler.remove(request)

    def step(self) -> None:
        """Run one step of whatever is scheduled. An error leaves every request as it was before the step, but that one
        with states computes them anew: they may have moved on."""
        work = self.scheduler.schedule()
        if not work:
            return
        sampling = [item for item in work if item.samples]
        requests = [item.request for item in sampling]
        top = max((request.params.logprobs or 0 for request in requests), default=0)
        try:
            with self.decoder.arrays.queue():
                drawn = sample_rows(requests, self.runner.run(self._batch(work), top))
        except BaseException:
            if self.decoder.config.recurrent:
                for item in work:
                    item.request.num_computed = 0
            raise
        for item in work:
            item.request.num_computed += item.count
        for item, (token, logprobs) in zip(sampling, drawn):
            item.request.accept(token, logprobs)
            if item.request.finish_reason is not None:
                self.scheduler.remove(item.request)

    def _batch(self, work: list[Scheduled]):
        slices = []
        for item in work:
            request, start = item.request, item.request.num_computed
            tokens = request.tokens(start, start + item.count)
            where = self.blocks.table(request.id), item.samples, self.blocks.slot(request.id)
            slices.append(Slice(tokens, start, *where))
        return build(slices, self.blocks.block_size)

    def _request(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        vocab = self.decoder.config.vocab_size
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ContractError("generate", "prompt", "text", "token ids, for an engine without a tokenizer")
            prompt = self.tokenizer.encode(prompt)
        if not hasattr(prompt, "__iter__"):
            raise ContractError("generate", "prompt", repr(prompt), "text or a sequence of token ids")
        if not isinstance(params, SamplingParams):
            raise ContractError("generate", "params", type(params).__name__, "SamplingParams")
        prompt = list(prompt)
        if not prompt:
            raise ContractError("generate", "prompt", "no tokens", "at least one")
        if len(prompt) >= self.max_model_len:
            want = f"fewer than {self.max_model_len}: the model's limit or the cache's size"
            raise ContractError("generate", "prompt", f"{len(prompt)} tokens", want)
        check_ids("generate", "prompt", prompt, vocab)
        params.check(vocab)
        stops = params.stop_token_ids | (frozenset() if params.ignore_eos else self._model_stops())
        room = self.max_model_len - len(prompt)
        seed = params.seed if params.seed is not None else self.seed + self._next_id
        self._next_id += 1
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        return Request(self._next_id, prompt, params, seed, stops, limit)

    def _model_stops(self) -> frozenset[int]:
        from_tokenizer = self.tokenizer.stop_ids if self.tokenizer is not None else frozenset()
        return self.decoder.config.stop_ids | from_tokenizer

    def _text(self, request: Request) -> str | None:
        if self.tokenizer is None:
            return None
        tokens = request.generated[: request.num_text_tokens]
        return self.tokenizer.decode(token for token in tokens if self._spelled(token))

    def _spelled(self, token: int) -> bool:
        """Whether the tokenizer knows the token: models pad their vocabulary with ids that stand for no text."""
        return self.tokenizer.token(token) is not None
