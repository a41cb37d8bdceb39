"""The endpoints of kept responses: fetch, forget, list the input, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.call import Call, whole_number
from gateway.service import Service, json_response
from gateway.threads import in_thread
from parsers import ClientError

_MOST_ITEMS = 100


class StoredResponses:
    """The handlers of `/v1/responses/{id}` and below.

    Args:
        service: holds the store and the running tasks.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def one(self, request: Request) -> Response:
        """GET and DELETE /v1/responses/{id}."""
        if request.method == "DELETE":
            return await self._delete(request)
        if request.query_params.get("stream", "false") != "false":
            why = "stream: a kept response is not streamed again; fetch it whole"
            error = ClientError(why, code="unsupported_parameter", param="stream")
            return self._service.refuse(request, error)
        return await self._answer(request, lambda record: record["response"])

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/{id}/input_items, newest first unless `order=asc`."""
        return await self._answer(request, lambda record: _page(request, record))

    async def _delete(self, request: Request) -> Response:
        response_id, owner = request.path_params["id"], Call.of(request.scope).key
        await self._stop(response_id, owner)
        store = self._service.store
        if store is None or not await in_thread(store.delete, response_id, owner):
            return self._service.refuse(request, _unknown(response_id))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel: for responses that are made in the background."""
        response_id, owner = request.path_params["id"], Call.of(request.scope).key
        await self._stop(response_id, owner)

        def cancelled(record: dict[str, Any]) -> Any:
            if record["response"].get("background") is not True:
                raise ClientError(
                    f"response {response_id!r} is not made in the background; only such can be"
                    " cancelled",
                    code="not_cancellable",
                    param="id",
                )
            return record["response"]

        return await self._answer(request, cancelled)

    async def _stop(self, response_id: str, owner: str) -> None:
        """End a background reply of this owner and wait until it has left its last state."""
        task = self._service.tasks.get(response_id)
        store = self._service.store
        if task is None or store is None:
            return
        if await in_thread(store.get, response_id, owner) is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _answer(self, request: Request, make: Callable[[dict[str, Any]], Any]) -> Response:
        response_id, store = request.path_params["id"], self._service.store
        owner = Call.of(request.scope).key

        def work() -> bytes:
            record = None if store is None else store.get(response_id, owner)
            if record is None:
                raise _unknown(response_id)
            return orjson.dumps(make(orjson.loads(record)))

        try:
            return json_response(await in_thread(work))
        except ClientError as error:
            return self._service.refuse(request, error)


def _page(request: Request, record: dict[str, Any]) -> dict[str, Any]:
    """List input items; the ones a client sent without an id get one from their place."""
    response_id = record["response"]["id"]
    items = [
        {"id": f"{response_id}_input_{index}", **_listed(item)}
        for index, item in enumerate(record["input"])
    ]
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ClientError(f"order: expected asc or desc, got {order!r}", param="order")
    if order == "desc":
        items.reverse()
    after = request.query_params.get("after")
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise ClientError(f"after: there is no item {after!r}", param="after")
        items = items[ids.index(after) + 1 :]
    text = request.query_params.get("limit", "20")
    most = whole_number(text)
    if most is None or not 1 <= most <= _MOST_ITEMS:
        raise ClientError(f"limit: expected 1 to {_MOST_ITEMS}, got {text!r}", param="limit")
    shown = items[:most]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > len(shown),
    }


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """Write a message's short forms out: clients of this list read typed items with parts."""
    if "role" not in item:
        return item
    content, made = item.get("content"), item["role"] == "assistant"
    if isinstance(content, str):
        content = [{"type": "output_text" if made else "input_text", "text": content}]
    return {**item, "type": "message", "content": content}


def _unknown(response_id: str) -> ClientError:
    return ClientError(
        f"there is no response {response_id!r} here", status=404, code="not_found", param="id"
    )
