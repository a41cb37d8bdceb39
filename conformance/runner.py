"""Runs variants against an endpoint: render, send, observe, judge.

Knows no protocol (render and the observers do) and no output format (report/ does).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from conformance import baseline, load
from conformance.checks.wire import TIMED
from conformance.client import Exchange, Request, Sender
from conformance.judging import compare, judge, merge, outcome
from conformance.model import Outcome, Result, Switch, Variant, Verdict
from conformance.protocols import observation
from conformance.protocols.observation import Observation
from conformance.protocols.render import OBSERVERS, follow, render

LATE = frozenset({Verdict.FAIL, Verdict.WARN})


@dataclass(frozen=True, slots=True)
class Options:
    """How to run.

    Attributes:
        model: Model name to ask for.
        concurrency: Exchanges in flight; 1 where an upstream plays one script at a time.
        repeats: Runs of each live variant.
        seed: Sent with live requests, plus the number of the repeat.
        unsupported: Features the endpoint declares not to have; cases that need one are skipped.
        before: Called with each variant before it is sent (an upstream chooses its script here).
        left: Tells whether the engine sees that it was abandoned within so many seconds; None
            where nobody can tell, and such variants are skipped.
        parse_path: Path of the native parsing endpoint.
        parser: Name of the parser to ask it for.
        switch: The chat field that turns thinking on and off.
    """

    model: str
    concurrency: int = 8
    repeats: int = 1
    seed: int = 0
    unsupported: frozenset[str] = frozenset()
    before: Callable[[Variant], None] | None = None
    left: Callable[[float], Awaitable[bool]] | None = None
    parse_path: str = "/parse_function_call"
    parser: str = "deepseekv4"
    switch: Switch = "thinking"


@dataclass(slots=True)
class Run:
    """Everything a run found out.

    Attributes:
        results: One per variant, in the order of the variants given.
        stale: Entries of the expected-failures file that announce nothing any more.
        elapsed_s: Wall time, seconds.
        meta: What was run: endpoint, model, versions, command; and `scripts_played`, how many
            prescribed answers arrived, of how many.
    """

    results: list[Result]
    stale: list[baseline.Entry]
    elapsed_s: float
    meta: dict[str, Any]

    @property
    def failed(self) -> bool:
        """True for an unexpected failure, an error or a stale entry."""
        bad = {Verdict.FAIL, Verdict.ERROR}
        return bool(self.stale) or any(
            outcome.verdict in bad and not outcome.expected
            for result in self.results
            for outcome in result.outcomes
        )

    def counts(self) -> dict[Verdict, int]:
        """Number of variants by verdict; one whose failures were all announced counts as warn."""
        counts = dict.fromkeys(Verdict, 0)
        for result in self.results:
            counts[verdict_of(result)] += 1
        return counts


def verdict_of(result: Result) -> Verdict:
    """The verdict of a variant with announced failures softened to warn."""
    softened = [
        replace(o, verdict=Verdict.WARN) if o.expected and o.verdict is Verdict.FAIL else o
        for o in result.outcomes
    ]
    return Result(result.variant, softened).verdict


async def run(
    variants: Sequence[Variant],
    sender: Sender,
    options: Options,
    *,
    expected: Iterable[baseline.Entry] = (),
    progress: Callable[[Result], None] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Run:
    """Runs variants and judges them.

    Args:
        variants: What to run.
        sender: Where to.
        options: How.
        expected: Entries of an expected-failures file.
        progress: Called with each result as it is there (cross checks come later).
        meta: Added to the run's meta.
    """
    began = time.perf_counter()
    tools = load.load_tools()
    results: list[Result | None] = [None] * len(variants)
    seen: dict[str, Observation] = {}
    todo = iter(enumerate(variants))

    async def work() -> None:
        for number, variant in todo:
            result, last = await _variant(variant, sender, options, tools)
            results[number] = result
            if last is not None:
                seen[variant.id] = last
            if progress is not None:
                progress(result)

    await asyncio.gather(*(work() for _ in range(max(1, options.concurrency))))
    done = [result for result in results if result is not None]
    await _again(done, seen, sender, options, tools)
    compare(done, seen)
    stale = baseline.apply(expected, done)
    arrived, wanted = _played(seen)
    found = dict(meta or {}) | {"scripts_played": [arrived, wanted]}
    return Run(done, stale, time.perf_counter() - began, found)


async def _again(
    done: list[Result],
    seen: dict[str, Observation],
    sender: Sender,
    options: Options,
    tools: Mapping[str, Mapping[str, Any]],
) -> None:
    """Repeats, alone and at most twice, what failed by the clock.

    A server that collects its stream does so every time; a machine too busy to read in time, with
    other exchanges in flight, does not.
    """
    for number, result in enumerate(done):
        for _ in range(2):
            if not any(o.check in TIMED and o.verdict in LATE for o in done[number].outcomes):
                break
            done[number], last = await _variant(result.variant, sender, options, tools)
            if last is not None:
                seen[result.variant.id] = last


def _played(seen: Mapping[str, Observation]) -> tuple[int, int]:
    """How many answers that scripts prescribe word by word arrived, and of how many."""
    arrived = wanted = 0
    for reply in seen.values():
        texts = [expect.get("content") for expect in reply.variant.case.expect]
        if reply.variant.case.tier == "scripted" and reply.answered and all(texts):
            wanted += 1
            arrived += reply.content in texts
    return arrived, wanted


async def _variant(
    variant: Variant, sender: Sender, options: Options, tools: Mapping[str, Mapping[str, Any]]
) -> tuple[Result, Observation | None]:
    missing = ({variant.protocol, *variant.case.needs}) & options.unsupported
    if missing:
        reason = f"declared unsupported: {', '.join(sorted(missing))}"
        return Result(variant, [outcome(variant, "case", Verdict.SKIP, reason)]), None
    if variant.case.action == "abandon" and options.left is None:
        reason = "only an engine that the suite serves (--upstream) shows whether it is told"
        return Result(variant, [outcome(variant, "case", Verdict.SKIP, reason)]), None
    began = time.perf_counter()
    live = variant.case.tier == "live"
    rounds: list[list[Outcome]] = []
    last: Observation | None = None
    kept: Exchange | None = None
    for number in range(options.repeats if live else 1):
        last = await observe(variant, sender, options, tools, options.seed + number)
        outcomes = judge(last)
        worse = any(o.verdict in {Verdict.FAIL, Verdict.ERROR} for o in outcomes)
        if kept is None or worse:
            kept = last.exchange
        rounds.append(outcomes)
    elapsed = (time.perf_counter() - began) * 1000
    result = Result(variant, merge(rounds), kept, elapsed)
    return result, last


async def observe(
    variant: Variant,
    sender: Sender,
    options: Options,
    tools: Mapping[str, Mapping[str, Any]],
    seed: int = 0,
) -> Observation:
    """Sends one variant and reads the reply."""
    request, body = render(variant, options.model, tools, options.switch)
    # A case that gives its body as bytes, or a seed of its own, is sent as it is.
    if variant.case.tier == "live" and variant.protocol == "chat" and body and "seed" not in body:
        body = body | {"seed": seed}
        request = replace(request, body=orjson.dumps(body))
    if variant.protocol == "parse":
        body = body | {"tool_call_parser": options.parser}
        request = replace(request, path=options.parse_path, body=orjson.dumps(body))
    if options.before is not None:
        options.before(variant)
    left: bool | None = None
    if variant.case.action == "abandon":
        exchange = await sender.send(replace(request, leave_after=1))
        left = await options.left(5.0) if options.left else None
    else:
        exchange = await sender.send(request)
    if variant.case.action == "leave":
        exchange = await _leave(request, sender, exchange, options, variant)
    seen = observation.read(variant, body, exchange)
    seen.engine_left = left
    OBSERVERS[variant.protocol](seen)
    if variant.case.action == "follow" and seen.answered:
        request, body = follow(seen, request)
        if options.before is not None:
            options.before(variant)
        seen = observation.read(variant, body, await sender.send(request))
        OBSERVERS[variant.protocol](seen)
    return seen


async def _leave(
    request: Request, sender: Sender, whole: Exchange, options: Options, variant: Variant
) -> Exchange:
    """Hangs up in the middle of the same reply, then asks again: the second answer is judged."""
    if options.before is not None:
        options.before(variant)
    await sender.send(replace(request, leave_after=max(1, len(whole.body) // 2)))
    if options.before is not None:
        options.before(variant)
    return await sender.send(request)
