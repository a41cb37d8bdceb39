"""Experts that stay on the GPU take no memory of the host, and what is beside them is registered whole."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from engine.kernels.ops import ops
from engine.model import hostmem
from engine.model.experts import PagedExperts
from engine.model.hostmem import HostBuffer
from engine.model.placement import Placement
from tests.engine.paging.test_experts import CPU, E, routing, run, weights
from tests.engine.paging.test_pins import pinned

PAGE = 4096


def resident_pages(buffer: HostBuffer) -> list[int]:
    """Numbers of the buffer's pages that have memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = buffer.tensor.numel()
    flags = (ctypes.c_ubyte * -(-size // PAGE))()
    address = ctypes.c_void_p(buffer.tensor.data_ptr())
    assert libc.mincore(address, ctypes.c_size_t(size), flags) == 0
    return [page for page, flag in enumerate(flags) if flag & 1]


class Runtime:
    """A driver that notes what is registered."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.ranges.append((address, address + size))
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.ranges = [r for r in self.ranges if r[0] != address]


@settings(max_examples=30)
@given(
    nbytes=st.integers(1, 40 * PAGE),
    cuts=st.lists(st.integers(0, 40 * PAGE), max_size=8, unique=True),
)
def test_holes_have_no_memory_and_are_not_registered(nbytes: int, cuts: list[int]) -> None:
    """All bytes beside holes are in one registered range each; whole pages of holes are in none."""
    cuts = sorted(min(cut, nbytes) for cut in cuts)
    holes = list(zip(cuts[::2], cuts[1::2], strict=False))
    driver = Runtime()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hostmem, "_runtime", lambda: driver)
        buffer = HostBuffer(nbytes, pin=True, holes=holes)
        base = buffer.tensor.data_ptr()
        ranges = [(begin - base, end - base) for begin, end in driver.ranges]
        assert ranges == buffer.held
        assert buffer.nbytes == sum(end - begin for begin, end in ranges)
        assert all(begin % PAGE == 0 for begin, _ in ranges)
        assert all(before[1] < after[0] for before, after in pairwise(ranges))
        needed = [(a, b) for a, b in zip([0, *cuts[1::2]], [*cuts[::2], nbytes], strict=False) if a < b]  # fmt: skip
        for begin, end in needed:
            assert any(a <= begin and end <= b for a, b in ranges)
        pages = resident_pages(buffer)
        held = {page for a, b in ranges for page in range(a // PAGE, -(-b // PAGE))}
        assert set(pages) == held
        for begin, end in holes:
            inner = range(-(-begin // PAGE), end // PAGE)
            others = {page for a, b in needed for page in range(a // PAGE, -(-b // PAGE))}
            assert not (set(inner) - others) & held
        buffer.close()
        assert not driver.ranges


@pytest.mark.parametrize("pins", [[2], [1, 2], [0], [0, 1, 5], [6, 3]])
@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_a_layers_pins_take_no_pages(
    kind: str, pins: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded and used: pages of pins have no memory, each other expert is in one registration.

    Of expert 0 the pages stay where its tensors begin, since kernels are given those addresses.
    """
    driver = Runtime()
    monkeypatch.setattr(hostmem, "_runtime", lambda: driver)
    read = weights(kind).__getitem__
    other = Placement({0: 6}, device=CPU, pin=True, pins={0: pins}).place(0, read, E)
    assert isinstance(other, PagedExperts)
    for rows, seed in ((1, 0), (2, 1), (6, 2), (15, 3)):
        run(other, *routing(ops("torch"), rows, seed))
    other.check_integrity()
    size, base = other.layout.nbytes, other.store.data_ptr()
    ranges = [(begin - base, end - base) for begin, end in driver.ranges]
    for expert in set(range(E)) - set(pins):
        assert any(a <= expert * size and (expert + 1) * size <= b for a, b in ranges)
    begins = {part.offset for parts in other.layout._parts for part in parts.values()}
    assert all(any(a <= begin < b for a, b in ranges) for begin in begins)
    kept = {begin // PAGE for begin in begins}
    kept |= {page for e in range(E) if e not in pins
             for page in range(e * size // PAGE, -(-(e + 1) * size // PAGE))}  # fmt: skip
    assert isinstance(other._buffer, HostBuffer)
    assert set(resident_pages(other._buffer)) == kept
    assert PAGE * (len(kept) - 1) < other.host_nbytes <= PAGE * len(kept)
    other._buffer.close()


def test_a_read_of_a_hole_is_seen() -> None:
    """The check of pages would notice a pin's bytes that something wrote to the host."""
    other = pinned("plain", 5, [3])
    assert isinstance(other._buffer, HostBuffer)
    before = len(resident_pages(other._buffer))
    assert not other.store[3].any()
    assert len(resident_pages(other._buffer)) > before


def test_stores_made_ahead_have_their_own_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next layer's store is made while one is filled, with the next layer's pins left out; one a layer."""
    made: list[Sequence[tuple[int, int]]] = []

    class Noting(HostBuffer):
        def __init__(self, nbytes: int, *, pin: bool, holes: Sequence[tuple[int, int]]) -> None:
            made.append(holes)
            super().__init__(nbytes, pin=pin, holes=holes)

    monkeypatch.setattr("engine.model.placement.HostBuffer", Noting)
    pins = {0: [3], 1: [], 4: [5, 2]}
    placement = Placement({0: 5, 1: 4, 4: 5}, device=CPU, pin=False, pins=pins)
    read = weights("plain").__getitem__
    size = 0
    for layer in range(5):
        one = placement.place(layer, read, E, threads=2)
        if isinstance(one, PagedExperts):
            size = one.layout.nbytes
            one.check_integrity()
            assert one.num_pins == len(pins[layer])
    of = {e: (e * size, (e + 1) * size) for e in range(E)}
    assert made == [(of[3],), (), (of[2], of[5])]
