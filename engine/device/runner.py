"""Runs the chunks of one step through the model, and what every runner of steps gives back.

Owns the model and its pools. Decides nothing: the plan says what runs where.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.device.batch import ForwardBatch
from engine.device.kvpool import KVPool
from engine.device.sampler import Draw, Sample, sample
from engine.model.v4 import Model
from engine.plan.step import StepPlan


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave.

    Args:
        samples: one for each chunk that wants logits and is finished, in the plan's order; None
            where the model gave nothing that can be drawn from.
        unfinished: ids of the requests whose chunk is still under way; the next plan names it again.
    """

    samples: Sequence[Sample | None]
    unfinished: frozenset[str] = frozenset()


class LogitsRunner(abc.ABC):
    """A runner that gives logits and leaves drawing from them to the sampler, all in one step."""

    #: Whether it launches a step before it has given the results of the one before.
    looks_ahead = False
    #: Why weights cannot be written in place once the runner is built, one reason each.
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

    def step(self, plan: StepPlan, draws: Sequence[Draw]) -> StepResult:
        """Run a plan and draw one token per chunk that wants logits.

        Args:
            plan: what to run.
            draws: one for each chunk that wants logits, in the plan's order.

        Raises:
            RuntimeError: the logits have the wrong shape.
        """
        logits = self.run(plan)
        if logits.shape != (len(draws), self.vocab_size):
            raise RuntimeError(
                f"expected logits of shape {(len(draws), self.vocab_size)},"
                f" got {tuple(logits.shape)}"
            )
        return StepResult(sample(logits, draws))


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
        with torch.inference_mode():
            self._pool.copy(plan.slot_copies, plan.block_copies)
            for chunk in plan.chunks:
                if chunk.start == 0:
                    self._pool.reset_slot(chunk.slot)
            batch = ForwardBatch.build(plan.chunks, self._device)
            return self._model.forward(batch, self._pool)
