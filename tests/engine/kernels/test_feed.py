"""The end of a decode step: kernel against twin, twin against plain Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.kernels.feed import UNUSABLE, feed_torch, feed_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def state(count: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    found = {
        "drawn": torch.randint(0, 1000, (count,), generator=g),
        "usable": torch.rand(count, generator=g) < 0.8,
        "slots": torch.randint(0, 3, (count,), generator=g, dtype=torch.int32),
        "ids": torch.randint(0, 1000, (count,), generator=g),
        "positions": torch.randint(0, 5000, (count,), generator=g, dtype=torch.int32),
        "index": torch.randint(0, 90, (count,), generator=g, dtype=torch.int32),
        "results": torch.full((2, 70), 7777),
        "half": torch.tensor([seed % 2]),
    }
    return {name: tensor.to(DEVICE) for name, tensor in found.items()}


@pytest.mark.parametrize("feed", [feed_torch, feed_triton], ids=["torch", "triton"])
@pytest.mark.parametrize("count", [1, 3, 16, 64])
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_are_handed_on(feed: Callable[..., None], count: int, seed: int) -> None:
    """Live rows get their token and move on; padding stays; one row of the results is written."""
    before, after = state(count, seed), state(count, seed)

    feed(*after.values())

    side = seed % 2
    assert after["half"].item() == 1 - side
    assert (after["results"][1 - side] == 7777).all()
    assert (after["results"][side, count:] == 7777).all()
    for row in range(count):
        token, good = int(before["drawn"][row]), bool(before["usable"][row])
        live = int(before["slots"][row]) > 0
        assert int(after["results"][side, row]) == (token if good else UNUSABLE)
        assert int(after["ids"][row]) == (token if good and live else 0)
        assert int(after["positions"][row]) == int(before["positions"][row]) + live
        assert int(after["index"][row]) == int(before["index"][row]) + live


@pytest.mark.parametrize("feed", [feed_torch, feed_triton], ids=["torch", "triton"])
def test_two_steps_use_both_rows(feed: Callable[..., None]) -> None:
    """What one step found stays to be read while the next one writes."""
    step = state(4, 0)
    feed(*step.values())
    first = step["results"][0, :4].clone()
    step["drawn"] += 1
    feed(*step.values())

    assert torch.equal(step["results"][0, :4], first)
    assert step["half"].item() == 0
    assert not torch.equal(step["results"][1, :4], first)
