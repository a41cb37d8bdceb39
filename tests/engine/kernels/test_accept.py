"""The end of a speculative step: kernel against twin, over many sequences at once."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.accept import MOST_STOPS, NO_STOP, accept_torch, accept_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def state(count: int, size: int, seed: int) -> dict[str, torch.Tensor]:
    """Few different tokens, so that drafts agree for a while, stop and meet limits."""
    g = torch.Generator().manual_seed(seed)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(0, 2, shape, generator=g)

    positions = torch.randint(0, 5000, (count,), generator=g, dtype=torch.int32)
    control = torch.full((count, 2 + MOST_STOPS), NO_STOP)
    control[:, 0] = torch.randint(0, size + 3, (count,), generator=g)
    control[:, 1] = positions + torch.randint(-1, 2 * size + 3, (count,), generator=g)
    control[:, 2 + seed % MOST_STOPS] = torch.randint(-1, 4, (count,), generator=g)
    found = {
        "drafted": tokens(count, size),
        "drawn": tokens(count, size + 1),
        "usable": torch.rand((count, size + 1), generator=g) < 0.8,
        "control": control,
        "left": torch.randint(0, 2 * size + 3, (count,), generator=g),
        "ids": torch.randint(0, 1000, (count,), generator=g),
        "positions": positions,
        "index": torch.randint(0, 90, (count,), generator=g, dtype=torch.int32),
        "results": torch.full((70, size + 2), 7777),
    }
    return {name: tensor.to(DEVICE) for name, tensor in found.items()}


@pytest.mark.parametrize("size", [1, 2, 5, 7])
@pytest.mark.parametrize("count", [1, 3, 16, 40])
def test_the_kernel_is_its_twin(count: int, size: int) -> None:
    """Counts, results and what the next step begins with are the same; nothing else is touched."""
    lengths = set()
    for seed in range(3):
        twin, kernel = state(count, size, seed), state(count, size, seed)
        wanted, found = accept_torch(**twin), accept_triton(**kernel)
        lengths |= set(wanted.tolist())
        assert torch.equal(wanted, found)
        for name, tensor in twin.items():
            assert torch.equal(tensor, kernel[name]), name
        assert (kernel["results"][count:] == 7777).all()
    if count == 40:
        assert len(lengths) > min(size, 3)
