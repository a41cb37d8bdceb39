"""Fixtures of the suite's own tests: the correct server on a loopback port."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from conformance.load import load_cases
from conformance.model import Case
from tests.conformance.correct_server import CorrectServer


@pytest.fixture(scope="session")
def cases() -> list[Case]:
    return load_cases()


@pytest.fixture(scope="session")
def base_url(cases: list[Case]) -> Iterator[str]:
    """The correct server over HTTP."""
    server = CorrectServer(cases)

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        path = scope["path"]
        body = await request.body()
        reply = server.answer(request.method, path, request.headers, body)
        if path == "/v1/models" and "x-bathyal-script" not in request.headers:
            response: Response = Response(
                b'{"object":"list","data":[{"id":"m","object":"model"}]}',
                media_type="application/json",
            )
        else:

            async def pieces():  # type: ignore[no-untyped-def]
                for piece in reply.chunks:
                    yield piece

            response = StreamingResponse(pieces(), reply.status, reply.headers)
        await response(scope, receive, send)

    config = uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="off")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    running.should_exit = True
    thread.join()
