"""How long a generation may take: to its first token, between two steps, in all.

A step costs no timer and no look at the clock: it moves a counter, and one timer per generation
looks from time to time whether the counter has moved. So what is noticed is noticed up to a
`1 / LOOKS` of the limit late. The time in which nobody asks for tokens (a slow reader) counts for
the whole, not for a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import ServerError

#: How often a limit is looked after within its own time.
LOOKS = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds, all above 0; see `gateway.settings.Settings` for what each bounds."""

    first_token: float
    step: float
    request: float


class Deadline:
    """Watches over one generation.

    Args:
        limits: how long it may take.
        give_up: called once when it took too long; has to end the wait for its next step.

    Attributes:
        steps: how many have come; raised by whoever takes them.
        waiting: whether a step is waited for; set likewise.
        expired: why it was given up.
    """

    __slots__ = (
        "_began",
        "_give_up",
        "_limits",
        "_loop",
        "_moved",
        "_seen",
        "_timer",
        "expired",
        "steps",
        "waiting",
    )

    def __init__(self, limits: Limits, give_up: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._give_up = give_up
        self._began = self._moved = self._loop.time()
        self._seen = 0
        self._timer = self._again(self._began)
        self.steps = 0
        self.waiting = False
        self.expired: ServerError | None = None

    def close(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _again(self, now: float) -> asyncio.TimerHandle:
        shortest = min(self._limits.first_token, self._limits.step, self._limits.request)
        return self._loop.call_at(now + shortest / LOOKS, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if self.steps != self._seen or not self.waiting:
            self._seen, self._moved = self.steps, now
        self.expired = self._failure(now)
        if self.expired is not None:
            self._give_up()
        else:
            self._timer = self._again(now)

    def _failure(self, now: float) -> ServerError | None:
        limits = self._limits
        if now - self._began > limits.request:
            what, limit, code = "the reply took", limits.request, "request_timeout"
        elif self.steps and now - self._moved > limits.step:
            what, limit, code = "the next token took", limits.step, "step_timeout"
        elif not self.steps and now - self._moved > limits.first_token:
            what, limit, code = "the first token took", limits.first_token, "first_token_timeout"
        else:
            return None
        return ServerError(f"{what} longer than {limit:g} s", status=504, code=code)
