"""How long a generation may take: to its first token, between two steps, in all.

One timer per generation, which looks again only when it fires: a step costs a reading of the clock
and no timer of its own. The time in which nobody asks for tokens (a slow reader) counts for the
whole, not for a step.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import ServerError


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
    """

    def __init__(self, limits: Limits, give_up: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._give_up = give_up
        self._end = self._loop.time() + limits.request
        self._stepped = False
        self._due = math.inf  # of the step that is waited for
        self._timer: asyncio.TimerHandle | None = None
        self.expired: ServerError | None = None

    def wait(self) -> None:
        """A step is asked for."""
        now = self._loop.time()
        self._due = now + (self._limits.step if self._stepped else self._limits.first_token)
        # From then on the timer fires at or before every due time, so this is for the first two.
        if self._timer is None or self._timer.when() > self._due:
            self.close()
            self._timer = self._loop.call_at(min(self._due, self._end), self._look)

    def step(self) -> float:
        """A step has come; returns the loop's time."""
        self._stepped = True
        self._due = math.inf
        return self._loop.time()

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if now < min(self._due, self._end):
            ahead = min(self._due, self._end, now + self._limits.step)
            self._timer = self._loop.call_at(ahead, self._look)
            return
        self.expired = self._failure(now)
        self._give_up()

    def _failure(self, now: float) -> ServerError:
        if now >= self._end:
            what, limit, code = "the reply took", self._limits.request, "request_timeout"
        elif self._stepped:
            what, limit, code = "the next token took", self._limits.step, "step_timeout"
        else:
            what, limit, code = (
                "the first token took",
                self._limits.first_token,
                "first_token_timeout",
            )
        return ServerError(f"{what} longer than {limit:g} s", status=504, code=code)
