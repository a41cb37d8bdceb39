"""Routing: the twin against the reference model's maths, the kernels against the twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.grouping import (
    DECODE_ROWS,
    SHORT_ROWS,
    group_torch,
    group_triton,
    most_tiles,
    tile_pairs,
)
from engine.kernels.router import Routing, route_torch, route_triton
from tests.engine.kernels.passes import DEVICE, Sequence, noise, rows_of

GPU = torch.cuda.is_available()
SCALING = 1.5


def a_pass(rows: int, *, padding: bool = True):
    """Decode rows; every fourth is padding."""
    sequences = [
        Sequence(0, 0, 1) if padding and i % 4 == 3 else Sequence(i + 1, 5, 1) for i in range(rows)
    ]
    return rows_of(sequences, block_size=16, num_blocks=rows + 2)


def check_groups(r: Routing, num_experts: int) -> None:
    """Every pair lies in exactly one tile, of its expert; padding in none; the rest is unused."""
    rows, k = r.experts.shape
    flat = r.experts.flatten().tolist()
    order = r.order.tolist()
    assert sorted(order) == list(range(rows * k))
    used = int(r.num_tiles)
    assert r.tiles.shape == (most_tiles(rows, k, num_experts), 3)
    assert all(tile == [-1, 0, 0] for tile in r.tiles[used:].tolist())
    place = 0
    for expert, first, pairs in r.tiles[:used].tolist():
        assert first == place
        assert 1 <= pairs <= tile_pairs(rows)
        members = order[first : first + pairs]
        assert [flat[p] for p in members] == [expert] * pairs
        assert members == sorted(members)
        place += pairs
    assert all(flat[p] == -1 for p in order[place:])
    assert place == sum(expert >= 0 for expert in flat)
    starts = [tile[0] for tile in r.tiles[:used].tolist()]
    assert starts == sorted(starts)
    short = [t for t in r.tiles[:used].tolist() if t[2] < tile_pairs(rows)]
    assert len({t[0] for t in short}) == len(short), "an expert has two short tiles"


@pytest.mark.parametrize("rows", [1, 7, 65])
def test_twin_is_the_reference(rows: int) -> None:
    """The torch form chooses or weighs otherwise than the reference model."""
    x, gate, bias = noise(rows, 32), noise(16, 32, seed=1), noise(16, seed=2)
    r = route_torch(x, gate, bias, None, a_pass(rows), k=3, scaling=SCALING)
    scores = reference.sqrt_softplus(x @ gate.T)
    want = (scores + bias).topk(3).indices
    real = torch.arange(rows) % 4 != 3
    assert torch.equal(r.experts[real].long(), want[real])
    torch.testing.assert_close(r.weights[real], reference.route(scores, want, SCALING)[real])
    assert (r.experts[~real] == -1).all()
    assert (r.weights[~real] == 0).all()
    check_groups(r, 16)


@pytest.mark.parametrize(
    "chosen",
    [
        [[-1, -1]],
        [[3, 1]] * 20,
        [[0, 1]] * 7 + [[-1, -1]] + [[1, 0]] * 8,
        [[i % 5, 5 + i % 3] for i in range(DECODE_ROWS + 70)],
        [[i % 7, 7] for i in range(SHORT_ROWS + 3)],
        [[i * i % 7, 7] if i % 3 else [-1, -1] for i in range(8300)],
    ],
)
@pytest.mark.parametrize("group", [group_torch, group_triton])
def test_groups(group: Callable[..., tuple[Tensor, ...]], chosen: list[list[int]]) -> None:
    """Sorting pairs into tiles loses, doubles or misplaces one."""
    experts = torch.tensor(chosen, dtype=torch.int32, device=DEVICE)
    weights = torch.ones(experts.shape, device=DEVICE)
    check_groups(Routing(experts, weights, *group(experts, 8)), 8)


def test_check_of_groups_sees_faults() -> None:
    """The check above accepts a routing with a pair of another expert, or a tile too few."""
    experts = torch.tensor([[3, 1], [1, 2]], dtype=torch.int32, device=DEVICE)
    r = Routing(experts, torch.ones(2, 2), *group_torch(experts, 4))
    swapped = replace(r, order=r.order.flip(0))
    fewer = replace(r, num_tiles=r.num_tiles - 1)
    for faulty in (swapped, fewer):
        with pytest.raises(AssertionError):
            check_groups(faulty, 4)


def choice_of(kind: str, experts: int, k: int, rows: int) -> dict[str, object]:
    """Arguments of a learned layer (with or without image rows) or a hash layer."""
    if kind == "softmax":
        return {"bias": None, "table": None, "scoring": "softmax"}
    if kind == "hash":
        table = torch.rand(100, experts, generator=torch.Generator().manual_seed(3)).topk(k).indices
        return {"bias": None, "table": table.to(DEVICE, torch.int32)}
    more: dict[str, object] = {}
    if kind == "images":
        more = {"image": torch.arange(rows, device=DEVICE) % 3 == 0,
                "image_bias": noise(experts, seed=4)}  # fmt: skip
    return {"bias": noise(experts, seed=2) * 0.3, "table": None, **more}


SHAPES = [(1, 6, 256, 512), (8, 6, 256, 4096), (33, 6, 128, 5120), (64, 6, 256, 4096)]
SHAPES += [(600, 6, 256, 4096), (5, 3, 24, 96)]


@pytest.mark.parametrize("kind", ["bias", "images", "hash", "softmax"])
@pytest.mark.parametrize(
    ("rows", "k", "experts", "d"),
    SHAPES if GPU else [(1, 2, 8, 32), (6, 3, 12, 48), (19, 3, 8, 32)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_twin(
    kind: str, rows: int, k: int, experts: int, d: int, dtype: torch.dtype
) -> None:
    """The kernels choose other experts than the torch form, weigh or group them otherwise."""
    x, gate = noise(rows, d, dtype=dtype), noise(experts, d, dtype=dtype, seed=1) / d**0.5
    args = choice_of(kind, experts, k, rows)
    keywords = {"rows": a_pass(rows), "k": k, "scaling": SCALING, **args}
    want = route_torch(x, gate, **keywords)
    got = route_triton(x, gate, **keywords)
    check_groups(got, experts)
    same = (got.experts == want.experts).all(1)
    # Sums in another order may swap experts that are next to equal.
    assert (~same).sum() <= rows // 200
    torch.testing.assert_close(got.weights[same], want.weights[same], rtol=2e-5, atol=1e-6)
    again = route_triton(x, gate, **keywords)
    assert torch.equal(again.experts, got.experts)
    assert torch.equal(again.tiles, got.tiles)
    assert torch.equal(again.order, got.order)


def test_ties_go_to_the_lowest_expert() -> None:
    """Equal scores choose another expert than the lowest."""
    x = torch.ones(2, 32, device=DEVICE)
    gate = torch.ones(16, 32, device=DEVICE) / 32
    gate[3] += 1.0
    bias = torch.zeros(16, device=DEVICE)
    for route in (route_torch, route_triton):
        r = route(x, gate, bias, None, a_pass(2), k=3, scaling=1.0)
        assert r.experts.tolist() == [[3, 0, 1]] * 2


@pytest.mark.parametrize("route", [route_torch, route_triton])
def test_scores_are_stable(route) -> None:
    """Logits of any size give weights that are not finite or not in proportion."""
    logits = torch.tensor([-90.0, -60.0, -16.5, -15.5, 0.0, 30.0, 90.0, -30.0], device=DEVICE)
    x, gate = torch.eye(8, device=DEVICE)[:1] * 0 + logits, torch.eye(8, device=DEVICE)
    r = route(x, gate, torch.zeros(8, device=DEVICE), None, a_pass(1), k=8, scaling=1.0)
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    want = scores[r.experts[0].long()] / scores.sum()
    torch.testing.assert_close(r.weights[0].double(), want, rtol=1e-5, atol=0)


def test_bias_or_table() -> None:
    """A layer with a bias and a table, or neither, is routed somehow instead of refused."""
    x, gate = noise(1, 32), noise(8, 32)
    with pytest.raises(ValueError, match="got 0"):
        route_torch(x, gate, None, None, a_pass(1), k=2, scaling=1.0)
    with pytest.raises(ValueError, match="got 2"):
        route_triton(x, gate, gate, gate, a_pass(1), k=2, scaling=1.0)
