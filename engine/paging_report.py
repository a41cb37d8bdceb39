"""What `bathyal engine plan --paged` prints: the split, the slots, a table, and a command to serve with.

The table says what more or less context or concurrency would cost, in slots and in misses. Loads no
torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.api import EngineError
from engine.architectures import AnyConfig
from engine.expert_paging import GB, Experts, LayerSlots, Paging, experts_of, write_slots
from engine.paging_plan import ITEMSIZE, Wish, answer, blocks_of
from engine.plan.paging import LayerHits, SlotPlan, learn
from engine.routing_trace import RoutingTrace

#: Bytes per second at which kernels read pinned memory over PCIe 5 x16, measured on an H200.
BUS = 51e9
#: Multiples of the context and of the concurrency asked for that the table shows.
FACTORS = ((0.5, 1.0), (1.0, 0.5), (1.0, 1.0), (1.0, 2.0), (2.0, 1.0))


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
    config: AnyConfig,
    trace: RoutingTrace | None,
    wish: Wish,
    out: Path | None,
    model: Path | None = None,
) -> Iterator[str]:
    """Give the lines of the command; writes the slots if `out` says where.

    Args:
        config: of the model.
        trace: routing that was recorded; None for as many slots in every paged layer.
        wish: of the user.
        out: file for `expert_slots_file`.
        model: folder of the model, for the command to serve with; None for the one that ships.

    Raises:
        EngineError: before the first line: the trace is of another model, nothing fits, or the
            engine would refuse what does.
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
    if own.problem is not None:
        raise EngineError(
            "--host-gb: experts that the host has no room for are read from files: expected"
            f" {own.problem.accepted}; got {wish.host_bytes / GB:g}"
        )
    if own.plan is None or own.paging is None:
        raise EngineError(own.why)
    plan, paging = own.plan, own.paging
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
    if paging.uses_disk:
        yield f"files     {paging.disk_nbytes:>18,}  the host has no room for them: {own.why}"
    if plan.num_pins:
        saved = plan.num_pins * experts.nbytes
        yield f"  saved   {saved:>18,}  by {plan.num_pins} experts that stay on the GPU"
    yield from _layers(plan)
    if trace is None:
        yield "hit rate  not known without --trace"
    else:
        yield f"hit rate  {plan.hit_rate:.4f} of {plan.lookups:,} lookups of the trace"
    yield f"captured  {_captured(paging)}"
    yield ""
    yield "context  requests  kv GB  slots GB  layers whole  hit rate  MB a step  ms a step"
    for other in _others(wish):
        yield _row(config, learnt, count, other)
    yield f"(ms a step: what is missed, at {BUS / 1e9:.0f} GB/s)"
    if out is not None:
        write_slots(out, _by_layer(plan))
        yield f"wrote {out}; serve with"
        yield shlex.join(_serve(paging, wish, out, model))


def _serve(paging: Paging, wish: Wish, out: Path, model: Path | None) -> Iterator[str]:
    """Words of the command that serves a plan."""
    yield from ("bathyal", "serve")
    if model is not None:
        yield from ("--model", str(model))
    yield from ("--expert-slots-file", str(out))
    if paging.uses_disk and paging.host_bytes is not None:
        yield from ("--expert-host-gb", str(paging.host_bytes // GB))
    yield from ("--max-model-len", str(wish.context), "--max-num-seqs", str(wish.concurrency))
    yield from ("--num-blocks", str(blocks_of(wish)))


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


def _by_layer(plan: SlotPlan) -> list[LayerSlots]:
    """Slots of each layer, and the experts that stay; a plan without any names none."""
    return list(
        itertools.starmap(LayerSlots, itertools.zip_longest(plan.slots, plan.pins, fillvalue=()))
    )


def _layers(plan: SlotPlan) -> Iterator[str]:
    """Slots by layer, a line for each run of layers with as many and the same experts that stay."""
    lines = _by_layer(plan)
    begin = 0
    for layer in range(1, len(lines) + 1):
        if layer < len(lines) and lines[layer] == lines[begin]:
            continue
        k, pins = lines[begin].slots, lines[begin].pins
        name = str(begin) if layer == begin + 1 else f"{begin}-{layer - 1}"
        whole = ", whole on the GPU" if k == plan.num_experts else ""
        stay = f", {len(pins)} of experts that stay: {' '.join(map(str, pins))}" if pins else ""
        yield f"  layer {name:<8}{k:>5} slots{whole}{stay}"
        begin = layer


def _captured(paging: Paging) -> str:
    """Which decode steps the engine captures of a plan."""
    rows = paging.most_captured_rows
    if rows == 0:
        return "no decode steps: which experts a step reads from files is decided on the host"
    return f"decode steps of {'any number of' if rows is None else f'up to {rows}'} requests"


def _row(config: AnyConfig, learnt: Sequence[LayerHits] | None, steps: int, wish: Wish) -> str:
    """Give one line of the table; `steps` of a layer were recorded."""
    head = f"{wish.context:>7}  {wish.concurrency:>8}"
    if wish.context > config.max_position_embeddings:
        return f"{head}  beyond the model's {config.max_position_embeddings} tokens of context"
    found = answer(config, learnt, wish)
    kv = f"{found.split.kv / 1e9:>5.1f}"
    if found.problem is not None:
        return f"{head}  {kv}  files: expected --host-gb of {found.problem.accepted}"
    if found.plan is None or found.paging is None:
        return f"{head}  {kv}  does not fit"
    plan, nbytes = found.plan, experts_of(config, ITEMSIZE).nbytes
    whole = sum(k == plan.num_experts for k in plan.slots)
    disk = found.paging.disk_nbytes
    files = f"  {disk / 1e9:.1f} GB in files" if disk else ""
    head = f"{head}  {kv}  {plan.gpu_experts * nbytes / 1e9:>8.1f}  {whole:>12}"
    if learnt is None:
        return f"{head}  {'-':>8}  {'-':>9}  {'-':>9}{files}"
    moved = plan.misses / steps * nbytes
    return f"{head}  {plan.hit_rate:>8.4f}  {moved / 1e6:>9.1f}  {moved / BUS * 1e3:>9.3f}{files}"
