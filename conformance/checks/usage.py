"""Token counts."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.checks.registry import check
from conformance.model import Finding
from conformance.protocols.observation import Observation, table


def _asked(seen: Observation) -> bool:
    if seen.error is not None or seen.faulty or seen.variant.protocol == "parse":
        return False
    if seen.variant.protocol == "chat" and seen.variant.mode == "stream":
        return table(seen.body.get("stream_options")).get("include_usage") is True
    return True


@check("usage/once", when=_asked)
def once(seen: Observation) -> Iterator[str]:
    """Usage is reported exactly once where it is asked for."""
    if len(seen.usages) != 1:
        yield f"expected one usage report, got {len(seen.usages)}"


def _counted(seen: Observation) -> bool:
    return _asked(seen) and len(seen.usages) > 0


@check("usage/counts", when=_counted)
def counts(seen: Observation) -> Iterator[str]:
    """Prompt and completion counts are given and not negative, the prompt's is positive."""
    last = seen.usages[-1]
    if last.prompt is None or last.completion is None or last.prompt < 1 or last.completion < 0:
        yield f"prompt {last.prompt!r}, completion {last.completion!r}"


@check("usage/adds-up", when=_counted)
def adds_up(seen: Observation) -> Iterator[str]:
    """The total is the sum, and the details are no larger than what they detail."""
    last = seen.usages[-1]
    if last.prompt is None or last.completion is None:
        return
    if last.total is not None and last.total != last.prompt + last.completion:
        yield f"total {last.total}, expected {last.prompt} + {last.completion}"
    if (last.cached or 0) > last.prompt:
        yield f"{last.cached} cached of {last.prompt} prompt tokens"
    if (last.reasoning or 0) > last.completion:
        yield f"{last.reasoning} thinking of {last.completion} completion tokens"


@check("usage/chunk-shape", protocols=["chat"], modes=["stream"], when=_counted)
def chunk_shape(seen: Observation) -> Iterator[Finding]:
    """Usage rides on the chunk that finishes, or on one with choices [] behind it."""
    for number, chunk in seen.events:
        choices = chunk.get("choices")
        if chunk.get("usage") is None or not isinstance(choices, list):
            continue
        if choices and table(choices[0]).get("finish_reason") is None:
            yield Finding("usage on a chunk that neither finishes nor has choices []", number)
