"""The decision of one engine step, as plain values.

The scheduler writes them, the device side reads them; neither changes them afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.api import PrefillMode


class Chunk(NamedTuple):
    """One request's share of a step: consecutive tokens of its sequence.

    A named tuple, since one is made for every stream in every step.

    Args:
        request_id: whose.
        slot: index of the request's fixed-size state (window rings, compressor state, n-gram
            history); slot 0 is the dummy that padding may write.
        start: absolute position of the first token, so the number of tokens already processed.
        token_ids: the tokens, at least one.
        block_ids: blocks of compressed entries, in order, covering positions
            [0, start + len(token_ids)).
        wants_logits: whether the last token's logits are needed (false for all but the last
            chunk of a prompt).
        arrival: number of the request in the order of arrival; unlike its id never used again.
        is_stream: whether this is the newest token of a request that is past its prompt.
        goes_ahead: whether the token sampled here may be processed before anybody has looked at it:
            the request will want another one, reads nothing but the token, and has the block that
            position needs. Set for all streams of a plan that go on, or for none.
        left: tokens the request may still get, those of this step included; 0 for prompts.
        prefill: which rows the last layers process; see engine.plan.replay.
        anchor: the request's first row whose output is wanted; 0 where prefill is off.
        scored_from: position of the first row that scores a prompt token.
        targets: the token after each of the rows from there on, as far as the prompt goes: their
            log-probabilities are wanted. Empty where none are.
        num_rivals: how many of the most likely tokens are wanted beside each target.
    """

    request_id: str
    slot: int
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    wants_logits: bool
    arrival: int = 0
    is_stream: bool = False
    goes_ahead: bool = False
    left: int = 0
    prefill: PrefillMode = "off"
    anchor: int = 0
    scored_from: int = 0
    targets: tuple[int, ...] = ()
    num_rivals: int = 0

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)

    @property
    def first_wanted(self) -> int | None:
        """Position of the first row whose logits are wanted; None without one."""
        if self.targets:
            return self.scored_from
        return self.end - 1 if self.wants_logits else None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step runs: copies in the pools, then chunks of distinct requests, in batch order.

    Every plan is run: what it copies is counted as copied from then on.

    Args:
        chunks: as said.
        slot_copies: (from, to) slots, one after the other: a source may be an earlier target.
        block_copies: (from, to) blocks, likewise.
    """

    chunks: tuple[Chunk, ...]
    slot_copies: tuple[tuple[int, int], ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows the model processes in this step."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)
