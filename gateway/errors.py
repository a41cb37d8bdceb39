"""Failures as HTTP replies, before the headers are sent.

The client's fault is a parsers.ClientError; ours or the backend's is a ServerError. Both are told to
the client in its protocol's shape. After the headers a failure is a frame, which Exchange.fail writes.
"""

from __future__ import annotations

from functools import lru_cache

from starlette.responses import Response

from gateway.call import Call
from parsers import ClientError, Protocol, error_body


class ServerError(ClientError):
    """An error that is told to the client but is none of its making.

    Args:
        message: what failed, fit to be shown to a client.
        status: HTTP status, 500 or above.
        code: machine-readable reason.
    """

    def __init__(self, message: str, *, status: int = 500, code: str = "internal_error") -> None:
        super().__init__(message, status=status, code=code)


class RefusedError(ClientError):
    """A request that the engine refuses before a reply to it has begun.

    Args:
        message: what the engine says.
        code: machine-readable reason.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, code=code)


class RetryLaterError(ClientError):
    """A request that may be sent again as it is, only not now (429, 503).

    Args:
        message: which limit was met, and what it is.
        status: HTTP status.
        code: machine-readable reason.
        seconds: when it makes sense to come again; told in `retry-after`.
    """

    def __init__(self, message: str, *, status: int, code: str, seconds: int) -> None:
        super().__init__(message, status=status, code=code)
        self.seconds = seconds


def not_served() -> ServerError:
    """What a client hears while the model is not loaded, or no more."""
    return ServerError("the model is not being served", status=503, code="backend_unavailable")


def shutting_down() -> ServerError:
    """What a client hears whose reply outlasts the server."""
    return ServerError("the server is shutting down", status=503, code="shutting_down")


@lru_cache(1024)
def protocol_of(path: str) -> Protocol:
    """Say whose error shape a path's callers read; unknown paths are answered in Chat's."""
    parts = path.split("/")
    if "anthropic" in parts or "messages" in parts:
        return "messages"
    return "responses" if "responses" in parts else "chat"


def error_response(call: Call, error: ClientError) -> Response:
    """Build the whole HTTP reply for a failure, in the caller's error shape; note it on the call."""
    call.outcome = error.code
    if error.details is not None:
        call.notes["details"] = error.details
    headers = {}
    if isinstance(error, RetryLaterError):
        headers["retry-after"] = str(error.seconds)
    elif error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(
        error_body(call.protocol, error, flat=call.flat_errors, request_id=call.id),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )
