"""Verdicts: the checks on one reply, several runs of a variant, and variants against each other.

Knows no transport and no protocol; replies come as observations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from conformance.checks import CHECKS, cross
from conformance.model import Level, Outcome, Result, Variant, Verdict
from conformance.protocols.observation import Observation


def judge(seen: Observation) -> list[Outcome]:
    """Applies every check that has something to judge in this reply."""
    variant = seen.variant
    if seen.exchange.status == 0:
        return [outcome(variant, "http/complete", Verdict.ERROR, seen.exchange.fault or "no reply")]
    outcomes = []
    for check in CHECKS.values():
        if not check.applies(seen):
            continue
        if check.slug in variant.case.exempt:
            reason = f"exempt: {variant.case.exempt[check.slug]}"
            outcomes.append(outcome(variant, check.slug, Verdict.SKIP, reason))
            continue
        findings = list(check.run(seen))
        level = min_level(check.level, variant.case.level)
        verdict = Verdict.PASS
        if findings:
            verdict = Verdict.FAIL if level is Level.MUST else Verdict.WARN
        message = "; ".join(
            f.message + (f" (frame {f.frame})" if f.frame is not None else "") for f in findings[:3]
        )
        outcomes.append(Outcome(variant.id, variant.case.id, check.slug, verdict, level, message))
    wishes = any(expect.get("wish") == "calls" for expect in variant.case.expect)
    if wishes and seen.answered and not seen.calls:
        reason = "the model chose to answer without a call: nothing to judge"
        outcomes.append(outcome(variant, "live/called", Verdict.SKIP, reason))
    return outcomes


def min_level(*levels: Level) -> Level:
    """SHOULD if any of the levels is."""
    return Level.SHOULD if Level.SHOULD in levels else Level.MUST


def outcome(variant: Variant, slug: str, verdict: Verdict, message: str = "") -> Outcome:
    """The outcome of a check on a variant, at the level of its case."""
    return Outcome(variant.id, variant.case.id, slug, verdict, variant.case.level, message)


def merge(rounds: list[list[Outcome]]) -> list[Outcome]:
    """One outcome per check over all rounds: the worst, with the number of passes."""
    if len(rounds) == 1:
        return rounds[0]
    by_check: dict[str, list[Outcome]] = {}
    for outcomes in rounds:
        for one in outcomes:
            by_check.setdefault(one.check, []).append(one)
    merged = []
    for found in by_check.values():
        judged = [o for o in found if o.verdict is not Verdict.SKIP]
        worst = Result(None, found).verdict  # type: ignore[arg-type]  # only verdicts are read
        example = next(o for o in found if o.verdict is worst)
        passed = sum(o.verdict is Verdict.PASS for o in judged)
        merged.append(replace(example, repeats=(len(judged), passed)))
    return merged


def compare(results: list[Result], seen: Mapping[str, Observation]) -> None:
    """Adds the outcomes that compare two variants, or two cases by their prompt size."""
    by_id = {result.variant.id: result for result in results}
    for rule, base, other in cross.pairs(seen):
        variant = other.variant
        if (
            variant.case.tier not in {"scripted", "live", "parse"}
            or rule.slug in variant.case.exempt
            or variant.case.action == "abandon"  # how much came of it is chance
        ):
            continue
        found = list(cross.differences(base, other))
        level = min_level(rule.level, variant.case.level)
        verdict = Verdict.PASS
        if found and variant.case.tier == "live":
            verdict, found = Verdict.SKIP, ["the model answered otherwise the second time"]
        elif found:
            verdict = Verdict.FAIL if level is Level.MUST else Verdict.WARN
        by_id[variant.id].outcomes.append(
            Outcome(variant.id, variant.case.id, rule.slug, verdict, level, "; ".join(found[:3]))
        )
    for sized in cross.prompts(seen):
        by_id[sized.variant].outcomes.append(sized)
