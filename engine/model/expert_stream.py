"""Experts on their way through the device: what passes over long prompts need and slots do not hold.

A pass of many rows asks for nearly every expert of a layer, whatever its slots hold. Those that are
not resident are copied into two buffers, which all layers share, and used there; slots keep what
they have. Which ones they are follows from the tables, not from routing, so that the next layer's
are copied while this layer's attention and experts are computed: the bus does not rest between
layers (issue 7, engine.md B3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.expert_paging import buffer_experts

#: Pairs of row and choice for each expert of a layer from which on all of them are expected.
DENSE_PAIRS = 4


@dataclass(slots=True)
class _Buffer:
    """Bytes, and the event behind the last work that read them."""

    data: Tensor
    free: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class Filled:
    """Experts of one layer in a buffer.

    Args:
        layer: number of the paged layer.
        experts: which; row i of `table` holds the i-th.
        table: uint8 [n, bytes].
        buffer: it.
        ready: event behind the copies; None on a CPU.
    """

    layer: int
    experts: tuple[int, ...]
    table: Tensor
    buffer: _Buffer
    ready: torch.cuda.Event | None


class ExpertStream:
    """Two buffers that the experts of all paged layers pass through.

    Args:
        device: of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stores: list[Tensor] = []
        self._idle: list[_Buffer] = []
        self._filled: deque[Filled] = deque()
        self._planned: deque[tuple[int, tuple[int, ...]]] = deque()
        self._copies: torch.cuda.Stream | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        found = sum(buffer.data.nbytes for buffer in self._idle)
        return found + sum(filled.buffer.data.nbytes for filled in self._filled)

    def add(self, store: Tensor) -> int:
        """Take the next paged layer's store, uint8 [E, bytes], and give the layer's number."""
        if not self._stores:
            size = store.shape[1] * buffer_experts(*store.shape)
            for _ in range(2):
                data = torch.empty(size, dtype=torch.uint8, device=self._device)
                self._idle.append(_Buffer(data))
            if self._device.type == "cuda":
                self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stores.append(store)
        return len(self._stores) - 1

    @property
    def num_layers(self) -> int:
        """Paged layers."""
        return len(self._stores)

    def begin(self, layer: int, experts: Sequence[int]) -> frozenset[int]:
        """Have a layer's experts come, beside those that are on their way already.

        What is on its way for other layers is dropped: the pass that wanted it has ended.

        Args:
            layer: its number.
            experts: those that are not resident now.

        Returns:
            those that come; perhaps residents of now that were none when they were asked for.
        """
        for filled in [f for f in self._filled if f.layer != layer]:
            self._filled.remove(filled)
            self._idle.append(filled.buffer)  # nobody has read it
        self._planned = deque(one for one in self._planned if one[0] == layer)
        return self.ahead(layer, experts)

    def ahead(self, layer: int, experts: Sequence[int]) -> frozenset[int]:
        """Have the experts of a layer that follows come too; arguments and result as `begin`."""
        coming = {e for filled in self._filled if filled.layer == layer for e in filled.experts}
        coming |= {e for number, some in self._planned if number == layer for e in some}
        missing = [expert for expert in experts if expert not in coming]
        self._planned.extend((layer, some) for some in self._cut(layer, missing))
        self._pump()
        return frozenset(coming.union(missing))

    def take(self, layer: int) -> Iterator[Filled]:
        """Give a layer's experts, buffer after buffer, each when its copies are queued.

        Work on the current stream that reads a buffer is to be queued before the next is taken.
        """
        while self._filled and self._filled[0].layer == layer:
            with self._taken() as filled:
                yield filled

    @contextmanager
    def _taken(self) -> Iterator[Filled]:
        """Use the oldest buffer; it is filled anew when the work queued meanwhile is done."""
        filled = self._filled.popleft()
        if filled.ready is not None:
            torch.cuda.current_stream(self._device).wait_event(filled.ready)
        try:
            yield filled
        finally:
            self._release(filled.buffer)
            self._pump()

    def _release(self, buffer: _Buffer) -> None:
        if self._copies is not None:
            buffer.free = torch.cuda.current_stream(self._device).record_event()
        self._idle.append(buffer)

    def _cut(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Share experts out among as few buffers as hold them, evenly."""
        room = buffer_experts(*self._stores[layer].shape)
        pieces = -(-len(experts) // room)
        for piece in range(pieces):
            first, end = (len(experts) * at // pieces for at in (piece, piece + 1))
            yield tuple(experts[first:end])

    def _pump(self) -> None:
        """Start filling buffers that are idle."""
        while self._idle and self._planned:
            layer, experts = self._planned.popleft()
            self._filled.append(self._fill(layer, experts, self._idle.pop(0)))

    def _fill(self, layer: int, experts: tuple[int, ...], buffer: _Buffer) -> Filled:
        store = self._stores[layer]
        nbytes = store.shape[1]
        table = buffer.data[: len(experts) * nbytes].view(len(experts), nbytes)
        if self._copies is None:
            self._copy(table, store, experts)
            return Filled(layer, experts, table, buffer, None)
        if buffer.free is not None:
            self._copies.wait_event(buffer.free)
        with torch.cuda.stream(self._copies):
            self._copy(table, store, experts)
            ready = self._copies.record_event()
        return Filled(layer, experts, table, buffer, ready)

    def _copy(self, table: Tensor, store: Tensor, experts: tuple[int, ...]) -> None:
        for row, expert in zip(table, experts, strict=True):
            row.copy_(store[expert], non_blocking=True)
