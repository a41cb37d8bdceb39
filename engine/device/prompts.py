"""How passes over prompts begin, and what of them is captured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from engine.device.kvpool import KVPool
from engine.device.prompt_graphs import PromptGraphs
from engine.device.prompt_pass import Pool, PromptPass, StepModel
from engine.device.tail_graphs import TailGraphs
from engine.model.fast import FastModel
from engine.plan.replay import Tail
from engine.plan.step import Chunk


class Prompts:
    """Begins passes.

    Attributes:
        graphs: short passes by bucket; None where none are to be captured, or not yet.
        tails: tails of passes likewise.

    Args:
        model: what runs.
        pool: memory of the requests.
        device: where both live.
        tail: of the model; None where every layer processes every row.
        max_model_len: positions a request may have.
        captures: whether buckets become CUDA graphs; they are called otherwise.
        tail_buckets: row counts of tails to capture when prompts have warmed up; none for tails
            that are always launched one kernel after the other.
        buckets: likewise of whole passes.

    Raises:
        ValueError: tails are to be captured of a model that has none, or passes of one whose layers
            cannot be.
    """

    def __init__(
        self,
        model: StepModel,
        pool: Pool,
        device: torch.device,
        tail: Tail | None,
        *,
        max_model_len: int,
        captures: bool,
        tail_buckets: Sequence[int] = (),
        buckets: Sequence[int] = (),
    ) -> None:
        self.graphs: PromptGraphs | None = None
        self.tails: TailGraphs | None = None
        self._model, self._pool, self._device, self._tail = model, pool, device, tail
        self._max_model_len = max_model_len
        self._captures = captures
        self._tail_buckets, self._buckets = tuple(tail_buckets), tuple(sorted(buckets))
        is_layered = isinstance(model, FastModel)
        if tail_buckets and (tail is None or not is_layered):
            raise ValueError("tail_buckets: expected none, the model has no tail")
        if buckets and not is_layered:
            raise ValueError("prompt_buckets: expected none for a model of this architecture")

    def prepare(self, longest: int) -> None:
        """Make what captures, before warm-up prompts run.

        Args:
            longest: rows of the longest pass.
        """
        model, pool = self._model, self._pool
        if not isinstance(model, FastModel) or not isinstance(pool, KVPool):
            return
        if self._tail is not None and self._tail_buckets:
            self.tails = TailGraphs(
                model,
                pool,
                self._tail,
                max_model_len=self._max_model_len,
                buckets=self._tail_buckets,
                captures=self._captures,
                warm_rows=longest,
            )
        if fitting := [rows for rows in self._buckets if rows <= longest]:
            self.graphs = PromptGraphs(
                model,
                pool,
                self._tail,
                max_model_len=self._max_model_len,
                buckets=fitting,
                captures=self._captures,
            )

    def rehearse(self, bucket: int) -> None:
        """Call what is captured of passes of a bucket; all rows pad."""
        assert self.graphs is not None
        self.graphs.rehearse(bucket)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Row counts of passes that are, or are to be, captured."""
        return () if self.graphs is None else self.graphs.buckets

    def build(self) -> None:
        """Capture, after warm-up prompts have run.

        Raises:
            EngineError: none as long as needed has, or fused kernels are switched on and unused.
        """
        for each in (self.tails, self.graphs):
            if each is not None:
                each.build()

    def captured(self) -> Iterator[tuple[str, int]]:
        """Give what is captured, in words, and how many sizes of it."""
        for what, each in (("tails of prompts", self.tails), ("prompts", self.graphs)):
            if each is not None and each.captured:
                yield what, len(each.captured)

    def begin(self, chunks: Sequence[Chunk]) -> PromptPass:
        """Lay chunks out as a pass; nothing is launched yet."""
        return PromptPass.begin(
            self._model,
            self._pool,
            chunks,
            self._device,
            self._tail,
            None if self.tails is None else self.tails.run,
            None if self.graphs is None else self.graphs.run,
        )
