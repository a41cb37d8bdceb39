"""Buckets of decode steps, and the check that fused kernels are really used."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from engine.api import EngineError
from engine.device.compiles import CompileWatch
from engine.device.graphs import Captured, GraphCache, check_coverage
from engine.device.seals import SealError, Seals
from engine.kernels.ops import ops
from engine.options import DECODE_BUCKETS


def make(name: str, used: str | None, buckets: tuple[int, ...] = DECODE_BUCKETS) -> GraphCache:
    """A cache whose steps call one operation of a table, `used` saying whose."""

    def linear_triton(x: Tensor) -> Tensor:
        return x

    def linear_torch(x: Tensor) -> Tensor:
        return x

    op = {"triton": linear_triton, "torch": linear_torch, None: linear_torch}[used]
    table = dataclasses.replace(ops("torch"), name=name, linear=op)  # type: ignore[arg-type]
    model = SimpleNamespace(ops=table)

    def body(count: int) -> Tensor:
        x = torch.zeros(count, 3)
        return x if used is None else model.ops.linear(x)

    return GraphCache(body, model, buckets, Seals(), captures=False)


@given(st.integers(1, 64))
def test_the_smallest_bucket_that_holds_the_rows(count: int) -> None:
    """No smaller bucket would do, and none is larger than needed."""
    bucket = make("torch", None).bucket_for(count)

    assert bucket in DECODE_BUCKETS
    assert bucket >= count
    assert not any(count <= other < bucket for other in DECODE_BUCKETS)


def test_more_rows_than_any_bucket_has_are_a_fault() -> None:
    """The caller splits such steps."""
    with pytest.raises(ValueError, match="65 rows; the largest bucket has 64"):
        make("torch", None).bucket_for(65)


def test_what_each_bucket_ran_is_recorded() -> None:
    """Largest first, with time, memory and the operations that ran as fused kernels."""
    cache = make("triton", "triton", (1, 2, 8))
    cache.build()

    assert [captured.bucket for captured in cache.captured] == [8, 2, 1]
    assert all(captured.kernels == {"linear"} for captured in cache.captured)
    assert all(captured.seconds > 0 for captured in cache.captured)
    assert cache.run(2).shape == (2, 3)


@pytest.mark.parametrize("used", ["torch", None])
def test_fused_kernels_that_nothing_runs_are_an_error(used: str | None) -> None:
    """Switched on but never used is not a start."""
    with pytest.raises(EngineError, match=r"no captured batch size runs one .*captured: 2, 1\)"):
        make("triton", used, (1, 2)).build()
    make("torch", used, (1, 2)).build()


def test_no_bucket_at_all_is_an_error() -> None:
    """Zero coverage is refused however it came about."""
    with pytest.raises(EngineError, match=r"captured: none\)"):
        check_coverage([])
    check_coverage([Captured(4, 0.1, 0, frozenset({"moe"})), Captured(2, 0.1, 0, frozenset())])


def test_watching_leaves_the_table_as_it_was() -> None:
    """After the build the model calls its operations directly."""
    cache = make("triton", "triton", (1,))
    before = cache._model.ops
    cache.build()

    assert cache._model.ops is before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.clone(), r"pool\.x: torch\.float32 \[4, 2\] strides \[2, 1\] at .* now"),
        (lambda t: t[:2], r"now torch\.float32 \[2, 2\]"),
        (lambda t: t.view(2, 4), r"now torch\.float32 \[2, 4\]"),
        (lambda t: t.view(torch.int32), r"now torch\.int32"),
        (lambda t: None, r"now absent"),
    ],
)
def test_a_broken_seal_says_which_buffer_and_how(change: Any, message: str) -> None:
    """Address, shape, strides and type are sealed; content is not."""
    tensors = {"x": torch.zeros(4, 2), "y": torch.zeros(1)}
    seals = Seals()
    seals.add("pool", lambda: {name: t for name, t in tensors.items() if t is not None})
    seals.seal()
    tensors["x"].fill_(3)
    seals.check()
    tensors["x"] = change(tensors["x"])

    with pytest.raises(SealError, match=message):
        seals.check()
    with pytest.raises(ValueError, match="owner pool has its seals already"):
        seals.add("pool", dict)


def test_a_buffer_that_appears_breaks_the_seal() -> None:
    """What a graph would not know of is named too."""
    tensors: dict[str, Tensor] = {}
    seals = Seals()
    seals.add("pool", lambda: tensors)
    seals.seal()
    tensors["z"] = torch.zeros(1)

    with pytest.raises(SealError, match=r"pool\.z: new"):
        seals.check()


def test_kernels_made_ready_late_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Until it serves an engine counts its kernels; afterwards each is a warning with its name."""
    watch = CompileWatch()
    watch._saw(metadata={"name": "attend"}, cache_hit=False)
    watch._saw(metadata={"name": "moe"}, cache_hit=True)
    assert (watch.compiled, watch.loaded, watch.late) == (1, 1, [])
    watch.serving()

    with caplog.at_level(logging.WARNING, "engine.device.compiles"):
        watch._saw(metadata={"name": "select"}, cache_hit=False)

    assert watch.late == ["select"]
    assert "kernel select was made ready while serving" in caplog.text
