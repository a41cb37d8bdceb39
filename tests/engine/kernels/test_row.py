"""Kernels of one row, and of the way from a sublayer to the experts, against their twins."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from engine.device.rows import build_rows
from engine.kernels.formats import Matrix
from engine.kernels.gqa import add_norm_torch
from engine.kernels.grouping import group_torch
from engine.kernels.linear import linear_torch
from engine.kernels.moe import moe_torch
from engine.kernels.norm_route import norm_route_torch, norm_route_triton
from engine.kernels.router import Routing
from engine.kernels.row import (
    FEW_ROWS,
    Missing,
    experts_row,
    experts_rows,
    linear_row,
    norm_linear_row,
    takes_row,
)
from engine.kernels.rows import Rows
from engine.plan.step import Chunk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E, K = 12, 3
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def decode_rows(slots: list[int]) -> Rows:
    """One row for each slot; slot 0 is padding."""
    chunks = [Chunk(str(i), slot, 5 + i, (7,), (slot,), True) for i, slot in enumerate(slots)]
    rows, _ = build_rows(chunks, block_size=16, device=DEVICE)
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(40, 64), (9, 96), (130, 512)])
def test_a_row_times_a_matrix_equals_its_twin(dtype: torch.dtype, n: int, k: int) -> None:
    """Any number of rows and columns of the weight, also none that divides a program's share."""
    torch.manual_seed(0)
    x, w = rand(1, k, dtype=dtype), Matrix("plain", rand(n, k, dtype=dtype) * k**-0.5)
    found, wanted = linear_row(x, w), linear_torch(x, w)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    wide = linear_row(x, w, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert takes_row(x, w)
    assert not takes_row(rand(2, k, dtype=dtype), w)
    assert takes_row(rand(FEW_ROWS, k, dtype=dtype), w, most=FEW_ROWS)
    assert not takes_row(rand(FEW_ROWS + 1, k, dtype=dtype), w, most=FEW_ROWS)
    fault = Matrix("plain", torch.cat([w.data[1:], w.data[:1]]))
    assert (linear_row(x, fault) - wanted).abs().max() > 0.05  # rows in another's place are seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_part", [True, False])
def test_norm_and_product_of_a_row_equal_their_twins(dtype: torch.dtype, has_part: bool) -> None:
    """Residual and product; without a summand the residual is the one that was given."""
    torch.manual_seed(0)
    h, norm = rand(1, 96, dtype=dtype), rand(96)
    parts = rand(1, 1, 96) if has_part else None
    w = Matrix("plain", rand(70, 96, dtype=dtype) * 0.1)
    kept, x = add_norm_torch(h, parts, norm, 1e-6)
    found = norm_linear_row(h, parts, norm, 1e-6, w)
    for one, other in zip(found, (kept, linear_torch(x, w)), strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    unnormed = linear_torch(kept, w)
    assert (found[1] - unnormed).abs().max() > 0.05  # a norm that is left out is seen


def expert_weights(dtype: torch.dtype, d: int, inner: int) -> tuple[Matrix, Matrix]:
    """Stacks that lie apart, as in slots."""
    wide = rand(E, 2 * inner * d + d * inner + 64, dtype=dtype) * d**-0.5
    first = wide[:, : 2 * inner * d].unflatten(1, (2 * inner, d))  # type: ignore[no-untyped-call]
    second = wide[:, 2 * inner * d : 3 * inner * d].unflatten(1, (d, inner))  # type: ignore[no-untyped-call]
    return Matrix("plain", first), Matrix("plain", second)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "chosen",
    [
        [[5, 0, 11]],
        [[-1, 3, -1]],
        [[-1, -1, -1]],
    ],
    ids=str,
)
@pytest.mark.parametrize(("d", "inner"), [(64, 48), (96, 32)])
def test_experts_of_a_row_equal_their_twin(
    dtype: torch.dtype, chosen: list[list[int]], d: int, inner: int
) -> None:
    """Parts of each choice; 0 for pairs that reach no expert and where a shared one would be."""
    torch.manual_seed(1)
    x = rand(len(chosen), d, dtype=dtype)
    w13, w2 = expert_weights(dtype, d, inner)
    experts = torch.tensor(chosen, dtype=torch.int32, device=DEVICE)
    shares = rand(len(chosen), K).abs() * (experts >= 0)
    routing = Routing(experts, shares, *group_torch(experts, E))
    parts = moe_torch(x, routing, w13, w2, None, None, limit=1.0, act_group=None)
    wanted = parts.sum(1, keepdim=True)
    found = experts_row(x, routing, w13, w2, limit=1.0)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if min(chosen[0]) >= 0:
        fault = dataclasses.replace(routing, order=routing.order.roll(1))
        wrong = experts_row(x, fault, w13, w2, limit=1.0)
        assert (wrong - wanted).abs().max() > 1e-3  # pairs in another's place are seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("chosen", "d", "inner"),
    [
        ([[5, 0, 11], [2, 5, 7]], 64, 48),
        ([[1, 2, 3], [3, 1, 4], [-1, -1, -1], [1, 3, 2]], 40, 48),
        ([[-1, -1, -1], [8, 6, 4]], 24, 300),
        ([[0, 1, 2], [0, 1, 2], [0, 1, 2]], 24, 38),
        ([[-1, 4, -1], [4, -1, 9]], 96, 16),
        ([[-1, -1, -1], [-1, -1, -1]], 64, 16),
    ],
    ids=str,
)
def test_experts_of_few_rows_equal_their_twin(
    dtype: torch.dtype, chosen: list[list[int]], d: int, inner: int
) -> None:
    """Parts of each choice, whether rows share experts or not; 0 for pairs that reach no expert."""
    torch.manual_seed(3)
    x = rand(len(chosen), d, dtype=dtype)
    w13, w2 = expert_weights(dtype, d, inner)
    experts = torch.tensor(chosen, dtype=torch.int32, device=DEVICE)
    shares = rand(len(chosen), K).abs() * (experts >= 0)
    routing = Routing(experts, shares, *group_torch(experts, E))
    wanted = moe_torch(x, routing, w13, w2, None, None, limit=1.0, act_group=None)[:, :K]
    found = experts_rows(x, routing, w13, w2, limit=1.0)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not found[experts < 0].any()
    if (experts >= 0).any():  # another row, or its weights, are seen
        other = experts_rows(x.roll(1, 0), routing, w13, w2, limit=1.0)
        assert (other - wanted).abs().max() > 1e-2
        fault = dataclasses.replace(routing, weights=shares.roll(1, 0))
        other = experts_rows(x, fault, w13, w2, limit=1.0)
        assert (other - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_of_a_row_depends_on_the_others(dtype: torch.dtype) -> None:
    """Parts are the same whatever the other rows are and whichever experts they share."""
    torch.manual_seed(4)
    x, (w13, w2) = rand(4, 64, dtype=dtype), expert_weights(dtype, 64, 48)
    shares = rand(4, K).abs()
    found = []
    for others in ([[5, 2, 8], [2, 1, 9], [-1, -1, -1]], [[0, 1, 3], [4, 6, 7], [9, 10, 11]]):
        experts = torch.tensor([[8, 2, 5], *others], dtype=torch.int32, device=DEVICE)
        routing = Routing(experts, shares * (experts >= 0), *group_torch(experts, E))
        found.append(experts_rows(x, routing, w13, w2, limit=1.0)[0])
        x = torch.cat([x[:1], rand(3, 64, dtype=dtype)])
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("absent", [[], [0], [2, 1], [0, 1, 2]], ids=str)
def test_missing_experts_are_read_from_the_host_and_left_in_their_slots(
    dtype: torch.dtype, absent: list[int]
) -> None:
    """The bits are those of slots that were full before, and slots hold the store's bytes afterwards."""
    torch.manual_seed(2)
    d, inner, experts, slots = 96, 40, [3, 5, 8], [2, 0, 1]
    x, size = rand(1, d, dtype=dtype), 3 * inner * d
    store = torch.randn(E, size).to(dtype) * d**-0.5
    store = store.pin_memory() if DEVICE == "cuda" else store
    table = torch.full((4, size), float("nan"), dtype=dtype, device=DEVICE)

    def stacks(of: Tensor) -> tuple[Matrix, Matrix]:
        first, second = of[:, : 2 * inner * d], of[:, 2 * inner * d :]
        return (
            Matrix("plain", first.unflatten(1, (2 * inner, d))),  # type: ignore[no-untyped-call]
            Matrix("plain", second.unflatten(1, (d, inner))),  # type: ignore[no-untyped-call]
        )

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    for place, (expert, slot) in enumerate(zip(experts, slots, strict=True)):
        if place not in absent:
            table[slot] = store[expert].to(DEVICE)
    tiles = torch.stack([numbers(slots), numbers([0, 1, 2]), numbers([1, 1, 1])], 1).contiguous()
    routing = Routing(
        numbers(experts)[None], rand(1, K).abs(), numbers([0, 1, 2]), tiles, numbers([3])
    )
    full = table.clone()
    full[slots] = store[experts].to(DEVICE)
    nobody = Missing(*stacks(store), numbers([-1] * 3))
    wanted = experts_row(x, routing, *stacks(full), limit=1.0, missing=nobody)
    resident = experts_row(x, routing, *stacks(full), limit=1.0)
    torch.testing.assert_close(wanted, resident, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    origins = numbers([e if place in absent else -1 for place, e in enumerate(experts)])
    missing = dataclasses.replace(nobody, origins=origins)
    found = experts_row(x, routing, *stacks(table), limit=1.0, missing=missing)
    assert torch.equal(found, wanted)
    assert torch.equal(table.nan_to_num(), full.nan_to_num())
    if absent:  # an expert that nobody brings is seen
        table[slots[absent[0]]] = float("nan")
        assert experts_row(x, routing, *stacks(table), limit=1.0, missing=nobody).isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "slots",
    [
        [1],
        [0],
        [3, 1],
        [0, 4],
        [2, 6, 1],
        [0, 3, 0, 2],
        [0] * 4,
        [2, 0, 5, 7, 1],
        list(range(1, 9)),
        [*range(12)],
        [4] * 40,
        [2] * 65,
    ],
)
@pytest.mark.parametrize("parts", [1, 4])
def test_norm_and_routing_equal_their_twin(
    dtype: torch.dtype, slots: list[int], parts: int
) -> None:
    """Residual, norm, choices and tiles of up to eight rows and of more; padding reaches none."""
    torch.manual_seed(len(slots))
    count, d = len(slots), 48
    h, summands = rand(count, d, dtype=dtype), rand(count, parts, d)
    norm, gate = rand(d), rand(E, d, dtype=dtype)
    rows = decode_rows(slots)
    wanted = norm_route_torch(h, summands, norm, 1e-6, gate, rows, k=K)
    found = norm_route_triton(h, summands, norm, 1e-6, gate, rows, k=K)
    for one, other in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    mine, twin = found[2], wanted[2]
    assert torch.equal(mine.experts, twin.experts)
    torch.testing.assert_close(
        mine.weights, twin.weights, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert torch.equal(mine.num_tiles, twin.num_tiles)
    assert torch.equal(mine.tiles, twin.tiles)
    real = int((twin.experts >= 0).sum())
    assert torch.equal(mine.order[:real], twin.order[:real])


def test_one_kernel_can_follow_another() -> None:
    """Whatever the number of rows before, counters are at zero again; another router is seen."""
    torch.manual_seed(0)
    norm, gate = rand(48), rand(E, 48)
    for slots in ([1, 2, 3, 4], [5, 6], [1], [3, 2, 1], [1, 2, 3, 4]):
        h, parts, rows = rand(len(slots), 48), rand(len(slots), 2, 48), decode_rows(slots)
        wanted = norm_route_torch(h, parts, norm, 1e-6, gate, rows, k=K)[2]
        for _ in range(2):
            found = norm_route_triton(h, parts, norm, 1e-6, gate, rows, k=K)[2]
            assert torch.equal(found.tiles, wanted.tiles)
            assert torch.equal(found.order, wanted.order)
        other = norm_route_triton(h, parts, norm, 1e-6, gate.roll(1, 0), rows, k=K)[2]
        assert not torch.equal(other.experts, wanted.experts)


def test_equal_logits_take_the_lowest_experts() -> None:
    """Ties fall as in the twin."""
    torch.manual_seed(0)
    gate = rand(3, 32).repeat(4, 1)  # experts 0, 3, 6, 9 alike
    h, parts, norm = rand(1, 32), rand(1, 1, 32), rand(32)
    rows = decode_rows([1])
    *_, routing = norm_route_triton(h, parts, norm, 1e-6, gate, rows, k=K)
    first = routing.experts[0].tolist()
    assert first == [first[0], first[0] + 3, first[0] + 6]
    assert first[0] < 3


def far(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference, in that of what is wanted."""
    difference = (found.float() - wanted.float()).square().mean().sqrt()
    return float(difference / wanted.float().square().mean().sqrt())


@pytest.mark.gpu
def test_real_widths() -> None:
    """A step's kernels of one row at Qwen3-30B's widths, bfloat16, against their twins."""
    torch.manual_seed(0)
    dtype, d, inner, heads = torch.bfloat16, 2048, 768, 4096
    h, norm = rand(1, d, dtype=dtype), rand(d).abs().to(dtype)
    qkv = Matrix("plain", rand(5120, d, dtype=dtype) * d**-0.5)
    out = Matrix("plain", rand(d, heads, dtype=dtype) * heads**-0.5)
    part = rand(1, 1, d)
    kept, x = add_norm_torch(h, part, norm.float(), 1e-6)
    found = norm_linear_row(h, part, norm, 1e-6, qkv)
    assert far(found[0], kept) < 1e-3
    assert far(found[1], linear_torch(x, qkv)) < 5e-3
    o = rand(1, heads, dtype=dtype)
    assert far(linear_row(o, out), linear_torch(o, out)) < 5e-3
    gate = rand(128, d, dtype=dtype) * d**-0.5
    for count in (1, 3, 4, 8, 16, 64):
        rows, many = decode_rows(list(range(1, count + 1))), rand(count, d, dtype=dtype)
        parts = rand(count, 3, d)
        wanted = norm_route_torch(many, parts, norm.float(), 1e-6, gate, rows, k=8)
        got = norm_route_triton(many, parts, norm, 1e-6, gate, rows, k=8)
        assert far(got[1], wanted[1]) < 5e-3
        same = (got[2].experts == wanted[2].experts).float().mean()
        assert same > 0.97  # ties within rounding fall either way
        grouped = group_torch(got[2].experts, 128)
        assert torch.equal(got[2].tiles, grouped[1])
        assert torch.equal(got[2].order, grouped[0])
    w13 = Matrix("plain", rand(12, 2 * inner, d, dtype=dtype) * d**-0.5)
    w2 = Matrix("plain", rand(12, d, inner, dtype=dtype) * inner**-0.5)
    experts = torch.tensor([[3, 0, 11, 7, 5, 1, 9, 2]], dtype=torch.int32, device=DEVICE)
    weights = torch.rand(1, 8, device=DEVICE)
    routing = Routing(experts, weights, *group_torch(experts, 12))
    parts = moe_torch(x, routing, w13, w2, None, None, limit=float("inf"), act_group=None)
    added = experts_row(x, routing, w13, w2, limit=float("inf"))
    assert far(added, parts.sum(1, keepdim=True)) < 5e-3
    few = rand(4, d, dtype=dtype)
    experts = torch.stack([torch.randperm(12, device=DEVICE)[:8] for _ in few]).to(torch.int32)
    routing = Routing(experts, torch.rand(4, 8, device=DEVICE), *group_torch(experts, 12))
    parts = moe_torch(few, routing, w13, w2, None, None, limit=float("inf"), act_group=None)
    assert far(experts_rows(few, routing, w13, w2, limit=float("inf")), parts[:, :8]) < 5e-3
