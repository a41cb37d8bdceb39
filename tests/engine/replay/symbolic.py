"""A layered model without weights, whose every value is a hash of all it read.

The layers below the tail are one rolling hash of the tokens, in the slot; each row's goes to its
block cell as well, as the last KV source's entries do. A tail layer has a ring of W keys per slot.
Its output at a position is a hash of its input there, of the keys in its window and of the cells of
all positions so far. So a row that is missing, stale, masked too much or too little changes every
token after it. Memory starts as garbage, and rings are never cleared.

`Twin` says the same without memory, chunks or plans: what `off` gives, and what a model gives
whose late layers' windows are cut.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.api import TokenLogprob
from engine.device.runner import LogitsRunner, StepResult
from engine.device.sampler import Draw, logprob_of, sample
from engine.plan import replay
from engine.plan.replay import Tail
from engine.plan.step import Chunk, StepPlan

VOCAB = 12


def logits_of(value: int) -> Tensor:
    """Float32 [VOCAB], spread over a few units, without ties."""
    draw = random.Random(value)
    return torch.tensor([draw.uniform(-4.0, 4.0) for _ in range(VOCAB)])


@dataclass(frozen=True)
class Twin:
    """Values of a whole sequence, by layer and row, from the tokens alone."""

    tail: Tail

    def outputs(self, tokens: Sequence[int], low: int = 0) -> dict[int, int]:
        """Last layer's output by position, of a model whose tail sees no key before `low`."""
        below = list(rolling(0, tokens))
        x = dict(enumerate(below))
        for layer in range(self.tail.first, self.tail.num_layers):
            keys = dict(x)
            x = {
                p: output(
                    layer,
                    [keys[q] for q in range(max(low, p - self.tail.window + 1), p + 1)],
                    below[: p + 1],
                )
                for p in range(low, len(tokens))
            }
        return x

    def next_tokens(self, prompt: Sequence[int], count: int, low: int = 0) -> list[int]:
        """The greedy continuation."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(logits_of(self.outputs(ids, low)[len(ids) - 1]).argmax()))
        return ids[len(prompt) :]


def rolling(before: int, tokens: Sequence[int]) -> list[int]:
    """What the layers below the tail make of each token."""
    found = []
    for token in tokens:
        before = hash((before, token))
        found.append(before)
    return found


def output(layer: int, window: Sequence[int], cells: Sequence[int]) -> int:
    """A tail layer's output; its own input is the window's last key."""
    return hash((layer, tuple(window), tuple(cells)))


class SymbolicRunner(LogitsRunner):
    """The model and its memory.

    Args:
        tail: its layers and window.
        num_blocks: blocks, the dummy 0 included.
        block_size: positions per block.
        num_slots: slots, the dummy 0 included.
    """

    def __init__(self, tail: Tail, *, num_blocks: int, block_size: int, num_slots: int) -> None:
        garbage = random.Random(0)
        self.tail = tail
        self.block_size = block_size
        self.blocks = [[garbage.getrandbits(60)] * block_size for _ in range(num_blocks)]
        self.rolling = [garbage.getrandbits(60) for _ in range(num_slots)]
        self.rings = [
            {
                layer: [garbage.getrandbits(60) for _ in range(tail.window)]
                for layer in range(tail.first, tail.num_layers)
            }
            for _ in range(num_slots)
        ]
        self.plans: list[StepPlan] = []
        self.writes_all_entries = True

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def run(self, plan: StepPlan) -> Tensor:
        outputs = self._process(plan)
        rows = [
            logits_of(out[chunk.end - 1])
            for chunk, out in zip(plan.chunks, outputs, strict=True)
            if chunk.wants_logits
        ]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def step(self, plan: StepPlan, draws: Sequence[Draw]) -> StepResult:
        outputs = self._process(plan)
        wanted = [c for c in zip(plan.chunks, outputs, strict=True) if c[0].wants_logits]
        rows = [logits_of(out[chunk.end - 1]) for chunk, out in wanted]
        scores: dict[str, Mapping[int, TokenLogprob]] = {}
        for chunk, out in zip(plan.chunks, outputs, strict=True):
            if chunk.targets:
                scores[chunk.request_id] = {
                    p + 1: logprob_of(logits_of(out[p]), target, chunk.num_rivals)
                    for p, target in enumerate(chunk.targets, chunk.scored_from)
                }
        samples = sample(torch.stack(rows), draws) if rows else []
        return StepResult(samples, prompt_scores=scores)

    def _process(self, plan: StepPlan) -> list[dict[int, int]]:
        """Outputs of the last layer by position, for each chunk."""
        self.plans.append(plan)
        for source, target in plan.slot_copies:
            self.rolling[target] = self.rolling[source]
            self.rings[target] = {k: list(v) for k, v in self.rings[source].items()}
        for source, target in plan.block_copies:
            self.blocks[target] = list(self.blocks[source])
        below = [self._below(chunk) for chunk in plan.chunks]
        stages = replay.stages(self.tail, plan.chunks)
        found = []
        for number, (chunk, x) in enumerate(zip(plan.chunks, below, strict=True)):
            if not self.writes_all_entries and stages:
                first = stages[0].firsts[number]
            else:
                first = chunk.start
            for p in range(first, chunk.end):
                self._set_cell(chunk, p, x[p])
            for layer in range(self.tail.first, self.tail.num_layers):
                stage = next((s for s in reversed(stages) if s.layer <= layer), None)
                first = chunk.start if stage is None else stage.firsts[number]
                floor = 0 if stage is None else stage.floors[number]
                x = self._layer(layer, chunk, x, first, floor)
            found.append(x)
        return found

    def _below(self, chunk: Chunk) -> dict[int, int]:
        values = rolling(self.rolling[chunk.slot] if chunk.start else 0, chunk.token_ids)
        self.rolling[chunk.slot] = values[-1]
        return dict(enumerate(values, chunk.start))

    def _layer(
        self, layer: int, chunk: Chunk, x: dict[int, int], first: int, floor: int
    ) -> dict[int, int]:
        ring, width = self.rings[chunk.slot][layer], self.tail.window
        found = {}
        for p in range(first, chunk.end):
            ring[p % width] = x[p]
            window = [ring[q % width] for q in range(max(floor, p - width + 1, 0), p + 1)]
            cells = [self._cell(chunk, q) for q in range(p + 1)]
            found[p] = output(layer, window, cells)
        return found

    def _cell(self, chunk: Chunk, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return self.blocks[chunk.block_ids[block]][offset]

    def _set_cell(self, chunk: Chunk, position: int, value: int) -> None:
        block, offset = divmod(position, self.block_size)
        self.blocks[chunk.block_ids[block]][offset] = value
