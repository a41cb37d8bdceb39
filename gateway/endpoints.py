"""What each URL does. One handler serves every protocol: only its name differs.

Knows requests and replies; what a protocol's bytes mean is parsers' affair, how tokens are made is
the backend's.
"""

from __future__ import annotations

import asyncio
import re
import time
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.admission import read_body
from gateway.backends import Backend
from gateway.errors import error_response, not_served, shutting_down
from gateway.generation import THREAD_FROM_BYTES, in_thread, reply_frames, to_request
from gateway.settings import Settings
from gateway.sse import EventStream, until_disconnect
from parsers import ClientError, Codec, Exchange, ServedModel, parse_function_call
from parsers.errors import Protocol

#: SGLang's names of the parsers whose families we parse, spelled without separators.
_PARSER_NAMES = frozenset({"deepseekv4", "deepseekv41"})


class Endpoints:
    """The handlers of one server.

    Args:
        settings: limits and intervals.
        backend: generates; started and stopped by the application's lifespan.
        model: what is served, under which names.
    """

    def __init__(self, settings: Settings, backend: Backend, model: ServedModel) -> None:
        self.settings = settings
        self.backend = backend
        self.model = model
        self.codec: Codec | None = None  # set by the lifespan once its check has passed
        self._created = int(time.time())

    async def chat(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        return await self._generate("chat", request)

    async def _generate(self, protocol: Protocol, request: Request) -> ASGIApp:
        def refuse(failure: ClientError) -> Response:
            return error_response(protocol, failure)

        codec = self.codec
        if codec is None:
            return refuse(not_served())
        exchange_id = str(uuid4())
        try:
            body = await read_body(request, self.settings.max_body_bytes)
            if len(body) < THREAD_FROM_BYTES:
                exchange = codec.open_exchange(protocol, body, exchange_id=exchange_id)
            else:
                exchange = await in_thread(
                    codec.open_exchange, protocol, body, exchange_id=exchange_id
                )
        except ClientError as error:
            return refuse(error)
        except ClientDisconnect:
            return _nobody_listens()

        generation = to_request(
            exchange,
            request_id=exchange_id,
            stop_token_ids=self.model.eos_token_ids,
            script=request.headers.get("x-bathyal-script"),
        )
        frames = reply_frames(self.backend, exchange, generation)
        headers = _notes(exchange)
        if exchange.stream:
            return EventStream(
                frames,
                fail=exchange.fail,
                refuse=refuse,
                keep_alive_seconds=self.settings.keep_alive_seconds,
                headers=headers,
            )

        async def whole() -> Response:
            try:
                async for _ in frames:
                    pass
                body = exchange.body()
            except ClientError as failure:
                return refuse(failure)
            return Response(body, media_type="application/json", headers=headers)

        try:
            return await until_disconnect(request.receive, whole()) or _nobody_listens()
        except asyncio.CancelledError:  # as for a stream: the server ends before the reply does
            return refuse(shutting_down())

    async def parse_function_call(self, request: Request) -> Response:
        """POST /parse_function_call, in SGLang's shape: raw model output in, text and calls out."""
        codec = self.codec
        if codec is None:
            return error_response("chat", not_served())
        try:
            body = await read_body(request, self.settings.max_body_bytes)
            if len(body) < THREAD_FROM_BYTES:
                reply = _parsed(codec, body)
            else:
                reply = await in_thread(_parsed, codec, body)
        except ClientError as error:
            return error_response("chat", error)
        except ClientDisconnect:
            return _nobody_listens()
        return Response(reply, media_type="application/json")

    async def models(self, request: Request) -> Response:
        """GET /v1/models, with the fields that the OpenAI and the Anthropic SDK read."""
        names = self.model.names
        return _json(
            {
                "object": "list",
                "data": [self._model(name) for name in names],
                "has_more": False,
                "first_id": names[0],
                "last_id": names[-1],
            }
        )

    async def model_by_id(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        name = request.path_params["model_id"]
        if name not in self.model.names:
            return error_response(
                "chat",
                ClientError(
                    f"there is no model {name!r} here; this server has {self.model.name!r}",
                    status=404,
                    code="model_not_found",
                    param="model",
                ),
            )
        return _json(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "bathyal",
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": self.model.max_model_len,
            "max_tokens": self.model.max_model_len,
        }

    async def health(self, request: Request) -> Response:
        """GET /health and /healthz: this process answers."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /readyz: 200 while requests can be served, 503 otherwise."""
        if self.codec is None:
            return _json({"status": "not started"}, status=503)
        if not self.backend.stats().alive:
            return _json({"status": "the backend has ended"}, status=503)
        return _json({"status": "ready", "model": self.model.name})

    async def root(self, request: Request) -> Response:
        """GET and HEAD /: some clients look here first; tells a person where to go."""
        return _json({"server": "bathyal", "models": "/v1/models", "chat": "/v1/chat/completions"})


def _parsed(codec: Codec, body: bytes) -> bytes:
    """Answer /parse_function_call; the fields of the result are the names of SGLang's reply."""
    text, tools = _parse_request(body)
    return orjson.dumps(parse_function_call(codec, text, tools))


def _parse_request(body: bytes) -> tuple[str, list[Any]]:
    """Read the body of /parse_function_call: `text`, `tools` (may be absent), `tool_call_parser`."""

    def wrong(message: str, param: str | None) -> ClientError:
        return ClientError(message, status=400, code="invalid_request_error", param=param)

    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise wrong(f"the body is not JSON: {error}", None) from None
    if not isinstance(fields, dict):
        raise wrong(f"the body must be a JSON object, got {type(fields).__name__}", None)
    text = fields.get("text")
    if not isinstance(text, str):
        raise wrong(f"text: expected a string, got {type(text).__name__}", "text")
    tools = [] if fields.get("tools") is None else fields["tools"]
    if not isinstance(tools, list):
        raise wrong(f"tools: expected a list of tools, got {type(tools).__name__}", "tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise wrong(
                f"tools[{i}].function: expected an object with a name", f"tools[{i}].function"
            )
    family = fields.get("tool_call_parser")
    if family is not None and (
        not isinstance(family, str) or re.sub(r"[-_.]", "", family.lower()) not in _PARSER_NAMES
    ):
        raise wrong(
            f"tool_call_parser: this server parses {', '.join(sorted(_PARSER_NAMES))}, got {family!r}",
            "tool_call_parser",
        )
    return text, tools


def _notes(exchange: Exchange) -> dict[str, str]:
    """Headers that say what was not done: fields of the request that have no effect."""
    names = [
        name for name in exchange.ignored if re.fullmatch(r"[\w.\-\[\]]{1,64}", name, re.ASCII)
    ]
    return {"x-bathyal-ignored": ", ".join(names)} if names else {}


def _nobody_listens() -> Response:
    return Response(status_code=499)  # reaches no client; the status is for the access log


def _json(content: object, *, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")
