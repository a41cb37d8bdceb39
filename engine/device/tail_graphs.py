"""A prompt's tail as CUDA graphs: the late layers over the few rows that bounded mode leaves.

Some hundred rows through twenty layers are hundreds of launches that each last microseconds, so that
the host may be slower than the device. A pass whose tail is one set of rows (engine.plan.replay: one
stage) can run it as one launch: the rows and what flows into the tail are copied into static buffers,
the smallest *bucket* that holds them is replayed, and what flows out lies in the same buffers.

* Rows of a bucket beyond those of the pass pad (engine.device.row_buffers).
* Warm gate: nothing is captured before prompts as long as any that will be served have been
  processed, since what kernels make for themselves on the way would otherwise be made, or moved,
  after a graph has its address. A bucket is used when it has been captured; until then, and wherever
  a pass does not fit one, the tail runs launch by launch.
* On a CPU a bucket is an eager call over the same buffers with the same padding (GraphCache).

Exact mode has a stage for every layer and always runs launch by launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.api import EngineError
from engine.device.graphs import Captured, GraphCache
from engine.device.kvpool import KVPool
from engine.device.row_buffers import RowBuffers
from engine.device.seals import Seals
from engine.kernels.mhc import HcIn
from engine.kernels.rows import Narrowing
from engine.model.fast import FastModel
from engine.model.flow import Flow, Pass
from engine.plan.replay import Tail

_FLOW = ("streams", "parts", "pre", "post", "comb")


class TailBuffers(RowBuffers):
    """Static input and output of a tail; a bucket has room for a sequence per quarter of a window.

    Attributes:
        streams: [N, S, d].
        parts: [N, P, d].
        pre: float32 [N, S], as post.
        comb: float32 [N, S, S].

    Args:
        num_rows: N, of the largest bucket.
        window: W.
        max_model_len: positions a request may have.
        block_size: of the pool.
        flow: of any rows: its shapes and types.
    """

    streams: Tensor
    parts: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor

    def __init__(
        self, num_rows: int, *, window: int, max_model_len: int, block_size: int, flow: Flow
    ) -> None:
        super().__init__(
            num_rows,
            per_sequence=max(1, window // 4),
            max_model_len=max_model_len,
            block_size=block_size,
            device=flow.streams.device,
            has_floors=True,
        )
        for name, like in _flowing(flow).items():
            setattr(self, name, like.new_zeros((num_rows, *like.shape[1:])))

    def tensors(self) -> dict[str, Tensor]:
        """Everything a captured tail reads or writes, by name."""
        return {**super().tensors(), **{name: getattr(self, name) for name in _FLOW}}

    def fits(self, flow: Flow) -> bool:
        """Whether what flows has the types and widths the buffers were made for."""
        return all(
            (like.dtype, like.shape[1:]) == (own.dtype, own.shape[1:])
            for like, own in ((like, getattr(self, name)) for name, like in _flowing(flow).items())
        )

    def flow(self, count: int) -> Flow:
        """What lies in the first rows."""
        streams, parts, pre, post, comb = (getattr(self, name)[:count] for name in _FLOW)
        # A site's own input is of no use when it closes; any rows of its shape will do.
        x = streams[:, 0]
        return Flow(streams, parts, HcIn(x, x, pre, post, comb))

    def keep(self, flow: Flow) -> None:
        """Write what flows out over what flowed in.

        Raises:
            EngineError: it has other types or widths.
        """
        if not self.fits(flow):
            raise EngineError(
                "graphs of a prompt's tail: what flows out of the last layer differs in type or"
                f" width from what flows in, for {len(flow.streams)} rows"
            )
        for name, tensor in _flowing(flow).items():
            getattr(self, name)[: len(tensor)].copy_(tensor)

    def place(self, bucket: int, flow: Flow, to: Narrowing) -> None:
        """Copy the kept rows of a pass in, and make the rest of a bucket pad.

        Args:
            bucket: rows that will run.
            flow: of all rows of the pass.
            to: the rows that are kept.
        """
        for name, like in _flowing(flow).items():
            torch.index_select(like, 0, to.kept, out=getattr(self, name)[: to.rows.num_rows])
        self.place_rows(bucket, to.rows)


class TailGraphs:
    """Runs tails by bucket.

    Attributes:
        seals: of what the graphs use.
        num_replayed: tails that ran in a bucket.
        num_eager: tails that did not.

    Args:
        model: whose late layers run.
        pool: memory of the requests.
        tail: of the model.
        max_model_len: positions a request may have; a bucket has no more rows.
        buckets: row counts.
        captures: whether buckets become CUDA graphs; they are called otherwise.
        warm_rows: rows of a pass that must have been processed before anything is captured.

    Raises:
        ValueError: a drafter reads layers below the tail.
    """

    def __init__(
        self,
        model: FastModel,
        pool: KVPool,
        tail: Tail,
        *,
        max_model_len: int,
        buckets: Sequence[int],
        captures: bool,
        warm_rows: int,
    ) -> None:
        self.seals = Seals()
        self.num_replayed = self.num_eager = 0
        self._model = model
        self._pool = pool
        self._tail = tail
        self._max_model_len = max_model_len
        drafter = model.drafter
        if drafter is not None and any(layer < tail.first for layer in drafter.taps):
            raise ValueError("a drafter reads layers below the tail, which a bucket does not know")
        # A prompt that fits a window has no rows to leave out, and a chunk not longer than one
        # leaves tails too short to be worth it.
        most = max_model_len if min(max_model_len, warm_rows) > tail.window else 0
        self._wanted = tuple(sorted(n for n in buckets if n <= most))
        self._captures = captures
        self._warm_rows = warm_rows
        self._seen = 0
        self._like: Flow | None = None
        self._buffers: TailBuffers | None = None
        self._graphs: GraphCache | None = None

    @property
    def captured(self) -> tuple[Captured, ...]:
        """How each bucket came to be, largest first; empty until they are there."""
        return () if self._graphs is None else self._graphs.captured

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the static buffers."""
        return 0 if self._buffers is None else self._buffers.nbytes

    def build(self) -> None:
        """Capture all buckets, largest first; every row pads meanwhile.

        Raises:
            EngineError: no pass of `warm_rows` rows with a tail has been processed yet, or fused
                kernels are switched on and no bucket runs one.
        """
        if not self._wanted:
            return
        if self._like is None or self._seen < self._warm_rows:
            raise EngineError(
                f"graphs of a prompt's tail: expected a prompt of {self._warm_rows} rows to have been"
                f" processed before they are captured, got {self._seen}"
            )
        self._buffers = TailBuffers(
            self._wanted[-1],
            window=self._tail.window,
            max_model_len=self._max_model_len,
            block_size=self._pool.block_size,
            flow=self._like,
        )
        self._like = None
        self.seals.add("buffers of tails", self._buffers.tensors)
        self.seals.add("kv pool", self._pool.named_tensors)
        graphs = GraphCache(
            self._body,
            self._model,
            self._wanted,
            self.seals,
            captures=self._captures,
            pad=self._buffers.pad,
        )
        graphs.build()
        self._graphs = graphs

    def run(self, flow: Flow, to: Narrowing) -> Flow | None:
        """Run the tail of a pass in a bucket.

        Args:
            flow: of all rows of the pass, from the layer before the tail.
            to: the rows that are kept.

        Returns:
            what flows out of the last layer, until the next tail runs; None where the pass is to
            run launch by launch: it fits no bucket, or there is none yet.

        Raises:
            SealError: a buffer that graphs use has moved.
        """
        bucket = self._bucket_for(flow, to)
        if bucket is None:
            self.num_eager += to.rows.num_rows > 0
            return None
        assert self._buffers is not None
        assert self._graphs is not None
        self.seals.check()
        self._buffers.place(bucket, flow, to)
        self._graphs.run(bucket)
        self.num_replayed += 1
        return self._buffers.flow(to.rows.num_rows)

    def _bucket_for(self, flow: Flow, to: Narrowing) -> int | None:
        rows = to.rows
        if self._graphs is None:
            if len(flow.streams) > self._seen:
                self._seen, self._like = len(flow.streams), flow.select(to.kept[:1])
            return None
        buffers = self._buffers
        assert buffers is not None
        fits = to.layer == self._tail.first and 0 < rows.num_rows <= self._graphs.buckets[-1]
        if not fits or not buffers.fits(flow):
            return None
        bucket = self._graphs.bucket_for(rows.num_rows)
        return bucket if rows.num_sequences <= buffers.most_sequences(bucket) else None

    def _body(self, bucket: int) -> Tensor:
        """The tail over the first rows of the buffers; what graphs capture."""
        buffers = self._buffers
        assert buffers is not None
        first = self._tail.first
        state = Pass(buffers.rows(bucket), self._pool, written=first)
        buffers.keep(self._model.run_tail(first, buffers.flow(bucket), state))
        return buffers.streams


def _flowing(flow: Flow) -> dict[str, Any]:
    site = flow.site
    found = (flow.streams, flow.parts, site.pre, site.post, site.comb)
    return dict(zip(_FLOW, found, strict=True))
