"""What a request must pass before anything is computed for it.

Today that is the size of its body, measured while it is read, so that a chunked body of unknown
length is refused as soon as it has grown too large and not after it has filled the memory. The
content type is not looked at: clients are known to send none, and the parser of each protocol says
clearly what is wrong with a body that is no JSON.
"""

from __future__ import annotations

from starlette.requests import Request

from parsers import ClientError


async def read_body(request: Request, limit: int) -> bytes:
    """Read a request body of at most `limit` bytes.

    Raises:
        ClientError: status 413, the body is larger.
        starlette.requests.ClientDisconnect: the client left while sending.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit: int) -> ClientError:
    return ClientError(
        f"the request body is larger than {limit} bytes, the most this server reads",
        status=413,
        code="request_too_large",
        param=None,
    )
