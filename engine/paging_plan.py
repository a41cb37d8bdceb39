"""How many slots each layer's experts get on one machine: what `bathyal engine plan --paged` answers.

The GPU is split between what every token needs (weights that are not routed experts, KV for the
context and concurrency asked for, buffers of decode steps), a reserve, and slots; what is left for
slots goes to the layers where the recorded routing misses most (engine.plan.paging), or in equal parts
to all where none was recorded. Experts that the recorded routing asks for most often stay in slots, if
that costs no hit or the host has no room for them. Where all experts fit beside what their engine
takes, nothing is paged. Loads no torch; told by engine.paging_report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.api import EngineError
from engine.architectures import AnyConfig
from engine.expert_paging import (
    GB,
    Experts,
    Paging,
    Problem,
    buffer_experts,
    experts_of,
    host_gb_problem,
)
from engine.memory import plan_memory
from engine.memory_items import ROUTED
from engine.options import EngineConfig
from engine.plan.paging import LayerHits, SlotPlan, even, solve

#: Bytes of an element on the GPU.
ITEMSIZE = 2


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user wants of one machine.

    Args:
        gpu_bytes: of the GPU.
        host_bytes: for experts on the host.
        context: tokens of a request.
        concurrency: requests at full context at once.
    """

    gpu_bytes: int
    host_bytes: int
    context: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Split:
    """Who gets what of the GPU, in bytes.

    Args:
        weights: all but routed experts.
        kv: of the requests.
        steps: buffers of decode steps, and what a pass over prompts takes.
        stream: buffers that experts of long prompts pass through; none where all are on the GPU or
            the host reads them from files.
        reserve: for activations, the allocator and kernels.
        experts: what is left; below 0 where nothing is.
        is_paged: whether this is the GPU of paged experts.
    """

    weights: int
    kv: int
    steps: int
    stream: int
    reserve: int
    experts: int
    is_paged: bool


def split(config: AnyConfig, wish: Wish, *, paged: bool = True, stream: bool = True) -> Split:
    """Split the GPU by a wish.

    Args:
        config: of the model.
        wish: of the user.
        paged: whether experts are; short passes over prompts are captured where they are not.
        stream: whether those of long prompts pass through buffers, where they are.

    Raises:
        EngineError: the context exceeds the model's.
    """
    experts = experts_of(config, ITEMSIZE)
    options = EngineConfig(
        max_model_len=wish.context,
        max_num_seqs=wish.concurrency,
        max_batched_tokens=max(8192, wish.concurrency + 1),
        num_blocks=blocks_of(wish),
        expert_slots=experts.per_row if paged else None,
    )
    plan = plan_memory(config, options, itemsize=ITEMSIZE, budget=wish.gpu_bytes, packed=True)
    sums = {
        owner: sum(item.nbytes for item in plan.items if item.owner == owner)
        for owner in ("weights", "slots", "blocks", "steps", "prompts")
    }
    weights = sums["weights"] - sum(item.nbytes for item in plan.items if item.what == ROUTED)
    kv, steps = sums["slots"] + sums["blocks"], sums["steps"] + sums["prompts"]
    buffers = 0
    if paged and stream:
        buffers = 2 * buffer_experts(experts.count, experts.nbytes) * experts.nbytes
    left = wish.gpu_bytes - weights - kv - steps - buffers - plan.reserve
    return Split(weights, kv, steps, buffers, plan.reserve, left, paged)


def blocks_of(wish: Wish) -> int:
    """Blocks for all requests at full context at once."""
    return wish.concurrency * -(-wish.context // EngineConfig().block_size)


@dataclass(frozen=True, slots=True)
class Answer:
    """Slots for one wish.

    Args:
        wish: whose.
        split: of the GPU.
        plan: slots by layer; None where they do not fit, or the engine refuses them.
        paging: what the engine makes of it; None without a plan.
        why: what does not fit; "" where all does.
        problem: what the engine refuses of the host's share; None where it takes the plan.
    """

    wish: Wish
    split: Split
    plan: SlotPlan | None
    paging: Paging | None = None
    why: str = ""
    problem: Problem | None = None


def answer(config: AnyConfig, learnt: Sequence[LayerHits] | None, wish: Wish) -> Answer:
    """Solve for one wish; where the host has too little room, with files as the third tier.

    Args:
        config: of the model.
        learnt: from a trace, of each layer; None where there is none.
        wish: of the user.
    """
    experts = experts_of(config, ITEMSIZE)
    host = wish.host_bytes // experts.nbytes
    found = split(config, wish, paged=False)
    if found.experts >= experts.layers * experts.count * experts.nbytes:
        plan = _solve(experts, learnt, found, host, wish.concurrency)
        return Answer(wish, found, plan, _paging(plan, experts, None))
    found = split(config, wish)
    why = ""
    # Pinned experts leave room for captured steps of all requests; less only where nothing fits else.
    for rows in (wish.concurrency, 1):
        try:
            plan = _solve(experts, learnt, found, host, rows)
        except EngineError as error:
            why = why or str(error)
        else:
            return Answer(wish, found, plan, _paging(plan, experts, None))
    return _from_files(config, learnt, wish, why)


def _from_files(
    config: AnyConfig, learnt: Sequence[LayerHits] | None, wish: Wish, why: str
) -> Answer:
    """Solve for a wish whose experts the host has no room for, as `why` says."""
    experts = experts_of(config, ITEMSIZE)
    total = experts.layers * experts.count
    host_gb = wish.host_bytes // GB  # the engine takes whole ones
    rows = host_gb * GB // (experts.layers * experts.nbytes)
    # The host must have room for as many experts of a layer as there are slots: if need be, fewer.
    for most in (None, max(experts.per_row, rows)):
        # Mostly no layer's experts pass through buffers: those that are read from files do not.
        for stream in (False, True):
            found = split(config, wish, stream=stream)
            try:
                plan = _solve(experts, learnt, found, total, wish.concurrency, most)
            except EngineError:
                return Answer(wish, found, None, why=f"{why}; {_taken(found, wish)}")
            paging = _paging(plan, experts, host_gb)
            if stream or not paging.uses_stream:
                break
        problem = host_gb_problem(paging, host_gb, None)
        if problem is None:
            return Answer(wish, found, plan, paging, why)
    return Answer(wish, found, None, why=why, problem=problem)


def _solve(
    experts: Experts,
    learnt: Sequence[LayerHits] | None,
    found: Split,
    host_experts: int,
    rows: int,
    most: int | None = None,
) -> SlotPlan:
    """Give each layer its slots.

    Args:
        experts: of the model.
        learnt: as in answer.
        found: what there is room for on the GPU.
        host_experts: experts that the host has room for.
        rows: requests of the steps that pinned experts leave room for.
        most: slots of a layer that is not whole; None for no limit.

    Raises:
        EngineError: they do not fit together; says what is missing.
    """
    total = experts.layers * experts.count
    room = max(0, found.experts) // experts.nbytes
    if found.is_paged:  # captured prompts, which this split leaves out, come with all of them
        room = min(room, total - 1)
    sizes: dict[str, Any] = {
        "num_experts": experts.count,
        "per_row": experts.per_row,
        "gpu_experts": room,
        "host_experts": host_experts,
        "most_slots": most,
    }
    if learnt is None:
        return even(experts.layers, **sizes)
    return solve(learnt, **sizes, beside_pins=rows * experts.per_row)


def _paging(plan: SlotPlan, experts: Experts, host_gb: int | None) -> Paging:
    """What the engine makes of a plan, with `expert_host_gb` beside it."""
    slots = {layer: k for layer, k in enumerate(plan.slots) if k < experts.count}
    pins = {layer: some for layer, some in enumerate(plan.pins) if some and layer in slots}
    return Paging(slots, experts, None if host_gb is None else host_gb * GB, pins)


def _taken(found: Split, wish: Wish) -> str:
    """Say who else has the GPU, for a refusal."""
    owners = ("weights", "kv", "steps", "stream", "reserve")
    each = ", ".join(f"{owner} {getattr(found, owner):,}" for owner in owners)
    return f"of the GPU's {wish.gpu_bytes:,} bytes others take: {each}"
