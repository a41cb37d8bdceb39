"""`bathyal engine plan --paged`: how many slots each layer's experts get, and what that costs.

The GPU is split between what every token needs (weights that are not routed experts, KV for the
context and concurrency asked for, buffers of decode steps), a reserve, and slots; what is left for
slots goes to the layers where the recorded routing misses most (engine.plan.paging), or in equal parts
to all where none was recorded. Experts that the recorded routing asks for most often stay in slots, if
that costs no hit or the host has no room for them. The table says what more or less context or concurrency would cost, in
slots and in misses. Loads no torch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.api import EngineError
from engine.architectures import AnyConfig
from engine.expert_paging import (
    GB,
    Experts,
    LayerSlots,
    Paging,
    buffer_experts,
    experts_of,
    host_gb_problem,
    write_slots,
)
from engine.memory import plan_memory
from engine.memory_items import ROUTED
from engine.options import EngineConfig
from engine.plan.paging import LayerHits, SlotPlan, even, learn, solve
from engine.routing_trace import RoutingTrace

#: Bytes per second at which kernels read pinned memory over PCIe 5 x16, measured on an H200.
BUS = 51e9
#: Bytes of an element on the GPU.
ITEMSIZE = 2
#: Multiples of the context and of the concurrency asked for that the table shows.
FACTORS = ((0.5, 1.0), (1.0, 0.5), (1.0, 1.0), (1.0, 2.0), (2.0, 1.0))


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
        stream: buffers that experts of long prompts pass through.
        reserve: for activations, the allocator and kernels.
        experts: what is left; below 0 where nothing is.
    """

    weights: int
    kv: int
    steps: int
    stream: int
    reserve: int
    experts: int


def split(config: AnyConfig, wish: Wish) -> Split:
    """Split the GPU by a wish.

    Raises:
        EngineError: the context exceeds the model's.
    """
    options = EngineConfig(
        max_model_len=wish.context,
        max_num_seqs=wish.concurrency,
        max_batched_tokens=max(8192, wish.concurrency + 1),
        num_blocks=wish.concurrency * -(-wish.context // EngineConfig().block_size),
    )
    plan = plan_memory(config, options, itemsize=ITEMSIZE, budget=wish.gpu_bytes, packed=True)
    sums = {
        owner: sum(item.nbytes for item in plan.items if item.owner == owner)
        for owner in ("weights", "slots", "blocks", "steps", "prompts")
    }
    weights = sums["weights"] - sum(item.nbytes for item in plan.items if item.what == ROUTED)
    kv, steps = sums["slots"] + sums["blocks"], sums["steps"] + sums["prompts"]
    experts = experts_of(config, ITEMSIZE)
    stream = 2 * buffer_experts(experts.count, experts.nbytes) * experts.nbytes
    left = wish.gpu_bytes - weights - kv - steps - stream - plan.reserve
    return Split(weights, kv, steps, stream, plan.reserve, left)


@dataclass(frozen=True, slots=True)
class Answer:
    """Slots for one wish.

    Args:
        wish: whose.
        split: of the GPU.
        plan: slots by layer; None where they do not fit.
        why: what does not fit; "" where all does.
        disk_bytes: experts that are in files alone.
    """

    wish: Wish
    split: Split
    plan: SlotPlan | None
    why: str = ""
    disk_bytes: int = 0


def answer(config: AnyConfig, learnt: Sequence[LayerHits] | None, wish: Wish) -> Answer:
    """Solve for one wish; where the host has too little room, with files as the third tier.

    Args:
        config: of the model.
        learnt: from a trace, of each layer; None where there is none.
        wish: of the user.
    """
    experts = experts_of(config, ITEMSIZE)
    found = split(config, wish)
    gpu = max(0, found.experts) // experts.nbytes
    host = wish.host_bytes // experts.nbytes

    def slots(host_experts: int, rows: int) -> SlotPlan:
        sizes = {
            "num_experts": experts.count,
            "per_row": experts.per_row,
            "gpu_experts": gpu,
            "host_experts": host_experts,
        }
        if learnt is None:
            return even(experts.layers, **sizes)
        return solve(learnt, **sizes, beside_pins=rows * experts.per_row)

    why = ""
    # Pinned experts leave room for captured steps of all requests; less only where nothing fits else.
    for rows in (wish.concurrency, 1):
        try:
            return Answer(wish, found, slots(host, rows))
        except EngineError as error:
            why = why or str(error)
    try:
        plan = slots(experts.layers * experts.count, wish.concurrency)
    except EngineError:
        return Answer(wish, found, None, why)
    missing = (plan.host_experts - host) * experts.nbytes
    return Answer(wish, found, plan, why, missing)


def check_trace(trace: RoutingTrace, experts: Experts) -> None:
    """Refuse a trace of another model, or of too little.

    Raises:
        EngineError: it is; says what was expected.
    """
    for what, wanted, got in (
        ("experts", experts.count, trace.num_experts),
        ("experts a token is routed to", experts.per_row, trace.per_row),
        ("layers", experts.layers, len(trace.layers)),
    ):
        if wanted != got:
            raise EngineError(f"trace: {what}: expected the model's {wanted}, got {got}")
    fewest = min(sum(not step.prompt for step in steps) for steps in trace.layers)
    if fewest < 2:
        raise EngineError(f"trace: expected decode steps of every layer, got {fewest} in one")


def report(
    config: AnyConfig, trace: RoutingTrace | None, wish: Wish, out: Path | None
) -> Iterator[str]:
    """Give the lines of the command; writes the slots if `out` says where.

    Args:
        config: of the model.
        trace: routing that was recorded; None for as many slots in every paged layer.
        wish: of the user.
        out: file for `expert_slots_file`.

    Raises:
        EngineError: the trace is of another model, or nothing fits.
        OSError: the file cannot be written.
    """
    experts = experts_of(config, ITEMSIZE)
    if trace is not None:
        check_trace(trace, experts)
    steps = None if trace is None else trace.decode_steps()
    learnt = None if steps is None else learn(steps, experts.count)
    # Layers have about as many steps as each other.
    count = max(1, min(map(len, steps))) if steps else 0
    own = answer(config, learnt, wish)
    yield (
        f"experts   {experts.layers} layers of {experts.count}, {experts.nbytes:,} bytes each,"
        f" {experts.layers * experts.count * experts.nbytes / 1e9:.1f} GB in all;"
        f" a token takes {experts.per_row}"
    )
    s = own.split
    yield f"gpu       {wish.gpu_bytes:>18,}  --gpu-gb"
    for what, nbytes in (
        ("weights", s.weights),
        ("kv", s.kv),
        ("steps", s.steps),
        ("stream", s.stream),
        ("reserve", s.reserve),
        ("slots", s.experts),
    ):
        yield f"  {what:<8}{nbytes:>18,}"
    yield f"host      {wish.host_bytes:>18,}  for experts"
    if own.plan is None:
        raise EngineError(own.why)
    plan = own.plan
    if own.why:
        yield f"files     {own.disk_bytes:>18,}  the host has no room for them: {own.why}"
    if plan.num_pins:
        saved = plan.num_pins * experts.nbytes
        yield f"  saved   {saved:>18,}  by {plan.num_pins} experts that stay on the GPU"
    yield from _layers(plan)
    if trace is None:
        yield "hit rate  not known without --trace"
    else:
        yield f"hit rate  {plan.hit_rate:.4f} of {plan.lookups:,} lookups of the trace"
    yield f"captured  decode steps of {_captured(plan, experts)} requests"
    yield ""
    yield "context  requests  kv GB  slots GB  layers whole  hit rate  MB a step  ms a step"
    for other in _others(wish):
        yield _row(config, learnt, count, other)
    yield f"(ms a step: what is missed, at {BUS / 1e9:.0f} GB/s)"
    if out is not None:
        host = f" --expert-host-gb {_host_gb(plan, experts, wish)}" if own.why else ""
        pins = plan.pins or ((),) * len(plan.slots)
        write_slots(out, [LayerSlots(k, some) for k, some in zip(plan.slots, pins, strict=True)])
        block = EngineConfig().block_size
        yield (
            f"wrote {out}: serve with --expert-slots-file {out}{host}"
            f" --max-model-len {wish.context} --max-num-seqs {wish.concurrency}"
            f" --num-blocks {wish.concurrency * -(-wish.context // block)}"
        )


def _others(wish: Wish) -> list[Wish]:
    """Wishes of the table, each once: less than one request, or than two tokens, there is not."""
    found = (
        dataclasses.replace(
            wish,
            context=max(2, int(wish.context * context)),
            concurrency=max(1, int(wish.concurrency * concurrency)),
        )
        for context, concurrency in FACTORS
    )
    return list(dict.fromkeys(found))


def _host_gb(plan: SlotPlan, experts: Experts, wish: Wish) -> int:
    """Say what `expert_host_gb` is to be, where the rest of the experts is in files.

    Raises:
        EngineError: the engine counts in whole GB, and takes none of those that the host has.
    """
    whole = wish.host_bytes // GB
    slots = {layer: k for layer, k in enumerate(plan.slots) if k < experts.count}
    pins = {layer: some for layer, some in enumerate(plan.pins) if some and layer in slots}
    problem = host_gb_problem(Paging(slots, experts, whole * GB, pins), whole, None)
    if problem is None and whole:
        return whole
    accepted = (
        "1 or above, since the engine takes whole GB" if problem is None else problem.accepted
    )
    raise EngineError(
        f"--host-gb: experts that the host has no room for are read from files: expected {accepted};"
        f" got {wish.host_bytes / GB:g}"
    )


def _layers(plan: SlotPlan) -> Iterator[str]:
    """Slots by layer, a line for each run of layers with as many and the same experts that stay."""
    lines = list(itertools.zip_longest(plan.slots, plan.pins, fillvalue=()))
    begin = 0
    for layer in range(1, len(lines) + 1):
        if layer < len(lines) and lines[layer] == lines[begin]:
            continue
        k, pins = lines[begin]
        name = str(begin) if layer == begin + 1 else f"{begin}-{layer - 1}"
        whole = ", whole on the GPU" if k == plan.num_experts else ""
        stay = f", {len(pins)} of experts that stay: {' '.join(map(str, pins))}" if pins else ""
        yield f"  layer {name:<8}{k:>5} slots{whole}{stay}"
        begin = layer


def _captured(plan: SlotPlan, experts: Experts) -> str:
    pins = plan.pins or ((),) * len(plan.slots)
    paged = [
        k - len(some) for k, some in zip(plan.slots, pins, strict=True) if k < plan.num_experts
    ]
    return f"up to {min(paged) // experts.per_row}" if paged else "any number of"


def _row(config: AnyConfig, learnt: Sequence[LayerHits] | None, steps: int, wish: Wish) -> str:
    """Give one line of the table; `steps` of a layer were recorded."""
    head = f"{wish.context:>7}  {wish.concurrency:>8}"
    if wish.context > config.max_position_embeddings:
        return f"{head}  beyond the model's {config.max_position_embeddings} tokens of context"
    found = answer(config, learnt, wish)
    kv = f"{found.split.kv / 1e9:>5.1f}"
    if found.plan is None:
        return f"{head}  {kv}  does not fit"
    plan, nbytes = found.plan, experts_of(config, ITEMSIZE).nbytes
    whole = sum(k == plan.num_experts for k in plan.slots)
    files = f"  {found.disk_bytes / 1e9:.1f} GB in files" if found.why else ""
    head = f"{head}  {kv}  {plan.gpu_experts * nbytes / 1e9:>8.1f}  {whole:>12}"
    if learnt is None:
        return f"{head}  {'-':>8}  {'-':>9}  {'-':>9}{files}"
    moved = plan.misses / steps * nbytes
    return f"{head}  {plan.hit_rate:>8.4f}  {moved / 1e6:>9.1f}  {moved / BUS * 1e3:>9.3f}{files}"
