"""What an engine will really run with, and which rule says so.

The user's settings are never changed. Passes look at the machine and the model and append decisions
(rule, field, value) for fields that were left open and are declared as resolvable; the view over
settings and decisions is what is built, logged at start-up and shown by `bathyal doctor`. Loads no
torch: facts come from whoever knows them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.architectures import AnyConfig
from engine.config import ModelConfig
from engine.expert_paging import paging_of
from engine.memory import blocks_for_gpu
from engine.options import GPU_MIXED_TOKENS, EngineConfig, rule_of, shown
from engine.plan.layout import Drafting
from engine.plan.replay import tail_of
from engine.speculation import drafter_in, low_taps

#: Values that say "left open".
_OPEN = ("auto", None)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the machine and the model.

    Args:
        gpu: name of the first NVIDIA GPU; None where none answers.
        cores: cores this process may use.
        weight_bytes: of the checkpoint's files.
        context: positions of the model.
        only_fast: why no other runner than the fast one serves it; None where one does.
        eager: why decode steps are not captured; None where they can be.
        eager_tails: why late layers of prompts are not; None where they can be.
        eager_drafted: the same beside speculation.
        drafter: draft stages that the model has.
        undrafted: why they are not run; None where they can be.
        gpu_nbytes: memory of that GPU; None where nobody knows.
        config: of the model, to plan its memory by; None where experts are paged, which get what is
            left.
    """

    gpu: str | None
    cores: int
    weight_bytes: int
    context: int
    only_fast: str | None = None
    eager: str | None = None
    eager_tails: str | None = None
    eager_drafted: str | None = None
    drafter: Drafting = "off"
    undrafted: str | None = None
    gpu_nbytes: int | None = None
    config: AnyConfig | None = None


def facts_of(
    config: AnyConfig,
    options: EngineConfig,
    *,
    gpu: str | None,
    gpu_nbytes: int | None,
    cores: int,
    weight_bytes: int,
) -> Facts:
    """Collect the facts, those included that follow from model and options.

    Args:
        config: of the model.
        options: the user's.
        gpu: as in Facts.
        gpu_nbytes: as in Facts.
        cores: as in Facts.
        weight_bytes: as in Facts.
    """
    # float32 on the CPU: the larger estimate
    found = paging_of(config, options, 2 if gpu is not None else 4)
    only_fast = eager = None
    if not isinstance(config, ModelConfig):
        only_fast = "this architecture has no reference"
    elif found.is_paged:
        only_fast = "experts are paged"
    elif options.record_routing is not None:
        only_fast = "routing is recorded"
    elif options.speculation in ("dspark", "mtp"):
        only_fast = "tokens are drafted"
    elif options.graphs or options.tail_graphs:
        only_fast = "graphs are asked for"
    elif options.kernels == "triton":
        only_fast = "Triton's kernels are asked for"
    undrafted = None
    if options.record_routing is not None:
        undrafted = "routing is recorded"
    elif found.is_paged:
        undrafted = "experts are paged"
    if options.record_routing is not None:
        eager = "routing is recorded"
    elif found.uses_disk:
        eager = "experts are read from files"
    tails = eager or ("experts are paged" if found.is_paged else None)
    if not isinstance(config, ModelConfig) or tail_of(config) is None:
        tails = "no layers can leave rows out"
    return Facts(
        gpu,
        cores,
        weight_bytes,
        config.max_position_embeddings,
        only_fast,
        eager,
        tails,
        eager_drafted="drafters read layers below the tail" if low_taps(config) else None,
        drafter=drafter_in(config),
        undrafted=undrafted,
        gpu_nbytes=gpu_nbytes,
        config=None if found.is_paged else config,
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """One value and where it comes from.

    Args:
        source: "default", "user", or the rule that filled it in.
        field: of EngineConfig.
        value: what counts.
    """

    source: str
    field: str
    value: Any


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings with nothing left open.

    Args:
        config: the settings that count.
        decisions: one for each field, in order of declaration.
    """

    config: EngineConfig
    decisions: tuple[Decision, ...]

    def lines(self) -> list[str]:
        """One line for each field: its value and which rule set it."""
        return [f"{d.field} = {shown(d.value)} ({d.source})" for d in self.decisions]


class Resolver:
    """Collects decisions over one user's settings.

    Args:
        options: the user's.
    """

    def __init__(self, options: EngineConfig) -> None:
        self._options = options
        self._decisions: dict[str, Decision] = {}

    def get(self, field: str) -> Any:
        """The value as far as it is known."""
        found = self._decisions.get(field)
        return getattr(self._options, field) if found is None else found.value

    def so_far(self) -> EngineConfig:
        """The settings with what is decided by now."""
        values = {d.field: d.value for d in self._decisions.values()}
        return dataclasses.replace(self._options, **values)

    def decide(self, field: str, value: Any, source: str) -> None:
        """Fill a field in, unless the user has set it.

        Raises:
            RuntimeError: the field is not declared as resolvable, was decided already, or the value
                leaves it open: a bug of a pass.
        """
        if not rule_of(field).resolvable:
            raise RuntimeError(f"{field} may not be resolved; {source} tried to")
        if field in self._decisions:
            raise RuntimeError(f"{field} is decided twice, the second time by {source}")
        if value in _OPEN:
            raise RuntimeError(f"{field} is still open after {source}")
        if getattr(self._options, field) in _OPEN:
            self._decisions[field] = Decision(source, field, value)

    def finish(self) -> Resolved:
        """Give the view.

        Raises:
            RuntimeError: a field is still open; a bug of the passes.
        """
        config = self.so_far()
        decisions = []
        for item in dataclasses.fields(config):
            value = getattr(config, item.name)
            if rule_of(item.name).resolvable and value in _OPEN:
                raise RuntimeError(f"{item.name}: no rule has filled it in")
            source = "default" if value == item.default else "user"
            given = Decision(source, item.name, value)
            decisions.append(self._decisions.get(item.name, given))
        return Resolved(config, tuple(decisions))


def resolve(options: EngineConfig, facts: Facts) -> Resolved:
    """Fill in what the user left open.

    Args:
        options: the user's.
        facts: of machine and model.

    Raises:
        EngineError: the options do not fit the model.
    """
    resolver = Resolver(options)
    for rule in (_by_machine, _by_device, _by_model):
        for field, value, why in rule(resolver, facts):
            resolver.decide(field, value, why)
    return resolver.finish()


def _by_machine(so_far: Resolver, facts: Facts) -> Iterator[tuple[str, Any, str]]:
    found = "no NVIDIA GPU answers" if facts.gpu is None else f"found {facts.gpu}"
    yield "device", "cpu" if facts.gpu is None else "cuda", found
    threads = EngineConfig().resolve_cpu_threads(facts.cores, facts.weight_bytes)
    megabytes = facts.weight_bytes / 1e6
    yield "cpu_threads", threads, f"{facts.cores} cores, {megabytes:,.0f} MB of weights"


def _by_device(so_far: Resolver, facts: Facts) -> Iterator[tuple[str, Any, str]]:
    device = so_far.get("device")
    on_gpu = device == "cuda"
    why = f"device is {device}"
    yield "dtype", "bfloat16" if on_gpu else "float32", why
    fast = on_gpu or facts.only_fast is not None
    yield "runner", "fast" if fast else "reference", facts.only_fast or why
    yield "kernels", "triton" if on_gpu else "torch", why
    yield "graphs", on_gpu and facts.eager is None, facts.eager or why
    yield "speculation", *_drafter(so_far, facts)
    mode, runner = so_far.get("prefill"), so_far.get("runner")
    wanted = mode == "bounded" and runner == "fast" and bool(so_far.get("graphs"))
    eager = facts.eager_tails
    if eager is None and so_far.get("speculation") != "off":
        eager = facts.eager_drafted
    yield "tail_graphs", wanted and eager is None, eager or f"prefill is {mode}, {why}"
    options = EngineConfig(max_num_seqs=so_far.get("max_num_seqs"))
    yield "max_batched_tokens", options.resolve_max_batched_tokens(on_gpu=on_gpu), why
    rows = so_far.get("max_batched_tokens")
    yield "max_mixed_tokens", min(rows, GPU_MIXED_TOKENS) if on_gpu else rows, why


def _drafter(so_far: Resolver, facts: Facts) -> tuple[Drafting, str]:
    """Who drafts where it is left to us, and why."""
    runner = so_far.get("runner")
    if facts.drafter == "off":
        return "off", "the checkpoint has no draft stages"
    if facts.undrafted is not None:
        return "off", facts.undrafted
    if runner != "fast":
        return "off", f"runner is {runner}"
    return facts.drafter, f"the checkpoint has {facts.drafter} stages"


def _by_model(so_far: Resolver, facts: Facts) -> Iterator[tuple[str, Any, str]]:
    options = EngineConfig(
        max_model_len=so_far.get("max_model_len"),
        block_size=so_far.get("block_size"),
        num_blocks=so_far.get("num_blocks"),
    )
    context = options.resolve_max_model_len(facts.context)
    yield "max_model_len", context, "the model's context"
    yield "num_blocks", *_blocks(so_far.so_far(), facts, options.resolve_num_blocks(context))


def _blocks(options: EngineConfig, facts: Facts, least: int) -> tuple[int, str]:
    """How many blocks there are where it is left to us, and why."""
    blocks, why = least, "one context or 65,536"
    config, nbytes, served = facts.config, facts.gpu_nbytes, (options.device, options.runner)
    if config is not None and nbytes is not None and served == ("cuda", "fast"):
        blocks, why = blocks_for_gpu(config, options, nbytes, itemsize=options.itemsize)
    return blocks, f"{blocks * options.block_size:,} positions, {why}"
