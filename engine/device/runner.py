"""Runs the chunks of one step through the model.

Owns the model and its pools. Decides nothing: the plan says what runs where.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.device.batch import ForwardBatch
from engine.device.kvpool import KVPool
from engine.model.v4 import Model
from engine.plan.step import StepPlan


class ModelRunner:
    """The model and the memory of the requests it runs.

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
