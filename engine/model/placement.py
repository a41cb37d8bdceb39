"""Decides where the experts of each layer go, and puts them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from engine.api import EngineError
from engine.expert_paging import host_rows
from engine.kernels.formats import Matrix
from engine.model.disktier import HostCache
from engine.model.expert_layout import ExpertLayout
from engine.model.expert_stream import ExpertStream
from engine.model.experts import Experts, PagedExperts, ResidentExperts
from engine.model.hostmem import HostBuffer

#: Threads that fill a store; what they do is copying, outside the interpreter.
FILLERS = 4
#: Ranges of a store that have no memory.
Holes = tuple[tuple[int, int], ...]
#: Gives (w13, w2) of one expert.
ReadExpert = Callable[[int], tuple[Matrix, Matrix]]


class Placement:
    """Where experts go.

    Args:
        slots: layer -> K of a paged layer; layers that are not named stay on the device.
        device: of slots and resident experts.
        pin: whether stores are pinned for a GPU; those of one are by default.
        host_bytes: most memory of all paged layers' stores; where they need more, the host keeps a
            part of each layer and the rest is read from files as it is needed. None for no limit.
        pins: layer -> experts of a paged layer that stay on the device and have no host memory.
    """

    def __init__(
        self,
        slots: Mapping[int, int] | None = None,
        *,
        device: torch.device,
        pin: bool | None = None,
        host_bytes: int | None = None,
        pins: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._slots = dict(slots or {})
        self._pins = {layer: tuple((pins or {}).get(layer, ())) for layer in self._slots}
        self._device = device
        self._pin = device.type == "cuda" if pin is None else pin
        self._host_bytes = host_bytes
        self._stream = ExpertStream(device)
        self._last: PagedExperts | None = None
        self._next: tuple[tuple[int, Holes], Future[HostBuffer]] | None = None
        self._pinner = ThreadPoolExecutor(1, thread_name_prefix="bathyal-pin")

    def is_paged(self, layer: int) -> bool:
        """Whether a layer's experts are read on the host."""
        return layer in self._slots

    def place(self, layer: int, read: ReadExpert, count: int, *, threads: int = 1) -> Experts:
        """Take a layer's experts, one after the other; paged layers come in ascending order.

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
        pins = self._pins[layer]
        needs = {index: count - len(some) for index, some in self._pins.items()}
        shares = host_rows(self._host_bytes, layout.nbytes, needs)
        with torch.inference_mode(False):  # threads fill them
            pinned = {e: torch.empty(layout.nbytes, dtype=torch.uint8) for e in pins}
        if (rows := shares[layer]) < needs[layer]:
            room = num_slots - len(pins)
            if rows < max(room, 2):
                raise EngineError(
                    f"expert_host_gb: layer {layer} has {room} slots: expected room on the"
                    f" host for as many of its experts ({layout.nbytes:,} bytes each) in each of"
                    f" {len(self._slots)} paged layers, got room for {rows}"
                )
            for expert, row in pinned.items():
                layout.write(row, read(expert))
            cache = HostCache(layout, read, count, rows, pin=self._pin, without=pins)
            return PagedExperts(layout, cache, num_slots, self._device, count, pinned)
        following = (i for i in self._slots if i > layer and shares[i] == needs[i])
        buffer = self._buffer(layer, min(following, default=None), layout, count)
        table = buffer.tensor.view(count, layout.nbytes)

        def fill(index: int) -> None:
            row = pinned[index] if index in pinned else table[index]
            layout.write(row, first if index == 0 else read(index))

        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(fill, range(count)):
                pass
        paged = PagedExperts(layout, buffer, num_slots, self._device, count, pinned)
        paged.join(self._stream, self._last)
        self._last = paged
        return paged

    def _buffer(
        self, layer: int, following: int | None, layout: ExpertLayout, count: int
    ) -> HostBuffer:
        """Give a store; that of the layer that follows is pinned while this one is filled.

        Layers between are loaded meanwhile too. A next layer of another size gets one of its own.
        """
        nbytes = count * layout.nbytes

        def holes(index: int) -> Holes:
            return tuple(gap for e in sorted(self._pins[index]) for gap in layout.gaps_of(e))

        ahead, self._next = self._next, None
        if ahead is not None and ahead[0] == (nbytes, holes(layer)):
            found = ahead[1].result()
        else:
            found = HostBuffer(nbytes, pin=self._pin, holes=holes(layer))
        if following is not None:
            own = holes(following)
            make = partial(HostBuffer, nbytes, pin=self._pin, holes=own)
            self._next = (nbytes, own), self._pinner.submit(make)
        else:
            self._pinner.shutdown(wait=False)
        return found
