"""Runs the chunks of one step through the model, and what every runner of steps gives back.

Owns the model and its pools. Decides nothing: the plan says what runs where.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.api import ExpertStats, TokenLogprob
from engine.device.batch import ForwardBatch
from engine.device.kvpool import KVPool
from engine.device.sampler import Draw, Sample, logprob_of, sample
from engine.model.v4 import Hidden, Model
from engine.plan.step import StepPlan

#: Rows whose logits are held at once to score prompt tokens: a vocabulary is wide.
SCORED_ROWS = 256


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave.

    Args:
        samples: one for each chunk that wants logits and is finished, in the plan's order; None
            where the model gave nothing that can be drawn from.
        unfinished: ids of the requests whose chunk is still under way; the next plan names it again.
        prompt_scores: by request id, for the chunks whose targets were scored: by position, the
            log-probability of the prompt token there.
        further: by request id, the samples after the first of each request whose draft was verified;
            none where nothing of it was taken.
        drafted: tokens of each of those drafts.
        plain_rows: by reason, decode rows that took no part in that although the runner drafts.
    """

    samples: Sequence[Sample | None]
    unfinished: frozenset[str] = frozenset()
    prompt_scores: Mapping[str, Mapping[int, TokenLogprob]] = field(default_factory=dict)
    further: Mapping[str, Sequence[Sample]] = field(default_factory=dict)
    drafted: int = 0
    plain_rows: Mapping[str, int] = field(default_factory=dict)


class LogitsRunner(abc.ABC):
    """A runner that gives logits and leaves drawing from them to the sampler, all in one step."""

    #: Whether it launches a step before it has given the results of the one before.
    looks_ahead = False
    #: Tokens it drafts after a stream's newest.
    num_drafts = 0
    #: Why weights cannot be written in place once the runner is built, one reason each.
    expert_stats = ExpertStats()
    weight_locks: tuple[str, ...] = (
        "projections are joined and scales multiplied in when a model is loaded",
    )

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Token ids the model knows, and columns of its logits."""

    @abc.abstractmethod
    def run(self, plan: StepPlan) -> Tensor:
        """Give float32 [N, V] logits for the N chunks that want them, in the plan's order."""

    def close(self) -> None:  # noqa: B027 - most collect nothing
        """Write what was collected while serving: nothing, here."""

    def step(self, plan: StepPlan, draws: Sequence[Draw]) -> StepResult:
        """Run a plan and draw one token per chunk that wants logits.

        Args:
            plan: what to run.
            draws: one for each chunk that wants logits, in the plan's order.

        Raises:
            RuntimeError: the logits have the wrong shape.
        """
        return StepResult(self._draw(self.run(plan), draws))

    def _draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[Sample | None]:
        if logits.shape != (len(draws), self.vocab_size):
            raise RuntimeError(
                f"expected logits of shape {(len(draws), self.vocab_size)},"
                f" got {tuple(logits.shape)}"
            )
        return sample(logits, draws)


class ModelRunner(LogitsRunner):
    """The reference model and the memory of the requests it runs.

    Args:
        model: the model.
        pool: its memory; has the slots and blocks that plans name.
        device: where both live.
    """

    def __init__(self, model: Model, pool: KVPool, device: torch.device) -> None:
        self._model = model
        self._pool = pool
        self._device = device

    @property
    def vocab_size(self) -> int:
        """Token ids the model knows, and columns of its logits."""
        return self._model.config.vocab_size

    def run(self, plan: StepPlan) -> Tensor:
        """Process the chunks.

        What is to be copied is copied first. Then a chunk that starts at position 0 starts a
        sequence, so its slot's state is reset.

        Args:
            plan: the step.

        Returns:
            float32 [N, V]: logits after the last token of each of the N chunks that want them, in
            the plan's order.
        """
        hidden = self._process(plan)
        return self._model.logits(hidden, hidden.batch.logit_rows)

    def step(self, plan: StepPlan, draws: Sequence[Draw]) -> StepResult:
        """Run a plan, draw one token per chunk that wants logits and score the targets."""
        hidden = self._process(plan)
        logits = self._model.logits(hidden, hidden.batch.logit_rows)
        return StepResult(self._draw(logits, draws), prompt_scores=self._score(plan, hidden))

    def _process(self, plan: StepPlan) -> Hidden:
        with torch.inference_mode():
            self._pool.copy(plan.slot_copies, plan.block_copies)
            for chunk in plan.chunks:
                if chunk.start == 0:
                    self._pool.reset_slot(chunk.slot)
        batch = ForwardBatch.build(plan.chunks, self._device, self._model.tail)
        return self._model.hidden(batch, self._pool)

    def _score(self, plan: StepPlan, hidden: Hidden) -> dict[str, dict[int, TokenLogprob]]:
        """Score the targets of all chunks, some rows at a time."""
        scored = [chunk for chunk in plan.chunks if chunk.targets]
        if not scored:
            return {}
        rows = torch.split(hidden.batch.scored_rows, [len(chunk.targets) for chunk in scored])
        found: dict[str, dict[int, TokenLogprob]] = {}
        for chunk, own_rows in zip(scored, rows, strict=True):
            scores: list[TokenLogprob] = []
            for part in torch.split(own_rows, SCORED_ROWS):
                for row in self._model.logits(hidden, part):
                    target = chunk.targets[len(scores)]
                    scores.append(logprob_of(row, target, chunk.num_rivals))
            found[chunk.request_id] = dict(enumerate(scores, chunk.scored_from + 1))
        return found
