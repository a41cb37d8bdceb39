"""Equality between variants of one case: modes, protocols, spellings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from conformance import strict_json
from conformance.model import Level, Outcome, Variant, Verdict
from conformance.protocols.observation import Observation


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """A requirement on two variants of a case.

    Attributes:
        slug: Stable name.
        why: One sentence.
        level: See `Level`.
        axis: The attribute of Variant in which the two differ.
        base: Its value in the variant compared with.
    """

    slug: str
    why: str
    level: Level
    axis: str
    base: str


CROSS = (
    CrossCheck(
        "cross/stream-equals-whole",
        "A stream joined says the same as the whole reply.",
        Level.MUST,
        "mode",
        "whole",
    ),
    CrossCheck(
        "cross/protocols-equal",
        "The same output means the same in every protocol.",
        Level.MUST,
        "protocol",
        "chat",
    ),
    CrossCheck(
        "cross/dialects-equal",
        "V4 and V4.1 spellings of the same output mean the same.",
        Level.MUST,
        "dialect",
        "v4.1",
    ),
)


def pairs(
    seen: Mapping[str, Observation],
) -> Iterator[tuple[CrossCheck, Observation, Observation]]:
    """Yields (check, base, other) for each two variants that a cross check compares.

    Args:
        seen: Observations by variant id, of any number of cases.
    """
    for other in seen.values():
        for rule in CROSS:
            value = getattr(other.variant, rule.axis)
            if value is None or value == rule.base:
                continue
            base = seen.get(_replace(other.variant, rule).id)
            if base is not None and base.answered and other.answered and not other.faulty:
                yield rule, base, other


def _replace(variant: Variant, rule: CrossCheck) -> Variant:
    return dataclasses.replace(variant, **{rule.axis: rule.base})  # type: ignore[arg-type]  # axis and base come in pairs from CROSS


def differences(base: Observation, other: Observation) -> Iterable[str]:
    """What the two replies do not share, in words."""
    for name, left, right in (
        ("content", base.content, other.content),
        ("thinking", base.reasoning or "", other.reasoning or ""),
        ("end", base.finish, other.finish),
        ("calls", [c.name for c in base.calls], [c.name for c in other.calls]),
    ):
        if left != right:
            yield f"{name}: {left!r} in {base.variant.id}, {right!r} here"
    for number, (left_call, right_call) in enumerate(zip(base.calls, other.calls, strict=False)):
        if base.finish != "length" and _norm(left_call.arguments) != _norm(right_call.arguments):
            yield (
                f"arguments of call {number}: {left_call.arguments!r} in {base.variant.id}, "
                f"{right_call.arguments!r} here"
            )


def _norm(text: str) -> str:
    try:
        return strict_json.dumps(strict_json.loads(text))
    except strict_json.JsonError:
        return text


def prompts(seen: Mapping[str, Observation]) -> Iterator[Outcome]:
    """Judges cases that compare their prompt size with another case's.

    Equal prompts have equal prompt_tokens whatever the tokenizer is, so the template can be
    checked from outside without a table.
    """
    for found in seen.values():
        variant = found.variant
        for key, slug in (
            ("same_prompt_as", "prompt/same"),
            ("longer_prompt_than", "prompt/longer"),
        ):
            name = variant.case.expect[0].get(key)
            if name is None:
                continue
            base = seen.get(variant.id.replace(variant.case.id, name, 1))
            sizes = [o.usages[-1].prompt if o and o.usages else None for o in (found, base)]
            message, verdict = "", Verdict.PASS
            if sizes[0] is None or sizes[1] is None:
                message, verdict = f"no prompt count to compare with {name}", Verdict.SKIP
            elif key == "same_prompt_as" and sizes[0] != sizes[1]:
                message = f"expected the {sizes[1]} prompt tokens of {name}, got {sizes[0]}"
            elif key == "longer_prompt_than" and sizes[0] <= sizes[1]:
                message = (
                    f"expected more than the {sizes[1]} prompt tokens of {name}, got {sizes[0]}"
                )
            level = variant.case.level
            if message and verdict is Verdict.PASS:
                verdict = Verdict.FAIL if level is Level.MUST else Verdict.WARN
            yield Outcome(variant.id, variant.case.id, slug, verdict, level, message)
