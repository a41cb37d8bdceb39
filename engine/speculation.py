"""Who drafts tokens, and what does not go with it: what the options say, and what is wrong.

Torch-free: read by the refusals at start, the memory plan and the resolver. The drafts themselves are
engine.model.drafting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.architectures import AnyConfig
from engine.config import ModelConfig
from engine.expert_paging import Problem, paging_of
from engine.options import EngineConfig
from engine.plan.layout import Drafting
from engine.plan.replay import tail_of

#: Rows of a verification up to which the kernels of decode steps run.
MOST_ROWS = 64


def drafter_in(config: AnyConfig) -> Drafting:
    """Say what draft stages a configuration has.

    DSpark's where it names a block size; else V4's MTP. V4.1 has no MTP stages.
    """
    if not isinstance(config, ModelConfig) or not config.num_nextn_predict_layers:
        return "off"
    if config.dspark is not None:
        return "dspark"
    return "off" if config.is_v41 else "mtp"


def low_taps(config: AnyConfig) -> tuple[int, ...]:
    """Name the layers below a prompt's tail that a drafter reads; a captured tail knows none."""
    if not isinstance(config, ModelConfig) or config.dspark is None:
        return ()
    tail = tail_of(config)
    first = 0 if tail is None else tail.first
    return tuple(layer for layer in config.dspark.target_layer_ids if layer < first)


def draft_tokens(config: AnyConfig, drafting: Drafting) -> int:
    """Tokens of a draft; 0 where nothing is drafted."""
    if drafting == "off" or not isinstance(config, ModelConfig):
        return 0
    return config.num_nextn_predict_layers if config.dspark is None else config.dspark.block_size


def speculative_buckets(buckets: Sequence[int], drafts: int) -> list[int]:
    """Batch sizes of decode steps for which drafts of so many tokens are verified."""
    return [bucket for bucket in buckets if bucket * (drafts + 1) <= MOST_ROWS]


def drafting_of(options: EngineConfig) -> Drafting:
    """Who drafts, once nothing is left open."""
    found: Drafting = {"dspark": "dspark", "mtp": "mtp"}.get(options.speculation, "off")  # type: ignore[assignment]
    return found


def obstacles(config: AnyConfig, options: EngineConfig) -> Iterator[Problem]:
    """Say what else of the options does not go with drafts.

    Args:
        config: of the model.
        options: with the runner not left open.
    """
    if options.runner == "reference":
        yield Problem("runner", "reference beside speculation", "fast")
    paged = paging_of(config, options, options.itemsize).is_paged
    for name in ("expert_slots", "expert_slots_file"):
        if paged and getattr(options, name) is not None:
            yield Problem(
                name,
                f"{getattr(options, name)} beside speculation",
                "all experts on the device: rows that are rejected would fetch experts, too",
            )
    if options.record_routing is not None:
        yield Problem(
            "record_routing",
            f"{options.record_routing} beside speculation",
            "no file: rows that are rejected would be noted, too",
        )


def speculation_problems(config: AnyConfig, options: EngineConfig) -> Iterator[Problem]:
    """Say what of the options on speculation cannot be served.

    Args:
        config: of the model.
        options: with nothing left open.
    """
    if options.speculation == "off":
        return
    has = drafter_in(config)
    if options.speculation == has and draft_tokens(config, has) >= MOST_ROWS:
        seen = f"{has} with drafts of {draft_tokens(config, has)} tokens"
        yield Problem("speculation", seen, f"drafts of less than {MOST_ROWS}")
    if options.speculation != has:
        stages = "no draft stages" if has == "off" else f"stages of {has}"
        accepted = "off" if has == "off" else f"{has} or off"
        yield Problem(
            "speculation", options.speculation, f"{accepted}: the checkpoint has {stages}"
        )
    yield from obstacles(config, options)
