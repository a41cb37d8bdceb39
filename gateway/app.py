"""The ASGI application: routes, start and stop, and the shape of every error.

Pure ASGI throughout: no BaseHTTPMiddleware, which would put a queue between a stream and its socket.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.backends import Backend
from gateway.endpoints import Endpoints
from gateway.errors import ServerError, error_response
from gateway.generation import in_thread
from gateway.settings import Settings
from parsers import ClientError, Codec, ServedModel

logger = logging.getLogger(__name__)


def create_app(settings: Settings, backend: Backend) -> Starlette:
    """Build the application around a backend that has not been started.

    The application's lifespan loads the codec (whose start-up check comes first, because it is
    quick), starts the backend, and stops it at the end.

    Args:
        settings: limits, intervals and the names of the model.
        backend: what generates.

    Raises:
        parsers.BootError: on start-up: the tokenizer cannot serve this model.
        engine.api.EngineError: on start-up: the backend cannot serve it.
    """
    model = served_model(settings, backend)
    endpoints = Endpoints(settings, backend, model)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        codec = await in_thread(Codec.load, model)
        try:
            await backend.start()
            endpoints.codec = codec
            yield
        finally:
            endpoints.codec = None
            await backend.stop()

    routes = [
        Route(path, endpoints.chat, methods=["POST"])
        for path in ("/v1/chat/completions", "/chat/completions")
    ]
    for prefix in ("/v1", ""):
        routes += [
            Route(f"{prefix}/models", endpoints.models, methods=["GET"]),
            Route(f"{prefix}/models/{{model_id:path}}", endpoints.model_by_id, methods=["GET"]),
        ]
    routes += [
        Route("/parse_function_call", endpoints.parse_function_call, methods=["POST"]),
        Route("/health", endpoints.health, methods=["GET"]),
        Route("/healthz", endpoints.health, methods=["GET"]),
        Route("/readyz", endpoints.ready, methods=["GET"]),
        Route("/", endpoints.root, methods=["GET"]),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(RequestId)],
        exception_handlers={HTTPException: _no_route, Exception: _bug},
    )
    app.router.redirect_slashes = False  # a redirected POST loses its body with many clients
    return app


def served_model(settings: Settings, backend: Backend) -> ServedModel:
    """Describe the model to the parsers; the settings' names go before the backend's."""
    info = backend.info
    return ServedModel(
        name=settings.name or info.name,
        version=info.version,
        tokenizer_path=info.tokenizer_path,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        aliases=settings.aliases or info.aliases,
        has_vision=info.has_vision,
    )


class RequestId:
    """Gives every reply an `x-request-id`: the client's own, or a fresh one.

    An id that is longer than 128 characters or holds anything but visible ASCII is replaced, so that
    no header and no log line can be forged with it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; add the header to the reply."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if re.fullmatch(r"[!-~]{1,128}", given) else uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405 in the nested error body; the Allow header of a 405 stays."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message, code = f"{what}: this path takes {allowed} only", "method_not_allowed"
    else:
        message, code = f"{what}: there is no such path", "not_found"
    response = error_response(
        "chat", ClientError(message, status=error.status_code, code=code, param=None)
    )
    response.headers.update(error.headers or {})
    return response


async def _bug(request: Request, error: Exception) -> Response:
    """500 without inside knowledge; Starlette re-raises, so the server logs the traceback."""
    return error_response("chat", ServerError("internal error"))
