"""Speculative decode steps of the fast runner: who takes part, one launch, what came out.

A step drafts, verifies and counts on the device (engine.model.speculate), over the rows and static
buffers that plain steps use, and is captured by batch size as they are. What differs from step to
step is one small matrix: how many tokens each row may get, and which ids stop it. Since the device
observes both, its rolling state stands where the request does after every step, also where one ends
in the middle of a block, so what the prefix cache keeps of it is right.

How many tokens a request gets is known only when the step is over, so no step is launched ahead of
these results: the host's part of a step is short beside a pass of several rows a request.

Requests whose next token must be seen before the one after it is drawn take part with a single row
that counts, like a plain step's: their drafts are never taken. Where that is true of all, or there
are more requests than the decode kernels have rows for, the step is a plain one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.device.buffers import DecodeBuffers
from engine.device.graphs import GraphCache
from engine.device.kvpool import KVPool
from engine.device.lanes import Lanes
from engine.device.sampler import Draw, Sample, logprob_of, sample
from engine.device.seals import Seals
from engine.kernels.accept import MOST_STOPS, NO_STOP
from engine.kernels.feed import UNUSABLE
from engine.model.speculate import Speculator, Wanted
from engine.plan.step import Chunk
from engine.speculation import speculative_buckets


@dataclass(slots=True)
class Block:
    """A speculative step that was launched.

    Args:
        rows: arrival -> row.
        logits: [bucket * (n + 1), V], until the next step is launched.
    """

    rows: Mapping[int, int]
    logits: Tensor


class Speculation:
    """Speculative steps over a runner's decode rows.

    Attributes:
        num_tokens: n, tokens of a draft.
        graphs: the steps by batch size; those of too many rows are not made.

    Args:
        speculator: makes the steps.
        pool: memory of the requests, with what the drafter needs.
        buffers: rows that plain steps use.
        lanes: who has which.
        buckets: batch sizes of plain steps.
        seals: of what the graphs use.
        captures: whether to capture CUDA graphs.
    """

    def __init__(
        self,
        speculator: Speculator,
        pool: KVPool,
        buffers: DecodeBuffers,
        lanes: Lanes,
        buckets: Sequence[int],
        seals: Seals,
        *,
        captures: bool,
    ) -> None:
        self.num_tokens = speculator.num_tokens
        self._speculator = speculator
        self._pool = pool
        self._buffers = buffers
        self._lanes = lanes
        size = self.num_tokens + 1
        fitting = speculative_buckets(buckets, self.num_tokens)
        self._device = device = buffers.ids.device
        self._on_gpu = device.type == "cuda"
        most = fitting[-1]
        self._control = torch.zeros((most, 1 + MOST_STOPS), dtype=torch.int64, device=device)
        self._results = torch.zeros((most, size + 1), dtype=torch.int64, device=device)
        self._control_host = torch.zeros_like(self._control, device="cpu", pin_memory=self._on_gpu)
        self._results_host = torch.zeros_like(self._results, device="cpu", pin_memory=self._on_gpu)
        self._read = torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]
        seals.add("speculation", self._tensors)
        self.graphs = GraphCache(self._body, speculator.model, fitting, seals, captures=captures)

    def build(self) -> None:
        """Warm up and capture all batch sizes; every row pads meanwhile."""
        self.graphs.build()

    def plain_rows(self, chunks: Sequence[Chunk], draw_of: Mapping[int, Draw]) -> dict[int, str]:
        """Say which requests get no more than one token from a step, and why.

        Args:
            chunks: newest tokens of requests.
            draw_of: what is to be drawn after each, by arrival.

        Returns:
            reasons by arrival: "batch" (of all: too many requests), "guide" (a mask or a forced
            token), "penalties" (logits that depend on the tokens before), "stops" (more stop ids than
            the device looks at), "room" (the last token, or no free block for another).
        """
        if len(chunks) > self.graphs.buckets[-1]:
            return {chunk.arrival: "batch" for chunk in chunks}
        reasons = {}
        for chunk in chunks:
            reason = _reason(chunk, draw_of[chunk.arrival])
            if reason is not None:
                reasons[chunk.arrival] = reason
        return reasons

    def launch(
        self,
        chunks: Sequence[Chunk],
        draw_of: Mapping[int, Draw],
        plain: Mapping[int, str],
    ) -> Block:
        """Launch a step; its results are read before anything else is placed.

        Args:
            chunks: newest tokens of requests, no more than the largest batch size, in place.
            draw_of: what is to be drawn after each, by arrival.
            plain: requests that may get one token alone, by arrival.
        """
        control = self._control_host.numpy()
        control[:, 0], control[:, 1:] = 0, NO_STOP
        rows = {}
        for chunk in chunks:
            row = rows[chunk.arrival] = self._lanes.row_of(chunk)
            control[row, 0] = 1 if chunk.arrival in plain else min(chunk.most, self.num_tokens + 1)
            if chunk.arrival not in plain:
                stops = _stops(draw_of[chunk.arrival])
                control[row, 1 : 1 + len(stops)] = stops
        bucket = self.graphs.bucket_for(1 + max(rows.values()))
        self._control.copy_(self._control_host, non_blocking=True)
        logits = self.graphs.run(bucket)
        self._results_host[:bucket].copy_(self._results[:bucket], non_blocking=True)
        if self._read is not None:
            self._read.record()
        return Block(rows, logits)

    def results(
        self, block: Block, chunks: Sequence[Chunk], draw_of: Mapping[int, Draw]
    ) -> dict[int, list[Sample | None]]:
        """Wait for a step and give what each request got, by arrival: one token at least.

        A single None stands for a token that could not be drawn.
        """
        if self._read is not None:
            self._read.synchronize()
        lines = self._results_host.tolist()
        found: dict[int, list[Sample | None]] = {}
        for chunk in chunks:
            row, draw = block.rows[chunk.arrival], draw_of[chunk.arrival]
            count, *tokens = lines[row]
            first = row * (self.num_tokens + 1)
            self._lanes.move(chunk, count)
            if draw.params.moves_logits:
                found[chunk.arrival] = sample(block.logits[first : first + 1], [draw])
                continue
            found[chunk.arrival] = [
                self._sample(block.logits[first + i], token, draw)
                for i, token in enumerate(tokens[:count])
            ]
        return found

    def _sample(self, logits: Tensor, token: int, draw: Draw) -> Sample | None:
        top = draw.params.top_logprobs
        if token == UNUSABLE:
            return None
        return Sample(token, None if top is None else logprob_of(logits, token, top))

    def _body(self, count: int) -> Tensor:
        """One step over the first rows of the buffers; what graphs capture."""
        b, control = self._buffers, self._control[:count]
        wanted = Wanted(
            temperature=b.temperature[:count],
            top_p=b.top_p[:count],
            seeds=b.seeds[:count],
            index=b.index[:count],
            control=control,
            mask=b.mask[:count],
            forced=b.forced[:count],
        )
        return self._speculator.step(b.rows(count), self._pool, wanted, self._results)

    def _tensors(self) -> dict[str, Tensor]:
        return {"control": self._control, "results": self._results}


def tally(plain: Mapping[int, str]) -> dict[str, int]:
    """Count rows by reason."""
    return dict(Counter(plain.values()))


def _reason(chunk: Chunk, draw: Draw) -> str | None:
    if draw.allowed is not None or draw.forced is not None:
        return "guide"
    if draw.params.moves_logits:
        return "penalties"
    if len(_stops(draw)) > MOST_STOPS:
        return "stops"
    return "room" if chunk.most < 2 else None


def _stops(draw: Draw) -> list[int]:
    """Ids that end the draw's request."""
    params = draw.params
    return [] if params.ignore_eos else list(dict.fromkeys(params.stop_token_ids))
