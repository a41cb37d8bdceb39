"""The one ASGI layer before the routes: who asks, under which name, within which limits.

It names the request, brings every spelling of a path to one, lets keys in, keeps the number of open
generations bounded, and counts and logs each call when it is over. Everything below it sees one
path per endpoint and a caller that may ask.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from secrets import token_hex

from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.call import BODY_SEND, Call, header
from gateway.errors import RetryLaterError, ServerError, error_response, protocol_of
from gateway.keys import Caller, Keys
from gateway.logs import log_call
from gateway.metrics import Metrics
from parsers import ClientError

#: Paths that need no key: whoever watches over the server has none, and some clients look here first.
OPEN_PATHS = frozenset({"/", "/health", "/healthz", "/readyz"})
MOST_PATHS = 1024
_API = re.compile(
    r"(?:/beta|/anthropic)?(?:/v1)?"
    r"(/(?:chat/completions|completions|responses|messages|models|tokenize)(?:/.*)?)",
    re.DOTALL,
)


@lru_cache(MOST_PATHS)
def canonical(path: str) -> str:
    """Bring the spellings of an API path to one: with or without /v1, under /beta or /anthropic."""
    found = _API.fullmatch(path)
    return f"/v1{found[1]}" if found else path


class Front:
    """See the module's text.

    Args:
        app: the routes.
        making: the handlers of the paths whose POST makes tokens; called past the routes, whose
            layers would cost more than all that is done here.
        keys: who may ask.
        metrics: what is counted.
        max_open_requests: most generating requests open at once.
        flat_errors: Chat errors are told in SGLang's form.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        metrics: Metrics,
        max_open_requests: int,
        making: Mapping[str, Callable[[Request], Awaitable[ASGIApp]]],
        flat_errors: bool,
    ) -> None:
        self._making = making
        self._flat_errors = flat_errors
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._max_open = max_open_requests
        self._open = 0
        self._counted: dict[tuple[str, str, int], Counter] = {}
        metrics.open.set_function(lambda: self._open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, or refuse it in its caller's shape.

        Raises:
            Exception: a bug; its caller has got a 500 without inside knowledge.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        headers = scope["headers"]
        path = scope["path"]
        call = Call(_request_id(headers), protocol_of(path), path, self._flat_errors)
        scope = {**scope, "path": canonical(path), BODY_SEND: send}
        call.attach(scope)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                request_id = call.id.encode()
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id),
                    (b"request-id", request_id),
                ]
            await send(message)

        try:
            await self._admit(call, headers, scope, receive, send_named)
        except Exception:
            if not call.status:
                await error_response(call, ServerError("internal error"))(
                    scope, receive, send_named
                )
            raise
        finally:
            self._count(call, scope, time.monotonic() - began)

    async def _admit(
        self,
        call: Call,
        headers: Sequence[tuple[bytes, bytes]],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        caller: Caller | None = None
        counted = False
        try:
            try:
                if scope["path"] not in OPEN_PATHS:
                    caller = self._keys.enter(
                        header(headers, b"authorization"), header(headers, b"x-api-key")
                    )
                    call.key, call.salt = caller.name, caller.salt
                if scope["method"] == "POST" and scope["path"] in self._making:
                    self._take_place()
                    counted = True
            except ClientError as error:
                await self._refusal(call, error)(scope, receive, send)
                return
            if counted:
                response = await self._making[scope["path"]](Request(scope, receive, send))
                await response(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            if caller is not None:
                caller.leave()
            if counted:
                self._open -= 1

    def _take_place(self) -> None:
        if self._open >= self._max_open:
            raise RetryLaterError(
                f"the server has {self._open} requests open and takes no more; try again later",
                status=503,
                code="queue_full",
                seconds=1,
            )
        self._open += 1

    def _refusal(self, call: Call, error: ClientError) -> Response:
        self._metrics.refused.labels(error.code).inc()
        return error_response(call, error)

    def _count(self, call: Call, scope: Scope, seconds: float) -> None:
        route = scope["route"].path if "route" in scope else scope["path"]
        if "route" not in scope and route not in self._making:
            route = _NO_ROUTE
        method = scope["method"] if scope["method"] in _METHODS else "(other)"
        labels = (route, method, call.status)
        if (counted := self._counted.get(labels)) is None:  # looking a child up costs as counting
            counted = self._metrics.requests.labels(route, method, str(call.status))
            self._counted[labels] = counted
        counted.inc()
        if route in self._making:
            self._metrics.seconds.labels(route).observe(seconds)
        if route == _NO_ROUTE:
            call.notes["path"] = call.path[:200]
        if call.status >= 400 or route not in _PROBED:
            log_call(call, route, method, seconds)


_NO_ROUTE = "(none)"
_PROBED = OPEN_PATHS | {"/metrics"}  # asked every few seconds by machines: logged when they fail
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Take the client's own id, or make one.

    One that is longer than 128 characters or holds anything but visible ASCII is replaced, so that
    no header and no log line can be forged with it.
    """
    given = header(headers, b"x-request-id")
    if not given:
        return token_hex(16)
    return given if re.fullmatch(r"[!-~]{1,128}", given) else token_hex(16)
