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

_LONGEST = 1000  # characters of a message, which may repeat a value of any length
_LONGEST_PARAM = 200

Protocol = Literal["chat", "responses", "messages"]
"""The wire protocols an exchange can be opened in."""


class ParsersError(Exception):
    """Root of the tree above."""


class ClientError(ParsersError):
    """The request cannot be served as it stands.

    Args:
        message: what was expected and what came; cut where it is too long to be read.
        status: HTTP status, 400 unless another says more.
        code: machine-readable reason, such as ``context_length_exceeded``.
        param: path of the offending field, such as ``messages[0].content``; None where no single
            field can be named.
        details: more for a program to read; only the Messages form shows it.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request_error",
        param: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        message = _cut(message, _LONGEST)
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = None if param is None else _cut(param, _LONGEST_PARAM)
        self.details = details


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


class ReplyError(ClientError):
    """A policy says that what the model wrote is an error of the reply (HTTP 502)."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, status=502, code=code)


class CodecError(ParsersError):
    """The codec failed on input that had passed our checks: a fault of the server (HTTP 500)."""


class BootError(ParsersError):
    """The model cannot be served: the message names the special token or setting at fault."""


def prompt_error(protocol: Protocol, prompt: int, context: int) -> ClientError:
    """Build the error for a prompt that leaves no room for a reply.

    Agents know it by words, since the Messages form has no code, and shorten their history then
    (NousResearch/hermes-agent#821).

    Args:
        protocol: whose clients read it.
        prompt: its length in tokens.
        context: what the model holds, in tokens.
    """
    return ClientError(
        f"prompt is too long: {prompt} tokens > {context - 1} maximum; the model's maximum context "
        f"length is {context} tokens, a reply included",
        code="context_length_exceeded",
        param="input" if protocol == "responses" else "messages",
    )


def room_error(
    protocol: Protocol, prompt: int, context: int, reply: int, message: str
) -> ClientError:
    """Build the error for a reply that may become longer than the context allows.

    In Messages the words are those by which Claude Code asks again for less
    (musistudio/claude-code-router#1799).

    Args:
        protocol: whose clients read it.
        prompt: its length in tokens.
        context: what the model holds, in tokens.
        reply: how many tokens were asked for.
        message: what the codec says of it, for the other protocols.
    """
    if protocol == "messages":
        message = (
            f"input length and `max_tokens` exceed context limit: {prompt} + {reply} > {context}; "
            "send less or ask for less"
        )
    param = "max_output_tokens" if protocol == "responses" else "max_tokens"
    return ClientError(message, code="context_length_exceeded", param=param)


_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_PHRASES = {
    400: "BadRequestError",
    401: "UnauthorizedError",
    403: "ForbiddenError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "ContentTooLargeError",
    429: "TooManyRequestsError",
    503: "ServiceUnavailableError",
}


def error_body(
    protocol: Protocol, error: ClientError, *, flat: bool = False, request_id: str | None = None
) -> bytes:
    """Write the body of an error reply in the shape its protocol's clients read.

    Args:
        protocol: whose shape.
        error: what went wrong.
        flat: Chat errors in SGLang's form (``Profile.error_body``).
        request_id: id of the request, for the Messages form.

    Returns:
        Chat and Responses: ``{"error": {"message", "type", "param", "code"}}``, the nested form
        that the official API uses and that every OpenAI client reads. Chat, flat:
        ``{"object": "error", "message", "type", "param", "code": <status>}``. Messages:
        ``{"type": "error", "error": {"type", "message"}, "request_id"}``.
    """
    return orjson.dumps(error_object(protocol, error, flat=flat, request_id=request_id))


def error_object(
    protocol: Protocol, error: ClientError, *, flat: bool = False, request_id: str | None = None
) -> dict[str, Any]:
    """Return what ``error_body`` writes."""
    if protocol == "messages":
        kind = _TYPES.get(error.status) or (
            "api_error" if error.status >= 500 else "invalid_request_error"
        )
        inner: dict[str, Any] = {"type": kind, "message": error.message}
        if error.details is not None:
            inner["details"] = error.details
        return {"type": "error", "error": inner, "request_id": request_id}
    if flat and protocol == "chat":
        kind = _PHRASES.get(error.status) or (
            "InternalServerError" if error.status >= 500 else "BadRequestError"
        )
        return {
            "object": "error",
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.status,
        }
    if error.status >= 500:
        kind = "server_error"
    else:
        kind = _TYPES.get(error.status, "invalid_request_error")
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code,
        }
    }
