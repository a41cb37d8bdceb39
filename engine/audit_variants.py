"""What an audit compares: the configured engine with one switch turned over at a time, or why not.

Loads no torch; measured by engine.audit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.architectures import AnyConfig
from engine.config import ModelConfig
from engine.expert_paging import experts_of, paging_of
from engine.options import EngineConfig
from engine.plan.replay import tail_of
from engine.speculation import drafter_in


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared.

    Args:
        variants: name -> options; the first is the engine as configured.
        left_out: switch -> why it has no variant.
    """

    variants: dict[str, EngineConfig]
    left_out: dict[str, str]


def compare(
    options: EngineConfig, config: AnyConfig, settle: Callable[[EngineConfig], EngineConfig]
) -> Comparison:
    """Choose the variants.

    Args:
        options: as configured, what every switch is compared with.
        config: of the model.
        settle: fills in what options leave open, as a start here does.

    Returns:
        variants of the runner and the drafter that are configured, which other options may have
        chosen: without those the same ones run, so that no second switch turns with theirs. Graphs
        that are left open may turn: that files of experts forbid them is part of what files cost.

    Raises:
        EngineError: the options do not fit the model.
    """
    now = settle(options)
    options = dataclasses.replace(options, runner=now.runner, speculation=now.speculation)

    def turned(**changes: Any) -> EngineConfig:
        return dataclasses.replace(options, **changes)

    found, left = {"as configured": options}, {}
    on_gpu, fast = now.device == "cuda", now.runner == "fast"
    if not fast:
        found["fast runner"] = turned(runner="fast")
    if fast and on_gpu:
        found[f"graphs {_other(now.graphs)}"] = turned(graphs=not now.graphs)
        has = now.kernels == "triton"
        found[f"fused kernels {_other(has)}"] = turned(kernels="torch" if has else "triton")
    else:
        left["graphs"] = left["fused kernels"] = _NOT_OF_REFERENCE if on_gpu else _NOT_OF_CPU
    if fast:
        found[f"lookahead {_other(now.lookahead)}"] = turned(lookahead=not now.lookahead)
    else:
        left["lookahead"] = _NOT_OF_REFERENCE
    paged = paging_of(config, now, now.itemsize).is_paged
    experts = experts_of(config, now.itemsize)
    slots = max(experts.per_row, experts.count // 2)
    paging = "paged experts and their prefetch"
    if paged:
        found["all experts resident"] = turned(
            expert_slots=None,
            expert_slots_file=None,
            resident_layers=0,
            expert_host_gb=None,
            expert_prefetch=False,
        )
        if options.expert_host_gb is None:
            name = f"prefetch of experts {_other(options.expert_prefetch)}"
            found[name] = turned(expert_prefetch=not options.expert_prefetch)
        else:
            left["prefetch of experts"] = "experts in files cannot be brought in ahead"
    elif options.expert_slots is not None or options.expert_slots_file is not None:
        left[paging] = "every expert has a slot"
    elif not fast:
        left[paging] = _NOT_OF_REFERENCE
    elif now.speculation != "off":
        left[paging] = "they do not go with speculation"
    elif slots == experts.count:
        left[paging] = "a token takes all experts of a layer"
    else:
        found[f"experts paged, {slots} slots"] = turned(expert_slots=slots)
        # To be compared with the one before.
        found[f"experts paged, {slots} slots, prefetch"] = turned(
            expert_slots=slots, expert_prefetch=True
        )
    drafter = drafter_in(config)
    if now.speculation != "off":
        found["speculation off"] = turned(speculation="off")
    elif drafter == "off":
        left["speculation"] = "the model has no draft stages"
    elif not fast:
        left["speculation"] = _NOT_OF_REFERENCE
    elif paged:
        left["speculation"] = "it does not go with paged experts"
    else:
        found[f"speculation {drafter}"] = turned(speculation=drafter)
    cache = now.prefix_cache
    found[f"prefix cache {_other(cache)}"] = turned(prefix_cache=not cache)
    if not isinstance(config, ModelConfig) or tail_of(config) is None:
        left["prefill modes"] = left["tail graphs"] = "no layers of this model can leave rows out"
        return Comparison(found, left)
    for mode in ("off", "exact", "bounded"):
        if mode != now.prefill:
            found[f"prefill {mode}"] = turned(prefill=mode)
    if not fast or not on_gpu:
        left["tail graphs"] = _NOT_OF_REFERENCE if on_gpu else _NOT_OF_CPU
    elif not now.graphs:
        left["tail graphs"] = "decode steps are not captured"
    elif paged:
        left["tail graphs"] = "experts are paged"
    else:
        # To be compared with bounded, which has them where nothing is in the way.
        has = settle(turned(prefill="bounded")).tail_graphs is True
        name = f"prefill bounded, tail graphs {_other(has)}"
        found[name] = turned(prefill="bounded", tail_graphs=not has)
    return Comparison(found, left)


_NOT_OF_CPU = "a CPU has none"
_NOT_OF_REFERENCE = "the reference runner has none; it is compared where --runner is fast"


def _other(is_on: object) -> str:
    return "off" if is_on else "on"
