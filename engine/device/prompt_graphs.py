"""Short passes over prompts as CUDA graphs: one for each layer, by rows.

A pass of some hundred rows is hundreds of launches for 20 to 100 microseconds of work each, so that
the host may be slower than the device. Passes of up to the largest *bucket* of rows can be replayed
instead: their rows are copied into static buffers (engine.device.row_buffers), and each layer of the
smallest bucket that holds them is one launch, so that a pass may still be cut between layers
(engine.device.slices).

* Only what every row goes through is captured: all layers or, where late ones leave rows out
  (engine.plan.replay), those before. What follows, and logits, is launched as for any other pass,
  over the rows that are no padding.
* All layers of all buckets share one memory pool and run in turn, so only one pass at a time can be
  under way. One that was given up is not resumed.
* Warm gate: nothing is captured before prompts of every bucket have been processed, since what
  kernels make for themselves on the way would otherwise be made, or moved, after a graph has its
  address.
* On a CPU a bucket is called layer by layer over the same buffers with the same padding.

A pass in a bucket equals the same pass alone up to rounding: products differ by shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.api import EngineError
from engine.device.graphs import Captured, Capturer, capture_all
from engine.device.kvpool import KVPool
from engine.device.row_buffers import RowBuffers
from engine.device.seals import Seals
from engine.model.fast import FastModel
from engine.model.flow import Flow, Pass
from engine.plan.replay import Tail

#: Rows of a bucket for each prompt that it has room for.
PER_SEQUENCE = 64


@dataclass(frozen=True, slots=True)
class _End:
    """What layers leave to whoever goes on behind them.

    Args:
        flow: out of the last of them.
        choices: of entries, by the layer that made them.
        taps: means of the streams, by layer.
    """

    flow: Flow
    choices: dict[int, Tensor]
    taps: dict[int, Tensor]

    @classmethod
    def of(cls, flow: Flow, state: Pass) -> _End:
        """Of a pass as it stands."""
        return cls(flow, dict(state.choices), dict(state.taps))

    def leave(self, state: Pass) -> Flow:
        """Give a pass the results for its own rows, which are the first."""
        count = state.rows.num_rows
        state.choices = {at: choice[:count] for at, choice in self.choices.items()}
        state.taps = {at: tap[:count] for at, tap in self.taps.items()}
        return self.flow.head(count)


@dataclass(frozen=True, slots=True)
class _Graphs:
    """A bucket that was captured.

    Args:
        layers: a graph for each.
        ends: by the number of layers before it.
    """

    layers: list[torch.cuda.CUDAGraph]
    ends: dict[int, _End]


class PromptGraphs:
    """Runs the first layers of short passes by bucket.

    Attributes:
        seals: of what the graphs use.
        captured: how each bucket came to be, largest first; empty until they are there.
        num_replayed: passes that ran in a bucket.
        num_eager: passes that did not.

    Args:
        model: whose layers run.
        pool: memory of the requests.
        tail: of the model; None where every layer processes every row.
        max_model_len: positions a request may have.
        buckets: row counts, ascending.
        captures: whether buckets become CUDA graphs; they are called otherwise.
    """

    def __init__(
        self,
        model: FastModel,
        pool: KVPool,
        tail: Tail | None,
        *,
        max_model_len: int,
        buckets: Sequence[int],
        captures: bool,
    ) -> None:
        self.seals = Seals()
        self.captured: tuple[Captured, ...] = ()
        self.num_replayed = self.num_eager = 0
        self.buckets = tuple(buckets)
        self._model = model
        self._pool = pool
        # Where a pass may go on otherwise. Candidates of a choice are made by the tail (P2 of
        # engine.plan.replay), so choices and taps are all that it reads of the layers before.
        self._ends = {model.config.num_hidden_layers} | ({tail.first} if tail else set())
        self._captures = captures
        self._graphs: dict[int, _Graphs] = {}
        self._is_ready = False
        self._serial = 0  # of the pass that is under way, or was the last one
        self._most_seen = 0
        self.buffers = RowBuffers(
            self.buckets[-1],
            per_sequence=PER_SEQUENCE,
            max_model_len=max_model_len,
            block_size=pool.block_size,
            device=model.weights.embed.device,
        )
        self.seals.add("buffers of prompts", self.buffers.tensors)
        self.seals.add("kv pool", pool.named_tensors)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the static buffers."""
        return self.buffers.nbytes

    def rehearse(self, bucket: int) -> None:
        """Call a bucket's layers while all of its rows pad."""
        self.buffers.pad(bucket)
        for _ in self._call(bucket):
            pass

    def build(self) -> None:
        """Capture all buckets, largest first; every row pads meanwhile.

        Raises:
            EngineError: no pass as large as the largest bucket was processed yet, or fused kernels
                are switched on and no bucket runs one.
        """
        if self._most_seen < self.buckets[-1]:
            raise EngineError(
                f"graphs of prompts: expected one of {self.buckets[-1]} rows to have been processed"
                f" before they are captured, got {self._most_seen}"
            )
        self.captured = capture_all(
            self._model, self.buckets, self._prepare, captures=self._captures
        )
        self.seals.seal()
        self._is_ready = True

    def run(self, state: Pass, layers: int) -> Iterator[Flow | None] | None:
        """Run the first layers of a pass in a bucket, pausing after each.

        Args:
            state: the pass; is given what the layers chose and tapped.
            layers: how many.

        Returns:
            yields what flows out of the last one, over the pass's own rows, until the next pass; None
            before that. None in place of it where the pass is to run launch by launch: it fits no
            bucket, or there is none yet.

        Raises:
            SealError: a buffer that graphs use has moved.
            EngineError: the pass goes on after another one has begun.
        """
        rows = state.rows
        if not self._is_ready:
            self._most_seen = max(self._most_seen, rows.num_rows)
            return None
        bucket = next((n for n in self.buckets if rows.num_rows <= n), None)
        fits = bucket is not None and rows.num_sequences <= self.buffers.most_sequences(bucket)
        # A pass of single rows may come while another one is under way.
        if bucket is None or not fits or rows.is_decode or layers not in self._ends:
            self.num_eager += 1
            return None
        return self._run(bucket, state, layers)

    def _run(self, bucket: int, state: Pass, layers: int) -> Iterator[Flow | None]:
        self.seals.check()
        self.buffers.place_rows(bucket, state.rows)
        self.num_replayed += 1
        self._serial += 1
        mine = self._serial
        launches = self._replay(bucket) if self._captures else self._call(bucket)
        for count, end in enumerate(launches, 1):
            if count == layers:
                assert end is not None
                yield end.leave(state)
                return
            yield None
            if self._serial != mine:
                raise EngineError("graphs of prompts: a pass goes on after another one has begun")

    def _call(self, bucket: int) -> Iterator[_End | None]:
        """Launch layer after layer; give what those at an end leave."""
        state = Pass(self.buffers.rows(bucket), self._pool)
        for count, flow in enumerate(self._model.layers(state), 1):
            yield _End.of(flow, state) if count in self._ends else None

    def _replay(self, bucket: int) -> Iterator[_End | None]:
        graphs = self._graphs[bucket]
        for count, graph in enumerate(graphs.layers, 1):
            graph.replay()
            yield graphs.ends.get(count)

    def _prepare(self, bucket: int, capturer: Capturer | None) -> int:
        """Warm up and capture a bucket; give the bytes by which the memory pool has grown."""
        if capturer is None:
            self.rehearse(bucket)
            return 0
        capturer.warm_up(lambda: self.rehearse(bucket))
        before: int = torch.cuda.memory_reserved()
        launches = self._call(bucket)
        step: Any = lambda: next(launches)  # noqa: E731
        graphs, ends = [], dict[int, _End]()
        for count in range(1, self._model.config.num_hidden_layers + 1):
            graph, end = capturer.capture(step)
            graphs.append(graph)
            if end is not None:
                ends[count] = end
        self._graphs[bucket] = _Graphs(graphs, ends)
        return torch.cuda.memory_reserved() - before
