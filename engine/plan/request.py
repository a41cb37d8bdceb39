"""One request as the scheduler sees it: how far it has come and what it holds.

        admit            commit                 commit
WAITING ─────► PREFILL ─────────► DECODE ─────────────► FINISHED
   ▲              │                  │                     ▲
   └──────────────┴──── preempt ─────┘   abort, fail ──────┘ from anywhere

A preempted request keeps its tokens and loses its memory; admitted again it prefills prompt and
generated tokens together, or what the prefix cache lacks of them, and goes on where it was.
"""

from __future__ import annotations

import enum

from engine.api import FinishReason, GenerateRequest
from engine.plan.prefix import HashChain
from engine.plan.replay import PromptTail


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"  # holds no memory
    PREFILL = "prefill"  # more than the newest token is still to be processed
    DECODE = "decode"  # only the newest token is
    FINISHED = "finished"  # holds no memory, is in no queue


_ALLOWED = {
    Status.WAITING: {Status.PREFILL, Status.FINISHED},
    Status.PREFILL: {Status.DECODE, Status.WAITING, Status.FINISHED},
    Status.DECODE: {Status.WAITING, Status.FINISHED},
    Status.FINISHED: set[Status](),
}


class RequestState:
    """A live request. Only the scheduler changes it.

    Args:
        request: what was asked for.
        arrival: number in the order of arrival; a smaller one is served first.
        max_model_len: context in tokens.
        chain: hashes of its sequence, for the prefix cache.
        tail: how the last layers process its prompt.
    """

    __slots__ = (
        "arrival",
        "block_ids",
        "cached_tokens",
        "chain",
        "marks",
        "max_tokens",
        "needs_host",
        "num_computed",
        "num_prompt",
        "request",
        "slot",
        "status",
        "stop_token_ids",
        "tail",
        "tail_rows",
        "token_ids",
    )

    def __init__(
        self,
        request: GenerateRequest,
        arrival: int,
        max_model_len: int,
        chain: HashChain,
        tail: PromptTail,
    ) -> None:
        params = request.sampling
        self.request = request
        self.arrival = arrival
        self.num_prompt = len(request.prompt_ids)
        #: Whether the host has a say in, or a look at, what each step draws.
        self.needs_host = (
            params.top_logprobs is not None or params.moves_logits or request.guide is not None
        )
        self.max_tokens = min(params.max_tokens, max_model_len - self.num_prompt)
        self.stop_token_ids = frozenset(() if params.ignore_eos else params.stop_token_ids)
        self.status = Status.WAITING
        self.token_ids = list(request.prompt_ids)  # prompt and generated
        self.num_computed = 0  # tokens whose state is in the pools
        self.slot = 0  # 0: none
        self.block_ids: tuple[int, ...] = ()
        self.chain = chain
        self.tail = tail
        self.tail_rows = 0  # of the prompt, processed by the last layers
        self.cached_tokens = 0  # of the prompt, not processed for this request
        self.marks: list[int] = []  # positions ahead at which the prefill stops for a snapshot

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far, and so the output index of the next one."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens it may still get."""
        return self.max_tokens - self.num_generated

    @property
    def wants_more_after_this(self) -> bool:
        """Whether the token sampled next is followed by another, unless it is a stop token."""
        return self.num_left > 1

    def admit(self, slot: int, block_ids: tuple[int, ...], num_computed: int = 0) -> None:
        """Give the request its memory, in which the state after `num_computed` tokens stands."""
        self._move(Status.PREFILL)
        self.slot = slot
        self.block_ids = block_ids
        self.num_computed = num_computed
        if not self.num_generated:
            self.cached_tokens = num_computed
            self.tail_rows = 0

    def preempt(self) -> None:
        """Take the memory away; the tokens stay. The caller has released the ids."""
        self._move(Status.WAITING)
        self._drop_memory()

    def finish(self) -> None:
        """End. The caller has released the ids."""
        self._move(Status.FINISHED)
        self._drop_memory()

    def advance(self, num_tokens: int, sampled: int | None) -> FinishReason | None:
        """Record what a step did.

        Args:
            num_tokens: tokens processed.
            sampled: the next token, where the last of the known ones was processed; else None.

        Returns:
            why the request has reached its end, or None if it goes on.

        Raises:
            RuntimeError: it holds no memory to run in, processed more tokens than it has, or a
                token was sampled before all known ones were processed, or the reverse.
        """
        start = self.num_computed
        self.num_computed += num_tokens
        if not self.num_generated:
            self.tail_rows += self.tail.rows(start, self.num_computed)
        missing = len(self.token_ids) - self.num_computed
        if not self.slot or missing < 0 or (sampled is None) != (missing > 0):
            raise RuntimeError(
                f"request {self.request.id}, {self.status.value}: {self.num_computed} of"
                f" {len(self.token_ids)} tokens processed, sampled {sampled}"
            )
        if sampled is None:
            return None
        if self.status is Status.PREFILL:
            self._move(Status.DECODE)
        self.token_ids.append(sampled)
        if sampled in self.stop_token_ids:
            return FinishReason.STOP
        if self.num_generated >= self.max_tokens:
            return FinishReason.LENGTH
        return None

    def _move(self, to: Status) -> None:
        if to not in _ALLOWED[self.status]:
            raise RuntimeError(
                f"request {self.request.id} cannot go from {self.status.value} to {to.value}"
            )
        self.status = to

    def _drop_memory(self) -> None:
        self.num_computed = 0
        self.slot = 0
        self.block_ids = ()
        self.marks = []
