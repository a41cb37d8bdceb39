"""The endpoints that make no tokens: models, health, counters, counting, parsing."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from gateway.call import Call
from gateway.errors import error_response
from gateway.service import Service, json_response
from gateway.threads import in_thread
from parsers import ClientError, Codec, parse_function_call, separate_reasoning
from parsers.body import fail, parse_object
from parsers.schemas import check_size

#: SGLang's names of the parsers whose families we parse, spelled without separators.
_PARSER_NAMES = frozenset({"deepseekv4", "deepseekv41"})


class PlainEndpoints:
    """The handlers of one server.

    Args:
        service: what all handlers share.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    async def parse_function_call(self, request: Request) -> Response:
        """POST /parse_function_call, in SGLang's shape: raw model output in, text and calls out."""
        return await self._service.reply(request, _parsed)

    async def separate_reasoning(self, request: Request) -> Response:
        """POST /separate_reasoning, in SGLang's shape: raw model output in, both its parts out."""
        return await self._service.reply(request, _separated)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens: the length of the prompt that would be generated from."""
        return await self._service.reply(request, _counted, "messages")

    async def tokenize(self, request: Request) -> Response:
        """POST /v1/tokenize: the ids of a `prompt`, or of the prompt of a chat's `messages`."""
        return await self._service.reply(request, _tokenized, "chat")

    async def models(self, request: Request) -> Response:
        """GET /v1/models, with the fields that the OpenAI and the Anthropic SDK read."""
        names = self._service.model.names
        return json_response(
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
        name, model = request.path_params["model_id"], self._service.model
        if not model.answers_to(name):
            return error_response(
                Call.of(request.scope),
                ClientError(
                    f"there is no model {name!r} here; this server has {model.name!r}",
                    status=404,
                    code="model_not_found",
                    param="model",
                ),
            )
        return json_response(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        context = self._service.model.max_model_len
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "bathyal",
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": context,
            "max_tokens": context,
        }

    async def health(self, request: Request) -> Response:
        """GET /health and /healthz: this process answers."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /readyz: 200 while requests can be served, 503 otherwise."""
        if not self._service.serving:
            return json_response({"status": "not started"}, status=503)
        if not self._service.backend.stats().alive:
            return json_response({"status": "the backend has ended"}, status=503)
        return json_response({"status": "ready", "model": self._service.model.name})

    async def prometheus(self, request: Request) -> Response:
        """GET /metrics, in Prometheus' text form."""
        return Response(
            await in_thread(self._service.metrics.text),
            headers={"content-type": CONTENT_TYPE_LATEST},
        )

    async def root(self, request: Request) -> Response:
        """GET and HEAD /: some clients look here first; tells a person where to go."""
        return json_response(
            {"server": "bathyal", "models": "/v1/models", "chat": "/v1/chat/completions"}
        )


def _counted(codec: Codec, body: bytes) -> bytes:
    return orjson.dumps({"input_tokens": len(codec.prompt_ids("messages", body))})


def _tokenized(codec: Codec, body: bytes) -> bytes:
    """Answer /v1/tokenize in SGLang's shape."""
    fields = parse_object(body)
    given = [name for name in ("prompt", "messages") if name in fields]
    if len(given) != 1:
        found = " and ".join(given) or "neither"
        raise ClientError(f"expected one of prompt and messages, got {found}", param="prompt")
    ids: Any
    if given == ["messages"]:
        ids = codec.prompt_ids("chat", body)
    elif isinstance(fields["prompt"], str):
        ids = codec.tokenize(fields["prompt"])
    else:
        raise fail("prompt", "a string", fields["prompt"])
    return orjson.dumps(
        {"tokens": ids, "count": len(ids), "max_model_len": codec.model.max_model_len}
    )


def _parsed(codec: Codec, body: bytes) -> bytes:
    """Answer /parse_function_call; the fields of the result are the names of SGLang's reply."""
    codec.check_chat()
    text, tools = _parse_request(parse_object(body))
    return orjson.dumps(parse_function_call(codec, text, tools))


def _separated(codec: Codec, body: bytes) -> bytes:
    """Answer /separate_reasoning: `text`, `reasoning_parser`, `return_blocks`."""
    codec.check_chat()
    fields = parse_object(body)
    text, blocks = fields.get("text"), fields.get("return_blocks") or False
    if not isinstance(text, str):
        raise fail("text", "a string", text)
    if not isinstance(blocks, bool):
        raise fail("return_blocks", "true or false", blocks)
    _check_family(fields, "reasoning_parser", _PARSER_NAMES)
    return orjson.dumps(separate_reasoning(text).reply(blocks=blocks))


def _parse_request(fields: dict[str, Any]) -> tuple[str, list[Any]]:
    """Read the body of /parse_function_call: `text`, `tools` (may be absent), `tool_call_parser`."""
    text = fields.get("text")
    if not isinstance(text, str):
        raise fail("text", "a string", text)
    tools = [] if fields.get("tools") is None else fields["tools"]
    if not isinstance(tools, list):
        raise fail("tools", "a list of tools", tools)
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise fail(f"tools[{i}].function", "an object with a name", function)
        check_size(function.get("parameters"), f"tools[{i}].function.parameters")
    _check_family(fields, "tool_call_parser", _PARSER_NAMES)
    return text, tools


def _check_family(fields: dict[str, Any], name: str, known: frozenset[str]) -> None:
    family = fields.get(name)
    if family is not None and (
        not isinstance(family, str) or re.sub(r"[-_.]", "", family.lower()) not in known
    ):
        raise fail(name, f"one of {', '.join(sorted(known))}", family)
