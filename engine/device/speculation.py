"""Speculative decode steps of the fast runner: who takes part, one launch, what came out.

A step drafts, verifies and counts on the device (engine.model.speculate), over the rows and static
buffers that plain steps use, and is captured by batch size as they are. Beside those it has two
small tensors: tokens each request may still get, which the device counts down, and a *control*
matrix of what the host knows: whether a draft may be taken at all, how far the request's blocks
reach, and which ids end it.

So the device stops a request where the host will, also in the middle of a block, and the request's
rolling state stands exactly there: what the prefix cache keeps of it is right. And the next step can
be launched before this one's results are read, as with plain steps (engine.device.fast_runner): a
request that has ended gets nothing from it, and nothing of it is stored. Only one that is aborted
may have gone further than anybody knows; the scheduler keeps no state of it.

Requests whose next token must be seen before the one after it is drawn take part with a single row
that counts, like a plain step's: their drafts are never taken. Where that is true of all, or there
are more requests than the decode kernels have rows for, the step is a plain one.
"""

from __future__ import annotations

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
        rows: (arrival, position) -> row; of one that was launched ahead, set when the results of the
            step before are there.
        plain: reasons by arrival of those that get one token.
        half: which of the results are its own.
        logits: [bucket * (n + 1), V], until the next step is launched.
    """

    rows: dict[tuple[int, int], int]
    plain: Mapping[int, str]
    half: int
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
        fitting = speculative_buckets(buckets, self.num_tokens)
        device, most = buffers.ids.device, fitting[-1]
        self._on_gpu = device.type == "cuda"

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._control = ints(most, 2 + MOST_STOPS)
        self._left = ints(most)
        self._results = ints(most, self.num_tokens + 2)
        # Two of each: what one step reads or has given is not touched before the next but one.
        self._hosts = [_Host(self._control, self._left, self._results) for _ in range(2)]
        self._half = 0
        seals.add("speculation", self._tensors)
        self.graphs = GraphCache(self._body, speculator.model, fitting, seals, captures=captures)

    def build(self) -> None:
        """Warm up and capture all batch sizes; every row pads meanwhile."""
        self._pool.reset_slot(0)  # where a rehearsal may have left anything
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
            reason = _reason(chunk, draw_of[chunk.arrival], self._reach(chunk))
            if reason is not None:
                reasons[chunk.arrival] = reason
        return reasons

    def launch(
        self, chunks: Sequence[Chunk], draw_of: Mapping[int, Draw], plain: Mapping[int, str]
    ) -> Block:
        """Launch a step whose first tokens the host knows.

        Args:
            chunks: newest tokens of requests, no more than the largest batch size, in place.
            draw_of: what is to be drawn after each, by arrival.
            plain: requests that may get one token alone, by arrival.
        """
        left = self._hosts[self._half].left
        left.zero_()
        for chunk in chunks:
            left[self._lanes.row_of(chunk)] = chunk.left
        self._left.copy_(left, non_blocking=True)
        block = self._run(chunks, draw_of, plain)
        block.rows = {(c.arrival, c.start): self._lanes.row_of(c) for c in chunks}
        return block

    def launch_ahead(
        self, chunks: Sequence[Chunk], draw_of: Mapping[int, Draw], before: Block
    ) -> Block:
        """Launch the step after the one these chunks are in, whose rows they keep."""
        return self._run(chunks, draw_of, before.plain)

    def results(
        self, block: Block, chunks: Sequence[Chunk], draw_of: Mapping[int, Draw]
    ) -> dict[int, list[Sample | None]]:
        """Wait for a step and give what each request got, by arrival: one token at least.

        A single None stands for a token that could not be drawn.
        """
        lines = self._hosts[block.half].finish()
        found: dict[int, list[Sample | None]] = {}
        for chunk in chunks:
            row, draw = block.rows[chunk.arrival, chunk.start], draw_of[chunk.arrival]
            count, *tokens = lines[row]
            if not count:
                raise RuntimeError(f"request {chunk.request_id} got no token from its row {row}")
            first = row * (self.num_tokens + 1)
            self._lanes.move(chunk, count)
            if draw.params.moves_logits:
                # Nothing was launched ahead of it, so the row is written anew before the next step.
                found[chunk.arrival] = sample(block.logits[first : first + 1], [draw])
                continue
            found[chunk.arrival] = [
                self._sample(block.logits[first + i], token, draw)
                for i, token in enumerate(tokens[:count])
            ]
        return found

    def follow(self, ahead: Block, chunks: Sequence[Chunk]) -> None:
        """Say where those stand that a step was launched ahead for, now that it is known."""
        ahead.rows = {
            (chunk.arrival, self._lanes.position_of(chunk)): self._lanes.row_of(chunk)
            for chunk in chunks
        }

    def _reach(self, chunk: Chunk) -> int:
        """The first position that a chunk's blocks do not cover."""
        return len(chunk.block_ids) * self._pool.block_size

    def _run(
        self, chunks: Sequence[Chunk], draw_of: Mapping[int, Draw], plain: Mapping[int, str]
    ) -> Block:
        half, host = self._half, self._hosts[self._half]
        self._half ^= 1
        control = host.control.numpy()
        control[:] = NO_STOP
        control[:, 0] = 0
        for chunk in chunks:
            row, alone = self._lanes.row_of(chunk), chunk.arrival in plain
            control[row, 0] = 1 if alone else self.num_tokens + 1
            control[row, 1] = self._reach(chunk)
            stops = [] if alone else _stops(draw_of[chunk.arrival])
            control[row, 2 : 2 + len(stops)] = stops
        self._control.copy_(host.control, non_blocking=True)
        bucket = self._lanes.bucket
        logits = self.graphs.run(bucket)
        host.start(self._results, bucket)
        return Block({}, plain, half, logits)

    def _sample(self, logits: Tensor, token: int, draw: Draw) -> Sample | None:
        top = draw.params.top_logprobs
        if token == UNUSABLE:
            return None
        return Sample(token, None if top is None else logprob_of(logits, token, top))

    def rehearse(self, count: int) -> None:
        """Call all that a step calls, where kernels are compiled and do not run."""
        self._speculator.rehearse(
            self._buffers.rows(count), self._pool, self._wanted(count), self._results
        )

    def _body(self, count: int) -> Tensor:
        """One step over the first rows of the buffers; what graphs capture."""
        rows, wanted = self._buffers.rows(count), self._wanted(count)
        return self._speculator.step(rows, self._pool, wanted, self._results)

    def _wanted(self, count: int) -> Wanted:
        b = self._buffers
        return Wanted(
            temperature=b.temperature[:count],
            top_p=b.top_p[:count],
            seeds=b.seeds[:count],
            index=b.index[:count],
            control=self._control[:count],
            left=self._left[:count],
            mask=b.mask[:count],
            forced=b.forced[:count],
        )

    def _tensors(self) -> dict[str, Tensor]:
        return {"control": self._control, "left": self._left, "results": self._results}


class _Host:
    """What the host writes for a step and reads of it, pinned on a GPU."""

    def __init__(self, control: Tensor, left: Tensor, results: Tensor) -> None:
        self._on_gpu = results.device.type == "cuda"
        self.control, self.left, self._results = (
            torch.zeros_like(tensor, device="cpu", pin_memory=self._on_gpu)
            for tensor in (control, left, results)
        )
        self._read = torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]

    def start(self, results: Tensor, count: int) -> None:
        """Begin to copy what a step has written, before the next one writes there."""
        self._results[:count].copy_(results[:count], non_blocking=True)
        if self._read is not None:
            self._read.record()

    def finish(self) -> list[list[int]]:
        """Wait for the copy and give its rows."""
        if self._read is not None:
            self._read.synchronize()
        found: list[list[int]] = self._results.tolist()
        return found


def _reason(chunk: Chunk, draw: Draw, reach: int) -> str | None:
    if draw.guided or draw.allowed is not None or draw.forced is not None:
        return "guide"
    if draw.params.moves_logits:
        return "penalties"
    if len(_stops(draw)) > MOST_STOPS:
        return "stops"
    return "room" if min(chunk.left, reach - chunk.start) < 2 else None


def _stops(draw: Draw) -> list[int]:
    """Ids that end the draw's request."""
    params = draw.params
    return [] if params.ignore_eos else list(dict.fromkeys(params.stop_token_ids))
