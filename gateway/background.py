"""Responses that are answered before they are there (`background: true`), and what is kept.

The exchange runs as a stream that nobody reads: its first event holds the response as it stands at
the beginning, its last one as it ended. Both go to the store, where the client fetches it; a cancel
ends the generation and leaves a cancelled response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson

from gateway.call import Call
from gateway.errors import RetryLaterError, ServerError, shutting_down
from gateway.service import Service
from gateway.store import StoreError
from gateway.threads import in_thread
from parsers import ClientError, Exchange
from parsers.body import check_nesting

logger = logging.getLogger(__name__)

#: Most background replies at once; they hold no connection that would bound them.
MOST = 64


def is_background(body: bytes) -> bool:
    """Say whether a Responses body asks for a reply in the background.

    Raises:
        ClientError: for one that is to be streamed too, which is not offered.
    """
    fields = _object(body) if b'"background"' in body else {}
    if fields.get("background") is not True:
        return False
    if fields.get("stream") is True:
        raise ClientError(
            "background: a response is either streamed or made in the background, not both",
            code="unsupported_parameter",
            param="background",
        )
    return True


def with_stream(body: bytes) -> bytes:
    """Ask for a stream in a body that asks for none.

    Raises:
        ClientError: it is nested too deep to be written.
    """
    fields = _object(body)
    check_nesting(body, fields)
    return orjson.dumps({**fields, "stream": True})


class Background:
    """The background replies of a server.

    Args:
        service: holds the store and the running tasks.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def begin(
        self,
        call: Call,
        exchange: Exchange,
        response_id: str,
        frames: AsyncGenerator[list[bytes], None],
    ) -> bytes:
        """Start a reply and return its response object as it stands at the beginning.

        Raises:
            ClientError: 503, too many are running; or the backend refuses it at once.
        """
        tasks = self._service.tasks
        if len(tasks) >= MOST:
            raise RetryLaterError(
                f"{MOST} responses are made in the background, and no more are taken",
                status=503,
                code="queue_full",
                seconds=5,
            )
        begun: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(call.key, exchange, response_id, frames, begun))
        tasks[response_id] = task
        task.add_done_callback(lambda _: tasks.pop(response_id, None))
        return await begun

    async def _run(
        self,
        owner: str,
        exchange: Exchange,
        response_id: str,
        frames: AsyncGenerator[list[bytes], None],
        begun: asyncio.Future[bytes],
    ) -> None:
        last: list[bytes] = []
        try:
            async with aclosing(frames):
                async for step in frames:
                    if not begun.done():
                        first = _response(step[0])
                        await self._put(owner, exchange, first)
                        begun.set_result(orjson.dumps(first))
                    last = step
        except asyncio.CancelledError:
            if not begun.done():
                begun.set_exception(shutting_down())
                return
            response = _failed(exchange, shutting_down())
            if self._service.serving:  # it was the client who cancelled
                response |= {"status": "cancelled", "error": None}
            await self._put(owner, exchange, response)
        except ClientError as failure:
            await self._failed(owner, exchange, begun, failure)
        except Exception:
            logger.exception("a background response broke")
            await self._failed(owner, exchange, begun, ServerError("internal error"))
        else:
            if exchange.error is not None:  # a policy's refusal: its event is the last one
                await self._put(owner, exchange, _response(last[-1]))

    async def _failed(
        self, owner: str, exchange: Exchange, begun: asyncio.Future[bytes], failure: ClientError
    ) -> None:
        if not begun.done():
            begun.set_exception(failure)
            return
        await self._put(owner, exchange, _failed(exchange, failure))

    async def _put(self, owner: str, exchange: Exchange, response: dict[str, Any]) -> None:
        store, stored = self._service.store, exchange.stored
        if store is None or stored is None:
            return
        record = {
            "input": [*stored.history, *stored.items],
            "output": response.get("output", []),
            "response": response,
        }
        try:
            await in_thread(lambda: store.put(response["id"], owner, orjson.dumps(record)))
        except StoreError:
            logger.exception("a response is not kept")


def _failed(exchange: Exchange, failure: ClientError) -> dict[str, Any]:
    frames = exchange.fail(failure.message, code=failure.code, status=failure.status)
    return _response(frames[-1])


def _response(frame: bytes) -> dict[str, Any]:
    """Take the response object out of an event."""
    event = orjson.loads(frame.partition(b"\ndata: ")[2])
    response: dict[str, Any] = event["response"]
    return response


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}
