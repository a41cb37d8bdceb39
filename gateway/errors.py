"""Failures as HTTP replies, before the headers are sent.

The client's fault is a parsers.ClientError; ours or the backend's is a ServerError. Both are told to
the client in its protocol's shape. After the headers a failure is a frame, which Exchange.fail writes.
"""

from __future__ import annotations

from starlette.responses import Response

from parsers import ClientError, error_body
from parsers.errors import Protocol


class ServerError(ClientError):
    """An error that is told to the client but is none of its making.

    Args:
        message: what failed, fit to be shown to a client.
        status: HTTP status, 500 or above.
        code: machine-readable reason.
    """

    def __init__(self, message: str, *, status: int = 500, code: str = "internal_error") -> None:
        super().__init__(message, status=status, code=code)


def not_served() -> ServerError:
    """What a client hears while the model is not loaded, or no more."""
    return ServerError("the model is not being served", status=503, code="backend_unavailable")


def shutting_down() -> ServerError:
    """What a client hears whose reply outlasts the server."""
    return ServerError("the server is shutting down", status=503, code="shutting_down")


def error_response(protocol: Protocol, error: ClientError) -> Response:
    """Build the whole HTTP reply for a failure, in the caller's error shape."""
    return Response(
        error_body(protocol, error), status_code=error.status, media_type="application/json"
    )
