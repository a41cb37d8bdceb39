"""Brings in, ahead of a layer, the experts that its router would choose for the layer before's input.

A guess: the residual changes little from one layer to the next, so many choices agree. Nothing but
residency follows from it; the layer decides as ever, and what was guessed wrong has only taken the
slots used longest ago and some of the bus. Copies run on a stream of their own beside this layer's
products and the next one's attention (issue 7, engine.md A4).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.ops import Ops
from engine.kernels.rows import Rows
from engine.model.experts import Experts, PagedExperts

#: Gives experts int32 [T, k] for the input [T, d] of the layer before; -1 for padding rows.
Guess = Callable[[Tensor, Rows], Tensor]


class Prefetch:
    """Guesses for every layer that follows another.

    Args:
        layers: experts of each layer, and how its choices are guessed.
        per_row: k.
    """

    def __init__(self, layers: Sequence[tuple[Experts, Guess]], per_row: int) -> None:
        self._per_row = per_row
        self._after: dict[int, tuple[PagedExperts, Guess]] = {}
        for (before, _), (experts, guess) in itertools.pairwise(layers):
            if isinstance(experts, PagedExperts):
                self._after[id(before)] = experts, guess
        self._stream: torch.cuda.Stream | None = None
        if any(paged.slots.is_cuda for paged, _ in self._after.values()):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def begin(self, ops: Ops, experts: Experts, x: Tensor, rows: Rows) -> None:
        """Start what the layer after `experts` may need, of passes that are one wave there.

        Args:
            ops: of the model.
            experts: of this layer.
            x: its input [T, d].
            rows: of the pass.
        """
        following = self._after.get(id(experts))
        if following is None:
            return
        paged, guess = following
        if not paged.takes_ahead(rows.num_rows * self._per_row):
            return
        if self._stream is None:
            paged.bring_ahead(ops, guess(x, rows))
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            guessed = guess(x, rows)
            paged.bring_ahead(ops, guessed)
            # Held until the layer has waited: the memory of x is the other stream's to reuse.
            paged.hold_ahead(self._stream.record_event(), (x, guessed))


def guess_by_gate(gate: Tensor, k: int, bias: Tensor | None = None) -> Guess:
    """Guess by a router's logits, or by its scores and their bias (sqrt(softplus), model.md 2.7)."""

    def guess(x: Tensor, rows: Rows) -> Tensor:
        scores = F.linear(x.to(gate.dtype), gate).float()
        if bias is not None:
            scores = F.softplus(scores).sqrt() + bias
        return _of_requests(scores.topk(k, -1).indices, rows)

    return guess


def guess_by_table(table: Tensor) -> Guess:
    """What a hash layer will choose: no guess at all."""
    return lambda _, rows: _of_requests(table.index_select(0, rows.ids), rows)


def _of_requests(experts: Tensor, rows: Rows) -> Tensor:
    padding = (rows.slots.index_select(0, rows.seq) == 0)[:, None]
    return torch.where(padding, -1, experts).to(torch.int32)
