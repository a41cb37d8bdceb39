"""The errors of the parsers: whose fault, where, what was expected, what came.

    ParsersError
      ClientError   the request is wrong; carries the HTTP status and the field
      ReplyError    the model's reply broke a rule the caller set to be an error
      CodecError    the codec refused something that we handed it; ours to mend
      BootError     a model cannot be served with this tokenizer

What a model got wrong in its output is data (``parsers.report``), not an exception.
"""

from __future__ import annotations

from typing import Any, Literal

import orjson

Protocol = Literal["chat"]
"""The wire protocols an exchange can be opened in."""


class ParsersError(Exception):
    """Root of the tree above."""


class ClientError(ParsersError):
    """The request cannot be served as it stands.

    Args:
        message: what was expected and what came.
        status: HTTP status, 400 unless another says more.
        code: machine-readable reason, such as ``context_length_exceeded``.
        param: path of the offending field, such as ``messages[0].content``; None where no single
            field can be named.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request_error",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param


class ReplyError(ClientError):
    """A policy says that what the model wrote is an error of the reply (HTTP 502)."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, status=502, code=code)


class CodecError(ParsersError):
    """The codec failed on input that had passed our checks: a fault of the server (HTTP 500)."""


class BootError(ParsersError):
    """The model cannot be served: the message names the special token or setting at fault."""


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_body(protocol: Protocol, error: ClientError) -> bytes:
    """Write the body of an error reply in the shape its protocol's clients read.

    Args:
        protocol: whose shape.
        error: what went wrong.

    Returns:
        Chat: ``{"error": {"message", "type", "param", "code"}}``, the nested form that the official
        API uses and that every OpenAI client reads.
    """
    return orjson.dumps({"error": error_object(error)})


def error_object(error: ClientError) -> dict[str, Any]:
    """Return the inner object of the nested OpenAI error form."""
    if error.status >= 500:
        kind = "server_error"
    else:
        kind = _TYPES.get(error.status, "invalid_request_error")
    return {"message": error.message, "type": kind, "param": error.param, "code": error.code}
