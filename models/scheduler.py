"""Which requests run in a step, and how many tokens of each: continuous batching with chunked prefill."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from vtlab.ops.errors import ContractError

from .block_manager import BlockManager
from .request import Request


@dataclass(frozen=True)
class Scheduled:
    """`count` new tokens of a request; its next token is sampled when they are its last ones."""

    request: Request
    count: int

    @property
    def samples(self) -> bool:
        return self.request.num_computed + self.count == self.request.num_tokens


class Scheduler:
    """First come, first served, within a budget of tokens and requests for each step.

    A running request that finds no free block takes those of the youngest running one, which goes back to the head of
    the queue and recomputes its keys, values and states later: the same tokens come out.
    """

    def __init__(self, blocks: BlockManager, max_num_batched_tokens: int, max_num_seqs: int):
        for name, value in (("max_num_batched_tokens", max_num_batched_tokens), ("max_num_seqs", max_num_seqs)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ContractError("Scheduler", name, repr(value), "an integer of at least 1")
        self.blocks = blocks
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, finished or not, and free its blocks and its slot."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.blocks.release(request.id)

    def schedule(self) -> list[Scheduled]:
        """The work of one step; every request in it has blocks for its tokens, and a slot."""
        budget, work, preempted = self.max_num_batched_tokens, [], False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(request.num_tokens - request.num_computed, budget)
            while not self.blocks.grow(request.id, request.num_computed + count):
                preempted = True
                if self._preempt_youngest() is request:
                    break
            else:
                work.append(Scheduled(request, count))
                budget -= count
                index += 1
        while self.waiting and not preempted and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            count = min(request.num_tokens, budget)
            if not self.blocks.grow(request.id, count):
                break
            self.running.append(self.waiting.popleft())
            work.append(Scheduled(request, count))
            budget -= count
        return work

    def _preempt_youngest(self) -> Request:
        request = self.running.pop()
        self.blocks.release(request.id)
        request.num_computed = 0
        self.waiting.appendleft(request)
        self.num_preemptions += 1
        return request
