"""How passes of prompts that run in buckets are compared with the same passes without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.api import PrefillMode
from engine.device.kvpool import KVPool
from engine.model.fast import FastModel
from engine.plan.step import Chunk
from tests.engine.model import drive

BLOCKS = 8  # of a request
REQUESTS = 4


def pool_of(model: FastModel) -> KVPool:
    """What nobody has written is NaN."""
    pool = KVPool(
        model.config, num_blocks=1 + REQUESTS * BLOCKS, block_size=drive.BLOCK,
        num_slots=REQUESTS + 2, ring_history=True, forms=model.forms,
        drafting="off" if model.drafter is None else "dspark",
    )  # fmt: skip
    pool.poison(slots=range(1, REQUESTS + 2), blocks=range(1, pool.num_blocks))
    return pool


def chunk(number: int, length: int, mode: PrefillMode = "off", start: int = 0) -> Chunk:
    """The prompt of one of the requests, from a position on."""
    blocks = tuple(range(1 + number * BLOCKS, 1 + (number + 1) * BLOCKS))
    ids = tuple(drive.tokens(length, number))
    return Chunk(
        str(number), number + 1, start, ids[start:], blocks, wants_logits=True, arrival=number,
        prefill=mode, anchor=0 if mode == "off" else length - 1,
    )  # fmt: skip


def padding(length: int, mode: PrefillMode = "off") -> Chunk:
    """A prompt that lies where nobody's does, to warm up with."""
    return chunk(0, length, mode)._replace(slot=0, block_ids=(0,) * BLOCKS)


def turns(lengths: list[int], modes: list[PrefillMode], again: list[int]) -> Iterator[list[Chunk]]:
    """Two passes: prompts, then further tokens of those that have some, as a turn would bring."""
    yield [chunk(i, n, mode) for i, (n, mode) in enumerate(zip(lengths, modes, strict=True))]
    longer = [(at, lengths[at], more) for at, more in enumerate(again) if more]
    if longer:
        yield [chunk(at, n + more, modes[at], start=n) for at, n, more in longer]


def routed(model: FastModel, run: Callable[[], Tensor]) -> tuple[Tensor, list[Counter[int]]]:
    """Logits of a pass, and how many of its rows each layer sends to which expert."""
    seen: list[Counter[int]] = []
    plain = model.ops

    def spy(*args: Any, **kwargs: Any) -> Any:
        routing = plain.route(*args, **kwargs)
        seen.append(Counter(routing.experts[routing.experts >= 0].tolist()))
        return routing

    model.ops = replace(plain, route=spy)
    try:
        return run(), seen
    finally:
        model.ops = plain


def faults_of(
    model: FastModel,
    pools: tuple[KVPool, KVPool],
    without: Callable[[], Tensor],
    within: Callable[[], Tensor],
) -> list[str]:
    """What a bucket changes in a pass beside the order of sums.

    Args:
        model: whose experts are watched.
        pools: of the pass without a bucket, and within one.
        without: runs it.
        within: likewise.
    """
    found = []
    want, sent = routed(model, without)
    got, got_sent = routed(model, within)
    if not (got - want).abs().max() < 1e-4:
        found.append("logits differ")
    if sent != got_sent:
        found.append("rows that pad reach experts")
    for name, tensor in pools[1].named_tensors().items():
        left = pools[0].named_tensors()[name]
        if name == "history":
            same = torch.equal(tensor[1:], left[1:])
        else:
            same = torch.allclose(tensor[1:], left[1:], atol=1e-4, rtol=0, equal_nan=True)
        if not same:
            found.append(f"{name} differs")
        if not tensor[0].isfinite().all():
            found.append(f"the dummy of {name} is not finite")
    return found
