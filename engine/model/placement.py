"""Decides where the experts of each layer go, and puts them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from engine.api import EngineError
from engine.kernels.formats import Matrix
from engine.model.disktier import HostCache
from engine.model.expert_layout import ExpertLayout
from engine.model.expert_stream import ExpertStream
from engine.model.experts import Experts, PagedExperts, ResidentExperts
from engine.model.hostmem import HostBuffer

#: Threads that fill a store; what they do is copying, outside the interpreter.
FILLERS = 4
#: Gives (w13, w2) of one expert.
ReadExpert = Callable[[int], tuple[Matrix, Matrix]]


class Placement:
    """Where experts go.

    Args:
        slots: layer -> K of a paged layer; layers that are not named stay on the device.
        device: of slots and resident experts.
        pin: whether stores are pinned for the GPU.
        host_bytes: most memory of all paged layers' stores; where they need more, the host keeps a
            part of each layer and the rest is read from files as it is needed. None for no limit.
    """

    def __init__(
        self,
        slots: Mapping[int, int] | None = None,
        *,
        device: torch.device,
        pin: bool,
        host_bytes: int | None = None,
    ) -> None:
        self._slots = dict(slots or {})
        self._device = device
        self._pin = pin
        self._host_bytes = host_bytes
        self._left = len(self._slots)  # paged layers to come
        self._stream = ExpertStream(device)
        self._last: PagedExperts | None = None
        self._next: tuple[int, Future[HostBuffer]] | None = None
        self._pinner = ThreadPoolExecutor(1, thread_name_prefix="bathyal-pin")

    def is_paged(self, layer: int) -> bool:
        """Whether a layer's experts are read on the host."""
        return layer in self._slots

    def place(self, layer: int, read: ReadExpert, count: int, *, threads: int = 1) -> Experts:
        """Take a layer's experts, one after the other.

        Args:
            layer: its index.
            read: gives one; from files that stay, if the host has no room for all.
            count: how many there are.
            threads: that may read at once.

        Raises:
            EngineError: the host has room for fewer experts of a layer than it has slots.
        """
        first = read(0)
        layout = ExpertLayout(first)
        num_slots = self._slots.get(layer)
        if num_slots is None:
            table = torch.empty((count, layout.nbytes), dtype=torch.uint8, device=self._device)
            layout.write(table[0], first)
            for index in range(1, count):
                layout.write(table[index], read(index))
            return ResidentExperts(*layout.stacks(table))
        rows = host_rows(self._host_bytes, len(self._slots), layout.nbytes, count)
        if rows < count:
            if rows < max(num_slots, 2):
                raise EngineError(
                    f"expert_host_gb: layer {layer} has {num_slots} slots: expected room on the"
                    f" host for as many of its experts ({layout.nbytes:,} bytes each) in each of"
                    f" {len(self._slots)} paged layers, got room for {rows}"
                )
            cache = HostCache(layout, read, count, rows, pin=self._pin)
            return PagedExperts(layout, cache, num_slots, self._device, count)
        buffer = self._buffer(count * layout.nbytes)
        table = buffer.tensor.view(count, layout.nbytes)

        def fill(index: int) -> None:
            layout.write(table[index], read(index))

        layout.write(table[0], first)
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(fill, range(1, count)):
                pass
        paged = PagedExperts(layout, buffer, num_slots, self._device, count)
        paged.join(self._stream, self._last)
        self._last = paged
        return paged

    def _buffer(self, nbytes: int) -> HostBuffer:
        """Give a store; the next paged layer's is pinned while this one is filled.

        Layers between are loaded meanwhile too. A next layer of another size gets one of its own.
        """
        self._left -= 1
        ahead, self._next = self._next, None
        if ahead is not None and ahead[0] == nbytes:
            found = ahead[1].result()
        else:
            found = HostBuffer(nbytes, pin=self._pin)
        if self._left > 0:
            make = partial(HostBuffer, nbytes, pin=self._pin)
            self._next = nbytes, self._pinner.submit(make)
        else:
            self._pinner.shutdown(wait=False)
        return found


def host_rows(host_bytes: int | None, layers: int, nbytes: int, count: int) -> int:
    """Experts of each paged layer that the host keeps.

    Args:
        host_bytes: for all of them; None for no limit.
        layers: that are paged.
        nbytes: of an expert.
        count: experts of a layer.
    """
    if host_bytes is None:
        return count
    return min(count, host_bytes // (layers * nbytes))
