"""How much of a prompt runs between decode steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from engine.device.slices import SHARE, SlicePolicy, Stopwatch


def test_before_anything_is_known_one_layer_runs() -> None:
    """The first slice is the smallest there is."""
    policy = SlicePolicy()
    assert policy.layers(8192) == 1
    policy.saw_step(0.01)
    assert policy.layers(8192) == 1


@given(st.floats(1e-4, 1e-2), st.floats(1e-8, 1e-4), st.integers(1, 8192), st.integers(1, 8))
def test_streams_keep_their_pace(step: float, row: float, rows: int, seen: int) -> None:
    """By the model a slice takes at most its share of a step, or is a single layer."""
    policy = SlicePolicy()
    policy.saw_step(step)
    policy.saw_slice(rows, seen, row * rows * seen)
    policy.saw_pass(rows)

    layers = policy.layers(rows)

    assert layers == 1 or layers * row * rows <= SHARE * step * (1 + 1e-9)
    assert (layers + 1) * row * rows > SHARE * step * (1 - 1e-9)


def test_the_first_pass_of_a_size_runs_in_single_layers() -> None:
    """What many rows took says nothing of few, and a pass's first layers nothing of its last."""
    policy = SlicePolicy()
    policy.saw_step(0.003)
    policy.saw_slice(1024, 1, 0.0033)
    policy.saw_pass(1024)

    assert policy.layers(256) == 1
    policy.saw_slice(256, 1, 0.0011)
    assert policy.layers(300) == 1, "longer layers may follow"
    policy.saw_pass(256)
    assert policy.layers(200) == 1, "of another size"
    assert policy.layers(300) == 4
    assert policy.layers(1024) == 1


def test_the_longer_layers_count() -> None:
    """After a long layer short ones make slices longer only bit by bit."""
    policy = SlicePolicy()
    policy.saw_step(0.010)
    policy.saw_pass(100)
    policy.saw_slice(100, 1, 0.001)
    policy.saw_slice(100, 1, 0.005)
    assert policy.layers(100) == 3
    policy.saw_slice(100, 1, 0.001)
    assert policy.layers(100) == 3


def test_it_follows_the_device() -> None:
    """When steps get faster, slices get shorter, after a few measurements."""
    policy = SlicePolicy()
    policy.saw_pass(100)
    policy.saw_pass(1000)
    for _ in range(3):
        policy.saw_step(0.010)
        policy.saw_slice(100, 1, 0.001)
    assert policy.layers(100) == 15
    for _ in range(20):
        policy.saw_step(0.002)

    assert policy.layers(100) in (3, 4)
    assert policy.layers(1000) == 1


def test_a_stopwatch_tells_when_asked() -> None:
    """Work is done at once, its time told at the next collection, in order."""
    watch, told = Stopwatch(torch.device("cpu")), list[tuple[str, float]]()
    for name in "ab":
        found = watch.time(lambda: sum(range(1000)), lambda s, name=name: told.append((name, s)))  # type: ignore[misc]
        assert found == 499_500
    assert told == []

    watch.collect()
    watch.collect()

    assert [name for name, _ in told] == ["a", "b"]
    assert all(seconds > 0 for _, seconds in told)


@pytest.mark.gpu
def test_a_stopwatch_on_the_gpu_does_not_wait() -> None:
    """The time of launched work is told once the device has done it."""
    watch, told = Stopwatch(torch.device("cuda")), list[float]()
    x = torch.randn(2048, 2048, device="cuda")
    watch.time(lambda: [x @ x for _ in range(50)], told.append)
    torch.cuda.synchronize()
    watch.collect()

    assert len(told) == 1
    assert 1e-5 < told[0] < 5
