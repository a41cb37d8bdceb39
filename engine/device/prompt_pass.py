"""A pass over chunks of prompts, launched layer by layer, perhaps half through when a step ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.api import TokenLogprob
from engine.device.kvpool import KVPool
from engine.device.qwen_pool import QwenPool
from engine.device.rows import build_narrowings, build_rows
from engine.device.sampler import Draw, Sample, logprobs_of, sample
from engine.kernels.ops import Ops
from engine.kernels.rows import Narrowing, Rows
from engine.model.experts import Experts
from engine.model.flow import FrontRun, TailRun
from engine.plan.replay import Tail, stages
from engine.plan.step import Chunk

#: Rows whose logits are held at once to score prompt tokens: a vocabulary is wide.
SCORED_ROWS = 256


Pool = KVPool | QwenPool


class StepModel(Protocol):
    """What the fast runner needs of a model; engine.model.fast.FastModel and Qwen3Model."""

    config: Any
    ops: Ops

    @property
    def experts(self) -> tuple[Experts, ...]:
        """Routed experts of each layer."""

    def decode(self, rows: Rows, pool: Any) -> Tensor:
        """Give float32 logits [T, V] of one row a sequence; capturable."""

    def prefill(
        self,
        rows: Rows,
        pool: Any,
        logit_rows: Tensor,
        scored: Sequence[Tensor] = (),
        narrowings: Sequence[Narrowing] = (),
        tail: TailRun | None = None,
        front: FrontRun | None = None,
    ) -> Iterator[Tensor | None]:
        """Process chunks; yields None between layers, then logits [L, V] and those of each part."""


@dataclass(slots=True)
class PromptPass:
    """One pass.

    Args:
        chunks: its chunks, in order.
        layers: what is left of it.
        num_rows: rows it processes.
        logits: [L, V] of the chunks that want some, once they are there.
        scores: by request id and position, log-probabilities of prompt tokens.
    """

    chunks: tuple[Chunk, ...]
    layers: Iterator[Tensor | None]
    num_rows: int
    logits: Tensor | None = None
    scores: dict[str, dict[int, TokenLogprob]] = field(default_factory=dict)

    @classmethod
    def begin(
        cls,
        model: StepModel,
        pool: Pool,
        chunks: Sequence[Chunk],
        device: torch.device,
        tail: Tail | None = None,
        tail_run: TailRun | None = None,
        front_run: FrontRun | None = None,
    ) -> PromptPass:
        """Lay the chunks out; nothing is launched yet.

        Args:
            model: what runs.
            pool: memory of the requests.
            chunks: of the pass.
            device: where it runs.
            tail: of the model; None where every layer processes every row.
            tail_run: may run the tail at once.
            front_run: may run the layers before it, or all.
        """
        rows, wanted = build_rows(chunks, block_size=pool.block_size, device=device)
        firsts = [chunk.start for chunk in chunks]
        narrowings: tuple[Narrowing, ...] = ()
        if plan := stages(tail, chunks):
            narrowings, wanted = build_narrowings(rows, chunks, plan)
            firsts = list(plan[-1].firsts)
        parts = [part for part, _, _ in _parts(chunks, firsts)]
        scored = [torch.tensor(part, dtype=torch.int64).to(device) for part in parts]
        layers = model.prefill(rows, pool, wanted, scored, narrowings, tail_run, front_run)
        return cls(tuple(chunks), layers, rows.num_rows)

    @property
    def is_through(self) -> bool:
        """Whether its logits and scores are there."""
        return self.logits is not None

    @property
    def wants_logits(self) -> bool:
        """Whether anything is to be drawn from it."""
        return any(chunk.wants_logits for chunk in self.chunks)

    def advance(self, count: int | None) -> bool:
        """Launch the next `count` layers, all if None.

        Returns:
            whether the pass is through; then its logits and scores are there.
        """
        while count is None or count > 0:
            self.logits = next(self.layers)
            if self.logits is not None:
                self._score()
                return True
            count = None if count is None else count - 1
        return False

    def draw(self, draw_of: dict[int, Draw]) -> dict[int, Sample | None]:
        """Draw from the logits of a pass that is through.

        Args:
            draw_of: by arrival; requests that ended meanwhile have none and get nothing.

        Returns:
            samples by arrival.
        """
        wanting = [chunk for chunk in self.chunks if chunk.wants_logits]
        live = [i for i, chunk in enumerate(wanting) if chunk.arrival in draw_of]
        if not live:
            return {}
        assert self.logits is not None
        logits = self.logits if len(live) == len(wanting) else self.logits[live]
        drawn = sample(logits, [draw_of[wanting[i].arrival] for i in live])
        return {wanting[i].arrival: found for i, found in zip(live, drawn, strict=True)}

    def _score(self) -> None:
        """Take the logits of scored rows, one part after the other."""
        for _, chunk, first in _parts(self.chunks, [chunk.start for chunk in self.chunks]):
            logits = next(self.layers)
            assert logits is not None
            targets = chunk.targets[first : first + SCORED_ROWS]
            found = logprobs_of(logits, targets, chunk.num_rivals)
            scores = self.scores.setdefault(chunk.request_id, {})
            scores.update(enumerate(found, chunk.scored_from + 1 + first))


def _parts(
    chunks: Sequence[Chunk], firsts: Sequence[int]
) -> Iterator[tuple[list[int], Chunk, int]]:
    """Rows of the last layer whose next token is scored, the chunk, and the first of its targets.

    Args:
        chunks: of the pass.
        firsts: first position of each that the last layer processes.
    """
    row = 0
    for chunk, kept in zip(chunks, firsts, strict=True):
        begin = row + chunk.scored_from - kept
        for first in range(0, len(chunk.targets), SCORED_ROWS):
            last = min(first + SCORED_ROWS, len(chunk.targets))
            yield list(range(begin + first, begin + last)), chunk, first
        row += chunk.end - kept
