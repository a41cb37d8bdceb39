"""A layer's experts in slots compute what resident ones compute, bit for bit, whatever came before."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.kernels.formats import Matrix
from engine.kernels.fp4 import stored_codes, stored_scales
from engine.kernels.ops import Ops, ops
from engine.kernels.paging import STEP
from engine.kernels.router import Routing
from engine.model import hostmem
from engine.model.expert_layout import ExpertLayout
from engine.model.experts import PagedExperts, ResidentExperts
from engine.model.hostmem import HostBuffer
from engine.model.placement import Placement
from engine.model.quant import quantise_fp4, quantise_fp8
from engine.plan.residency import Residency

CPU = torch.device("cpu")
E, D, INNER, TOP_K = 7, 64, 32, 2


def matrix(kind: str, rows: int, columns: int, generator: torch.Generator) -> Matrix:
    values = torch.randn(rows, columns, generator=generator) * columns**-0.5
    if kind == "plain":
        return Matrix("plain", values.bfloat16())
    if kind == "fp8":
        data, scale = quantise_fp8(values, 32)
        return Matrix("fp8", data, scale.view(torch.uint8), 32)
    data, scale = quantise_fp4(values, 32)
    return Matrix(
        "fp4", stored_codes(data.view(torch.uint8)), stored_scales(scale.view(torch.uint8)), 32
    )


def weights(kind: str) -> list[tuple[Matrix, Matrix]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (matrix(kind, 2 * INNER, D, generator), matrix(kind, D, INNER, generator)) for _ in range(E)
    ]


def routing(table: Ops, rows: int, seed: int) -> tuple[torch.Tensor, Routing]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, D, generator=generator)
    chosen = torch.stack([torch.randperm(E, generator=generator)[:TOP_K] for _ in range(rows)])
    experts = chosen.int()
    if rows > 2:
        experts[1] = -1  # a padding row
    share = torch.rand(rows, TOP_K, generator=generator) * (experts >= 0)
    return x, Routing(experts, share, *table.group(experts, E))


def paged(kind: str, slots: int) -> PagedExperts:
    found = Placement({0: slots}, device=CPU, pin=False).place(0, weights(kind).__getitem__, E)
    assert isinstance(found, PagedExperts)
    return found


def run(experts: PagedExperts | ResidentExperts, x: torch.Tensor, how: Routing) -> torch.Tensor:
    shared = matrix("plain", 2 * INNER, D, torch.Generator().manual_seed(2))
    down = matrix("plain", D, INNER, torch.Generator().manual_seed(3))
    return experts.run(ops("torch"), x, how, shared, down, limit=10.0, act_group=None)


@pytest.mark.parametrize("kind", ["plain", "fp8", "fp4"])
@settings(deadline=None, max_examples=10)
@given(
    slots=st.integers(TOP_K, E),
    passes=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 99)), min_size=1, max_size=4),
)
def test_parts_do_not_depend_on_slots_or_history(
    kind: str, slots: int, passes: list[tuple[int, int]]
) -> None:
    """Any K, any order of large and small passes: the same bits (J3, J5), slots true to the store (J4)."""
    table = ops("torch")
    resident = Placement(device=CPU, pin=False).place(0, weights(kind).__getitem__, E)
    other = paged(kind, slots)
    for rows, seed in passes:
        x, how = routing(table, rows, seed)
        assert torch.equal(run(other, x, how), run(resident, x, how))
        other.check_integrity()


@settings(deadline=None, max_examples=25)
@given(
    slots=st.integers(TOP_K, E),
    pads=st.lists(st.booleans(), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_padding_touches_nothing(slots: int, pads: list[bool], seed: int) -> None:
    """Wherever rows pad: real rows get what they get alone, and nobody else's experts move (J8)."""
    table, other = ops("torch"), paged("fp4", slots)
    resident = Placement(device=CPU, pin=False).place(0, weights("fp4").__getitem__, E)
    x, how = routing(table, len(pads), seed)
    real = torch.tensor(pads).logical_not() & (how.experts[:, 0] >= 0)
    experts = torch.where(real[:, None], how.experts, -1)
    how = Routing(experts, how.weights * real[:, None], *table.group(experts, E))
    before, held = other.read_residency(), other.slots.clone()

    parts = run(other, x, how)

    alone = Routing(experts[real], how.weights[real], *table.group(experts[real], E))
    assert torch.equal(parts, run(resident, x, how))
    torch.testing.assert_close(parts[real], run(resident, x[real], alone))
    assert (parts[~real][:, :TOP_K] == 0).all()
    assert (parts[~real][:, TOP_K] != 0).any(1).all(), "the shared expert's part is every row's"
    after, wanted = other.read_residency(), set(experts[real].flatten().tolist())
    assert set(after.slot_expert) <= set(before.slot_expert) | wanted
    assert after.hits + after.misses == len(wanted)
    if not wanted:
        assert after.slot_expert == before.slot_expert
        assert torch.equal(other.slots, held)
    other.check_integrity()


@pytest.mark.parametrize("rows", [1, 6])
def test_a_pass_waits_for_what_comes_ahead(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Once, and before it decides, be it one wave or several; a capture must not end without it."""
    other = paged("plain", 3)
    awaited: list[tuple[object, int]] = []
    monkeypatch.setattr(
        PagedExperts,
        "_await",
        lambda self, ready: awaited.append((ready, int(self.state.counters[STEP]))),
    )
    event = object()
    other.hold_ahead(event, ())  # type: ignore[arg-type]
    for seed in range(2):
        run(other, *routing(ops("torch"), rows, seed))
    assert [step for ready, step in awaited if ready is event] == [0]


def test_layout_keeps_every_tensor_of_an_expert() -> None:
    """What is written to an expert's bytes comes back, codes and scales, at aligned places."""
    pair = weights("fp4")[3]
    layout = ExpertLayout(pair)
    table = torch.zeros((2, layout.nbytes), dtype=torch.uint8)
    layout.write(table[1], pair)
    for stack, m in zip(layout.stacks(table), pair, strict=True):
        assert torch.equal(stack[1].data, m.data)
        assert torch.equal(stack[1].scale, m.scale)  # type: ignore[arg-type]
        assert stack.data.data_ptr() % 256 == table.data_ptr() % 256


def _forget_scales(experts: PagedExperts) -> None:
    """Slots take codes but keep the scales of whom they held before (c1, c2)."""
    part = experts.layout._parts[0]["scale"]
    kept = slice(part.offset, part.offset + part.nbytes)
    before = experts.slots[:, kept].clone()
    copy = experts._copy

    def faulty(residency: Residency, wave: list[int]) -> None:
        copy(residency, wave)
        experts.slots[:, kept] = before

    experts._copy = faulty  # type: ignore[method-assign, assignment]


def _evict_the_wave(experts: PagedExperts) -> None:
    """The next wave is brought into the slots of the one before (c3)."""
    copy = experts._copy

    def faulty(residency: Residency, wave: list[int]) -> None:
        residency.last_use = [-u for u in residency.last_use]
        residency.step = -residency.step
        copy(residency, wave)
        residency.last_use = [abs(u) for u in residency.last_use]
        residency.step = abs(residency.step) + 1

    experts._copy = faulty  # type: ignore[method-assign, assignment]


def _forget_tables(experts: PagedExperts) -> None:
    """The device's tables stay as they were before a large pass (c4)."""
    experts.write_residency = lambda residency: None  # type: ignore[method-assign]


def _one_wave_always(experts: PagedExperts) -> None:
    """A pass of more pairs than slots takes the one-wave path (c5)."""
    experts.is_one_wave = lambda routing: True  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "fault", [_forget_scales, _evict_the_wave, _forget_tables, _one_wave_always]
)
def test_faults_are_seen(fault) -> None:  # type: ignore[no-untyped-def]
    """Each planted fault changes what is computed, or is refused."""
    table = ops("torch")
    resident = Placement(device=CPU, pin=False).place(0, weights("fp8").__getitem__, E)
    other = paged("fp8", 4)
    fault(other)
    differs = False
    for seed in range(4):
        x, how = routing(table, 6, seed)
        try:
            differs |= not torch.equal(run(other, x, how), run(resident, x, how))
        except (ValueError, RuntimeError):
            differs = True
    assert differs


def test_shared_expert_counts_once() -> None:
    """With many waves the shared expert's part is that of one pass."""
    table, other = ops("torch"), paged("plain", 2)
    x, how = routing(table, 6, 5)
    resident = Placement(device=CPU, pin=False).place(0, weights("plain").__getitem__, E)
    assert len(other.read_residency().waves(range(E), 1)) == E
    assert torch.equal(run(other, x, how)[:, TOP_K], run(resident, x, how)[:, TOP_K])
    assert dataclasses.is_dataclass(how)


def _without_mask(table: Ops) -> Ops:
    """Padding rows are computed like others (c10)."""

    def group(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        return table.group(experts.clamp(min=0), count)

    return dataclasses.replace(table, group=group)


def test_sums_within_a_wave_would_depend_on_the_waves() -> None:
    """A product that sums a row's choices wave by wave has other bits than one that sums once (c8)."""
    table = ops("torch")
    generator = torch.Generator().manual_seed(3)
    differs = []
    for seed in range(6):
        x, _ = routing(table, 6, seed)
        chosen = torch.stack([torch.randperm(E, generator=generator)[:4] for _ in range(6)])
        how = Routing(chosen.int(), torch.rand(6, 4, generator=generator), *table.group(chosen.int(), E))  # fmt: skip
        sums = []
        for slots in (E, 4):
            read = weights("plain").__getitem__
            held = Placement({0: slots}, device=CPU, pin=False).place(0, read, E)
            own = held.run(table, x, how, None, None, limit=10.0, act_group=None)
            sums.append(own.sum(1))
        assert torch.equal(sums[0], sums[1])
        by_wave = []
        for slots in (E, 4):
            read = weights("plain").__getitem__
            held = Placement({0: slots}, device=CPU, pin=False).place(0, read, E)
            assert isinstance(held, PagedExperts)
            total = torch.zeros(6, D)
            for wave, *stacks in held._waves(table, how):
                parts = table.moe(x, wave, *stacks, None, None, limit=10.0, act_group=None)
                total = total + parts.sum(1)
            by_wave.append(total)
        differs.append(not torch.equal(by_wave[0], by_wave[1]))
    assert any(differs)


def test_padding_that_is_not_masked_is_seen() -> None:
    """A grouping that takes padding for expert 0 brings it in and computes it (c10, J8)."""
    table = ops("torch")
    other = paged("fp4", 2)
    experts = torch.full((3, TOP_K), -1, dtype=torch.int32)
    faulty = _without_mask(table)
    how = Routing(experts, torch.ones(3, TOP_K), *faulty.group(experts, E))
    shared = matrix("plain", 2 * INNER, D, torch.Generator().manual_seed(2))
    down = matrix("plain", D, INNER, torch.Generator().manual_seed(3))
    x = torch.randn(3, D, generator=torch.Generator().manual_seed(4))
    parts = table.moe(x, how, other.w13, other.w2, shared, down, limit=10.0, act_group=None)
    assert (parts[:, :TOP_K] != 0).any()


@settings(deadline=None, max_examples=25)
@given(
    slots=st.integers(TOP_K, E),
    rows=st.integers(1, 5),
    chosen=st.lists(st.integers(-1, E - 1), min_size=2, max_size=4),
)
def test_capture_depends_on_shapes_alone(slots: int, rows: int, chosen: list[int]) -> None:
    """The host cuts a pass into waves by the number of its pairs, whatever they are (J7)."""
    table, other = ops("torch"), paged("plain", slots)
    cut: list[int] = []
    waves = other._waves
    other._waves = lambda *how: cut.append(1) or waves(*how)  # type: ignore[func-returns-value, method-assign]
    one_wave = rows * TOP_K <= slots
    for seed, expert in enumerate(chosen):
        # A routing of its own, and one of all rows to one expert, or of padding alone.
        x, how = routing(table, rows, seed)
        same = torch.full((rows, TOP_K), expert, dtype=torch.int32)
        for one in (how, Routing(same, torch.ones(rows, TOP_K), *table.group(same, E))):
            cut.clear()
            assert other.is_one_wave(one) is one_wave
            run(other, x, one)
            assert bool(cut) is not one_wave


def test_stores_are_made_ahead_and_are_each_layers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One store a paged layer, the next one's made while this one is filled; no more than needed."""
    made: list[int] = []

    class Counting(HostBuffer):
        def __init__(self, nbytes: int, *, pin: bool, holes: Sequence[tuple[int, int]]) -> None:
            made.append(nbytes)
            super().__init__(nbytes, pin=pin, holes=holes)

    monkeypatch.setattr("engine.model.placement.HostBuffer", Counting)
    placement = Placement({0: 2, 2: 3, 5: 4}, device=CPU, pin=False)
    sets = [weights(kind) for kind in ("fp4", "plain", "fp8", "fp8")]
    found = [
        placement.place(layer, pairs.__getitem__, E, threads=3)
        for layer, pairs in zip((0, 1, 2, 5), sets, strict=True)
    ]
    assert isinstance(found[1], ResidentExperts)
    assert len(made) == 4  # that made ahead for the second has another size
    paged_layers = [one for one in found if isinstance(one, PagedExperts)]
    assert len({one.store.data_ptr() for one in paged_layers}) == 3
    for one, pairs in zip(paged_layers, (sets[0], *sets[2:]), strict=True):
        one.check_integrity()
        for expert, pair in enumerate(pairs):
            row = torch.zeros(one.layout.nbytes, dtype=torch.uint8)
            one.layout.write(row, pair)
            assert torch.equal(one.store[expert], row)


def test_registered_memory_is_given_back_when_it_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that nobody holds is unregistered, so that the next one may lie there."""
    freed: list[int] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            freed.append(address)

    monkeypatch.setattr(hostmem, "_runtime", Runtime)
    buffer = HostBuffer(1 << 20, pin=True)
    address = buffer.tensor.data_ptr()
    assert not freed
    del buffer
    assert freed == [address]
