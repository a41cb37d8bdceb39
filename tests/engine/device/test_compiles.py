"""Kernels are compiled ahead by passes that run none of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.device.compiles import compiling
from engine.device.fast_runner import FastRunner
from engine.device.kvpool import KVPool
from engine.device.warm_up import warm_chunks, warm_groups
from engine.kernels.feed import UNUSABLE, feed_triton
from engine.kernels.ops import ops
from engine.model.loading import load_fast_model
from tests.engine.model import build

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Heads and windows as small as the kernels' tiles allow.
SIZES = {"head_dim": 64, "qk_rope_head_dim": 16, "index_head_dim": 32, "sliding_window": 16}
CONTEXT = 256


def feed(results: Tensor) -> None:
    """Launch a small kernel that writes results [2, 1]."""
    one = torch.ones(1, dtype=torch.int64, device=DEVICE)
    int32 = one.int()
    feed_triton(one, one.bool(), int32, one.clone(), int32, int32.clone(), results, one * 0)


def test_nothing_runs_while_kernels_are_compiled() -> None:
    """A launch within leaves memory as it was; the same launch afterwards writes it."""
    results = torch.full((2, 1), UNUSABLE - 1, device=DEVICE)

    with compiling():
        feed(results)
    assert (results == UNUSABLE - 1).all()

    feed(results)
    assert results[0, 0] == 1


def test_launches_are_back_after_a_fault() -> None:
    """What goes wrong in a pass is raised, and kernels run again."""
    results = torch.full((2, 1), UNUSABLE - 1, device=DEVICE)

    with pytest.raises(LookupError), compiling():
        raise LookupError

    feed(results)
    assert results[0, 0] == 1


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written holds NaN, and integers that are no index of anything."""

    def spoiling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **how: Any) -> Tensor:
            tensor = make(*args, **how)
            if tensor.is_floating_point() and tensor.itemsize > 1:
                return tensor.fill_(torch.nan)
            return tensor.fill_(0x7F7F7F7F) if tensor.itemsize > 1 else tensor

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, spoiling(getattr(owner, name)))


@pytest.mark.parametrize("version", ["v4", "v41"])
def test_a_pass_needs_nothing_that_kernels_write(
    version: str, tmp_path: Path, garbage: None
) -> None:
    """Decode steps and prompts run through on garbage, and touch the memory of no request."""
    path = build.write(tmp_path / "model", getattr(build, version)(**SIZES), seed=11)
    model = load_fast_model(
        path, kernels="torch", device="cpu", dtype=torch.float32, max_model_len=CONTEXT
    )
    pool = KVPool(
        model.config,
        num_blocks=17,
        block_size=16,
        num_slots=6,
        forms=model.forms,
        ring_history=True,
    )
    runner = FastRunner(
        model, pool, torch.device("cpu"), max_model_len=CONTEXT, max_num_seqs=4, buckets=(1, 4)
    )
    before = {name: tensor.clone() for name, tensor in pool.named_tensors().items()}
    model.ops, runner._feed = ops("triton"), feed_triton

    runner._compile(
        [
            partial(runner._decode, 4),
            *(
                partial(runner._warm, chunk)
                for chunk in warm_chunks(70, 120, 16, has_tail=False, has_ends=False)
                if len(chunk.token_ids) in (1, 17, 70)
            ),
            *(partial(runner._warm, *group) for group in warm_groups(4, 120, 16, has_ends=False)),
        ]
    )

    for name, tensor in pool.named_tensors().items():
        assert torch.equal(tensor[1:], before[name][1:]), name


def test_an_index_that_a_kernel_writes_is_seen(garbage: None) -> None:
    """The garbage of the test above is such that indexing by it fails."""
    with pytest.raises(IndexError), compiling():
        torch.arange(9)[torch.empty(3, dtype=torch.int32)]
