"""What a request must pass before anything is computed for it.

Its body is measured while it is read, so that a chunked body of unknown length is refused as soon
as it has grown too large and not after it has filled the memory; and it has to arrive in time, so
that a client that sends a byte a minute holds no place. The content type is not looked at: clients
are known to send none, and the parser of each protocol says clearly what is wrong with a body that
is no JSON. A content encoding is refused by name: a small compressed body can hold any amount.
"""

from __future__ import annotations

import asyncio

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from gateway.call import header, whole_number
from gateway.threads import LONG_COPY, in_thread_if
from parsers import ClientError


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """Read a request body of at most `limit` bytes within `seconds`.

    Raises:
        ClientError: status 413, the body is larger; 415, it is compressed; 408, it came too slowly.
        starlette.requests.ClientDisconnect: the client left while sending.
    """
    headers = request.scope["headers"]
    encoding = header(headers, b"content-encoding").strip().lower()
    if encoding not in ("", "identity"):
        raise ClientError(
            f"content-encoding: expected none, got {encoding[:60]!r}; send the body as it is",
            status=415,
            code="unsupported_content_encoding",
            param=None,
        )
    declared = whole_number(header(headers, b"content-length"))
    if declared is not None and declared > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(seconds):
            return await _read(request.receive, limit)
    except TimeoutError:
        raise ClientError(
            f"the request body did not arrive within {seconds:g} s",
            status=408,
            code="request_body_timeout",
            param=None,
        ) from None


async def _read(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        more = message.get("more_body", False)
    return await in_thread_if(size >= LONG_COPY, b"".join, parts)


def _too_large(limit: int) -> ClientError:
    return ClientError(
        f"the request body is larger than {limit} bytes, the most this server reads",
        status=413,
        code="request_too_large",
        param=None,
    )


def check_counts(body: bytes, max_messages: int, max_tools: int) -> None:
    """Refuse a body with more messages (or input items) or tools than the server takes.

    What else is wrong with it the protocol's parser says.

    Raises:
        ClientError: 400, with the field, its limit and its length.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return
    if not isinstance(fields, dict):
        return
    for name, most in (
        ("messages", max_messages),
        ("input", max_messages),
        ("tools", max_tools),
    ):
        value = fields.get(name)
        if isinstance(value, list) and len(value) > most:
            raise ClientError(
                f"{name}: expected at most {most} entries, got {len(value)}",
                code="too_many_entries",
                param=name,
            )
