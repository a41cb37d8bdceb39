"""The ASGI application: routes, start and stop, and the shape of every error.

Pure ASGI throughout: no BaseHTTPMiddleware, which would put a queue between a stream and its socket.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.backends import Backend
from gateway.call import Call
from gateway.endpoints import Endpoints, Handler
from gateway.errors import error_response
from gateway.front import Front
from gateway.keys import Keys
from gateway.metrics import Metrics
from gateway.plain import PlainEndpoints
from gateway.service import Service
from gateway.settings import Settings
from gateway.stored import StoredResponses
from parsers import ClientError, ServedModel

#: Characters of a path that a 404 repeats.
_SHOWN_PATH = 200


def create_app(settings: Settings, backend: Backend) -> Starlette:
    """Build the application around a backend that has not been started.

    The application's lifespan loads the codec (whose start-up check comes first, because it is
    quick), opens the store, starts the backend, and stops it all at the end.

    Args:
        settings: limits, intervals and the names of the model.
        backend: what generates.

    Raises:
        gateway.settings.SettingsError: the file of keys is wrong.
        parsers.BootError: on start-up: the tokenizer cannot serve this model.
        gateway.store.StoreError: on start-up: the file of responses cannot be used.
        engine.api.EngineError: on start-up: the backend cannot serve it.
    """
    model = served_model(settings, backend)
    keys = Keys.load(settings)
    metrics = Metrics(backend.stats)
    service = Service(settings, backend, model, metrics)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            await service.start()
            yield
        finally:
            await service.stop()

    making = Endpoints(service).handlers
    app = Starlette(routes=_routes(service, making), lifespan=lifespan)
    app.router.redirect_slashes = False  # a redirected POST loses its body with many clients
    # In place of Starlette's own layers: Front answers a bug with a 500, and nothing stands between
    # a stream's frames and the server's send.
    app.middleware_stack = Front(
        ExceptionMiddleware(app.router, handlers={HTTPException: _no_route}),
        making=making,
        keys=keys,
        metrics=metrics,
        max_open_requests=settings.max_open_requests,
        flat_errors=service.profile.error_body == "flat",
    )
    return app


def _routes(service: Service, making: Mapping[str, Handler]) -> list[Route]:
    """List every endpoint under its one canonical path; `gateway.front` knows the others."""
    stored, plain = StoredResponses(service), PlainEndpoints(service)
    return [
        *(Route(path, handler, methods=["POST"]) for path, handler in making.items()),
        Route("/v1/messages/count_tokens", plain.count_tokens, methods=["POST"]),
        Route("/v1/responses/{id}", stored.one, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/input_items", stored.input_items, methods=["GET"]),
        Route("/v1/responses/{id}/cancel", stored.cancel, methods=["POST"]),
        Route("/v1/models", plain.models, methods=["GET"]),
        Route("/v1/models/{model_id:path}", plain.model_by_id, methods=["GET"]),
        Route("/v1/tokenize", plain.tokenize, methods=["POST"]),
        Route("/parse_function_call", plain.parse_function_call, methods=["POST"]),
        Route("/separate_reasoning", plain.separate_reasoning, methods=["POST"]),
        Route("/health", plain.health, methods=["GET"]),
        Route("/healthz", plain.health, methods=["GET"]),
        Route("/readyz", plain.ready, methods=["GET"]),
        Route("/metrics", plain.prometheus, methods=["GET"]),
        Route("/", plain.root, methods=["GET"]),
    ]


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
        vocab_size=info.vocab_size,
    )


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405 in the caller's error shape; the Allow header of a 405 stays."""
    assert isinstance(error, HTTPException)
    call = Call.of(request.scope)
    what = f"{request.method} {call.path[:_SHOWN_PATH]}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message, code = f"{what}: this path takes {allowed} only", "method_not_allowed"
    else:
        message, code = f"{what}: there is no such path", "not_found"
    response = error_response(
        call, ClientError(message, status=error.status_code, code=code, param=None)
    )
    response.headers.update(error.headers or {})
    return response
