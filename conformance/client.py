"""Sends one request and keeps everything: bytes, arrival times, headers, faults.

Knows HTTP and nothing of protocols. A `Sender` is the seam: `HttpSender` talks to a URL, tests
give the runner a function of their own.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import httpx


@dataclass(frozen=True, slots=True)
class Request:
    """What goes to the endpoint.

    Attributes:
        method: HTTP method.
        path: Path below the base URL, with a leading slash.
        headers: Extra headers; credentials are added by the sender and never kept here.
        body: Body bytes, b"" for none.
        leave_after: Number of body bytes after which the client hangs up, None for never.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    leave_after: int | None = None


@dataclass(slots=True)
class Exchange:
    """One request with everything that came back.

    Attributes:
        request: What was sent.
        status: HTTP status, 0 if no response began.
        headers: Response headers, names in lower case.
        reads: (seconds since the request was sent, bytes) for each read of the body.
        fault: Text of a transport fault, None if the reply ended properly.
        url: Full URL, for the curl line.
    """

    request: Request
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    fault: str | None = None
    url: str = ""

    @property
    def body(self) -> bytes:
        """The response body."""
        return b"".join(piece for _, piece in self.reads)

    def arrival(self, offset: int) -> float:
        """Seconds after which the first `offset` bytes of the body were there."""
        seen = 0
        for at, piece in self.reads:
            seen += len(piece)
            if seen >= offset:
                return at
        return self.reads[-1][0] if self.reads else 0.0

    def curl(self, key_env: str | None = None) -> str:
        """A shell line that sends the same bytes.

        Args:
            key_env: Name of the environment variable with the API key, None for no key.
        """
        parts = ["curl", "-sS", "-N", "-i", "-X", self.request.method, shlex.quote(self.url)]
        for name, value in self.request.headers.items():
            parts += ["-H", shlex.quote(f"{name}: {value}")]
        if key_env:
            parts += ["-H", f'"Authorization: Bearer ${key_env}"']
        if self.request.body:
            try:
                parts += ["--data-binary", shlex.quote(self.request.body.decode())]
            except UnicodeDecodeError:
                octal = "".join(f"\\{byte:03o}" for byte in self.request.body)
                return f"printf '{octal}' | {' '.join(parts)} --data-binary @-"
        return " ".join(parts)


class Sender(Protocol):
    """Anything that turns a request into an exchange."""

    async def send(self, request: Request) -> Exchange:
        """Sends `request`; transport faults are reported in the exchange, not raised."""


# Names of the transport's errors for a connection that ended before the reply.
_CLOSED = ("ReadError", "RemoteProtocolError", "WriteError")


class HttpSender:
    """Sends over HTTP with one connection pool.

    Args:
        base_url: Root of the endpoint, such as "http://127.0.0.1:8000"; a path that ends in "/v1"
            is taken off since the cases name full paths.
        key: API key or None; sent as a bearer token and as x-api-key.
        timeout_s: Seconds to wait for connect and between two reads.
        connections: Most connections open at a time.
    """

    def __init__(
        self,
        base_url: str,
        *,
        key: str | None = None,
        timeout_s: float = 30.0,
        connections: int = 8,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"accept-encoding": "identity"}
        if key:
            headers |= {"authorization": f"Bearer {key}", "x-api-key": key}
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=False,
        )

    async def send(self, request: Request) -> Exchange:
        """Sends `request` and reads the whole reply, or `leave_after` bytes of it.

        A kept connection that the server closed at that very moment gives an error before any
        byte; that is nobody's fault, so the request is sent once more.
        """
        exchange = await self._once(request)
        if exchange.status == 0 and exchange.fault and exchange.fault.startswith(_CLOSED):
            return await self._once(request)
        return exchange

    async def _once(self, request: Request) -> Exchange:
        exchange = Exchange(request, url=self.base_url + request.path)
        began = time.perf_counter()
        seen = 0
        try:
            async with self._client.stream(
                request.method, exchange.url, headers=dict(request.headers), content=request.body
            ) as response:
                exchange.status = response.status_code
                exchange.headers = {k.lower(): v for k, v in response.headers.items()}
                async for piece in response.aiter_raw():
                    exchange.reads.append((time.perf_counter() - began, piece))
                    seen += len(piece)
                    if request.leave_after is not None and seen >= request.leave_after:
                        break
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            exchange.fault = f"{type(error).__name__}: {error}"
        return exchange

    async def aclose(self) -> None:
        """Closes the pool."""
        await self._client.aclose()
