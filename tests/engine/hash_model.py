"""A model without weights whose every token depends on all of its memory.

It stands in for engine.device.runner.ModelRunner: same pools, same meaning of slots, blocks and
positions. Each token of the sequence is written to its block cell, and a rolling hash of all of
them to the slot. The next token's logits are a hash of both, read back from memory, so that a wrong
block, slot, position or reset changes the output. Memory starts as garbage and is never cleared.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.device.runner import LogitsRunner
from engine.plan.step import Chunk, StepPlan


def _hash(*values: int) -> int:
    data = b"".join(value.to_bytes(8, "little") for value in values)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class HashRunner(LogitsRunner):
    """The model and its memory.

    Args:
        vocab_size: V.
        num_blocks: blocks, the dummy 0 included.
        block_size: positions per block.
        num_slots: slots, the dummy 0 included.
        before_run: called with every plan before it runs; may raise.
        after_run: may replace the logits of a plan.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 40,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        before_run: Callable[[StepPlan], None] | None = None,
        after_run: Callable[[StepPlan, Tensor], Tensor] | None = None,
    ) -> None:
        garbage = random.Random(0)
        self._vocab_size = vocab_size
        self.block_size = block_size
        self.blocks = [
            [garbage.getrandbits(30) for _ in range(block_size)] for _ in range(num_blocks)
        ]
        self.slots = [garbage.getrandbits(60) for _ in range(num_slots)]
        self.before_run = before_run
        self.after_run = after_run
        self.plans: list[StepPlan] = []

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def run(self, plan: StepPlan) -> Tensor:
        """Write the chunks' tokens and read logits back: float32 [N, V]."""
        if self.before_run is not None:
            self.before_run(plan)
        self.plans.append(plan)
        for source, target in plan.slot_copies:
            self.slots[target] = self.slots[source]
        for source, target in plan.block_copies:
            self.blocks[target] = list(self.blocks[source])
        rows = []
        for chunk in plan.chunks:
            self._write(chunk)
            if chunk.wants_logits:
                rows.append(self._logits(chunk))
        logits = torch.stack(rows) if rows else torch.empty(0, self.vocab_size)
        return logits if self.after_run is None else self.after_run(plan, logits)

    def _write(self, chunk: Chunk) -> None:
        if chunk.start == 0:
            self.slots[chunk.slot] = 0
        for position, token in enumerate(chunk.token_ids, chunk.start):
            block, offset = divmod(position, self.block_size)
            self.blocks[chunk.block_ids[block]][offset] = token
            self.slots[chunk.slot] = _hash(self.slots[chunk.slot], token)

    def _logits(self, chunk: Chunk) -> Tensor:
        end = chunk.start + len(chunk.token_ids)
        cells = [
            self.blocks[chunk.block_ids[p // self.block_size]][p % self.block_size]
            for p in range(end)
        ]
        return logits_of(_hash(*cells), self.slots[chunk.slot], self.vocab_size)


def logits_of(cells: int, rolling: int, vocab_size: int) -> Tensor:
    """Float32 [V], spread over a few units, without ties."""
    key = random.Random(_hash(cells, rolling))
    return torch.tensor([key.uniform(-4.0, 4.0) for _ in range(vocab_size)])


def next_logits(sequence: Sequence[int], vocab_size: int) -> Tensor:
    """What the model says after a sequence, without pools: the slow twin of HashRunner."""
    rolling = 0
    for token in sequence:
        rolling = _hash(rolling, token)
    return logits_of(_hash(*sequence), rolling, vocab_size)
