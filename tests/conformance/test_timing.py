"""What is judged by the clock: a lump fails, a busy moment does not."""

from __future__ import annotations

import asyncio

import pytest

from conformance import load
from conformance.checks import CHECKS
from conformance.checks.wire import TIMED
from conformance.client import Exchange, Request
from conformance.model import Case
from conformance.runner import Options, run
from tests.conformance.correct_server import CorrectServer


class Late(CorrectServer):
    """Correct, but its first replies are read in one piece."""

    def __init__(self, cases: list[Case], lumps: int) -> None:
        super().__init__(cases)
        self.lumps = lumps
        self.sent = 0

    async def send(self, request: Request) -> Exchange:
        exchange = await super().send(request)
        self.sent += 1
        if self.sent <= self.lumps:
            exchange.reads = [(0.5, exchange.body)]
        return exchange


@pytest.mark.parametrize(
    ("lumps", "sent", "verdict"), [(0, 1, "pass"), (1, 2, "pass"), (2, 3, "pass"), (9, 3, "fail")]
)
def test_a_lump_is_one_each_time(cases: list[Case], lumps: int, sent: int, verdict: str) -> None:
    """A stream that comes in one piece is asked for twice more, and fails if it always does."""
    chosen = load.select(cases, prefixes=["text/one-lump-never"])
    todo = [v for v in load.variants(chosen, protocols=["chat"]) if v.mode == "stream"]
    server = Late(cases, lumps)
    result = asyncio.run(run(todo, server, Options("m"))).results[0]

    found = {outcome.check: outcome.verdict.value for outcome in result.outcomes}
    assert (found["stream/incremental"], server.sent) == (verdict, sent)


def test_timed_checks_exist() -> None:
    """The checks that are repeated are checks."""
    assert set(CHECKS) >= TIMED
