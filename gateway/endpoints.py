"""The endpoints that make tokens. One handler serves every protocol: only its name differs.

Knows requests and replies; what a protocol's bytes mean is parsers' affair, how tokens are made is
the backend's.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.admission import check_counts
from gateway.background import Background, is_background, with_stream
from gateway.call import CLIENT_LEFT_STATUS, Call, header
from gateway.deadlines import Limits
from gateway.errors import RefusedError, error_response, not_served, shutting_down
from gateway.generation import Generations, Reply
from gateway.prefill import DEFAULT_PREFILL, Prefill, read_prefill
from gateway.recorder import LentReasoning, Tape
from gateway.service import Service, nobody_listens
from gateway.sse import KEEP_ALIVE, PING, EventStream, until_disconnect
from gateway.store import StoreError
from gateway.threads import THREAD_FROM_BYTES, in_thread, in_thread_if
from parsers import ClientError, Exchange, Protocol, ReasoningStore, ReplyError

logger = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[ASGIApp]]


@dataclass(slots=True)
class _Opened:
    """One request that was accepted.

    Args:
        exchange: the first of its choices.
        id: of the reply.
        tape: where it is recorded.
        lent: what the cache of reasoning lent to it, where it is recorded.
        prefill: how its prompt is to be processed.
    """

    exchange: Reply
    id: str
    tape: Tape | None = None
    lent: LentReasoning | None = None
    prefill: Prefill = DEFAULT_PREFILL


class Endpoints:
    """The handlers of generating routes.

    Args:
        service: what all handlers share.

    Attributes:
        handlers: by their paths.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        settings = service.settings
        self._generations = Generations(
            service.backend,
            service.model.eos_token_ids,
            Limits(settings.first_token_seconds, settings.step_seconds, settings.request_seconds),
            service.metrics,
        )
        self._background = Background(service)
        self.handlers: dict[str, Handler] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completions,
            "/v1/messages": self.messages,
            "/v1/responses": self.responses,
        }

    async def chat(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        return await self._generate("chat", request)

    async def responses(self, request: Request) -> ASGIApp:
        """POST /v1/responses."""
        return await self._generate("responses", request)

    async def messages(self, request: Request) -> ASGIApp:
        """POST /v1/messages."""
        return await self._generate("messages", request)

    async def completions(self, request: Request) -> ASGIApp:
        """POST /v1/completions: a prompt as text or token ids, and its continuation as text."""
        call = Call.of(request.scope)
        reply_id = f"cmpl-{uuid4()}"
        try:
            prefill = read_prefill(request.scope["headers"])
            codec, body = self._service.codec, await self._service.body(request)
            completion = await in_thread(
                codec.open_completion, body, exchange_id=reply_id, created=int(time.time())
            )
        except ClientError as error:
            return self._service.refuse(request, error)
        except ClientDisconnect:
            return nobody_listens()
        tape = None
        if self._service.recorder is not None:
            tape = Tape("completions", reply_id, self._service.profile.name, body)
        return await self._reply(
            request, call, _Opened(completion, reply_id, tape, prefill=prefill)
        )

    async def _generate(self, protocol: Protocol, request: Request) -> ASGIApp:
        call = Call.of(request.scope)
        try:
            opened = await self._open(protocol, request, call)
        except ClientError as error:
            return self._service.refuse(request, error)
        except ClientDisconnect:
            return nobody_listens()
        return await self._reply(request, call, opened)

    async def _reply(self, request: Request, call: Call, opened: _Opened) -> ASGIApp:
        exchange = opened.exchange
        call.notes.update(model=exchange.model, stream=exchange.stream)
        self._service.metrics.take_ignored(exchange.ignored)
        headers = _notes(exchange)
        frames = self._frames(request, call, opened)
        if isinstance(exchange, Exchange) and exchange.stored and exchange.stored.background:
            try:
                first = await self._background.begin(call, exchange, opened.id, frames)
            except ClientError as error:
                return self._service.refuse(request, error)
            return Response(first, media_type="application/json", headers=headers)
        if exchange.stream:
            return self._stream(call, exchange, frames, headers)
        return await self._whole(request, call, opened, frames, headers)

    async def _open(self, protocol: Protocol, request: Request, call: Call) -> _Opened:
        """Read a request and open its exchange.

        Raises:
            ClientError: it cannot be served.
            ClientDisconnect: the client left while sending.
        """
        service = self._service
        if not service.serving:
            raise not_served()
        prefill = read_prefill(request.scope["headers"])
        body = await service.seen_body(request, protocol)
        exchange_id = str(uuid4())
        reasoning: ReasoningStore = service.reasoning
        lent, tape = None, None
        if service.recorder is not None:
            reasoning = lent = LentReasoning(service.reasoning)
            tape = Tape(protocol, exchange_id, service.profile.name, body)
        if protocol == "responses":
            exchange_id = f"resp_{exchange_id.replace('-', '')}"
            exchange = await in_thread(self._open_stored, body, exchange_id, reasoning, call, tape)
        elif len(body) < THREAD_FROM_BYTES:
            exchange = self._open_plain(protocol, body, exchange_id, reasoning)
        else:
            exchange = await in_thread(self._open_plain, protocol, body, exchange_id, reasoning)
        return _Opened(exchange, exchange_id, tape, lent, prefill)

    def _check(self, body: bytes) -> None:
        settings = self._service.settings
        check_counts(body, settings.max_messages, settings.max_tools)

    def _open_plain(
        self, protocol: Protocol, body: bytes, exchange_id: str, reasoning: ReasoningStore
    ) -> Exchange:
        self._check(body)
        return self._service.codec.open_exchange(
            protocol, body, exchange_id=exchange_id, reasoning=reasoning
        )

    def _open_stored(
        self,
        body: bytes,
        exchange_id: str,
        reasoning: ReasoningStore,
        call: Call,
        tape: Tape | None,
    ) -> Exchange:
        """Open a Responses exchange with what the store holds for it; in a thread."""
        store = self._service.store
        if store is None:
            return self._open_plain("responses", body, exchange_id, reasoning)
        self._check(body)
        history = None
        if previous := _previous_id(body):
            history = store.get(previous, call.key)
        if is_background(body):
            body = with_stream(body)  # nobody reads it, but it tells how the response stands
        if tape is not None:
            tape.exchange_id, tape.body, tape.history = exchange_id, body, history
        return self._service.codec.open_exchange(
            "responses",
            body,
            exchange_id=exchange_id,
            reasoning=reasoning,
            stateful=True,
            history=history,
            find_item=lambda item_id: store.find_item(item_id, call.key),
        )

    def _frames(
        self, request: Request, call: Call, opened: _Opened
    ) -> AsyncGenerator[list[bytes], None]:
        scripts = header(request.scope["headers"], b"x-bathyal-script")

        async def settle() -> None:
            if not opened.exchange.stream:
                return
            await self._keep(call, opened)
            if isinstance(opened.exchange, Exchange) and opened.exchange.error is not None:
                self._ended(call, opened.exchange.error.code)  # told by the stream itself

        frames = self._generations.frames(
            opened.exchange,
            call,
            request_id=opened.id,
            scripts=[name.strip() for name in scripts.split(",")] if scripts else (),
            prefill=opened.prefill,
            tape=opened.tape,
            settle=settle,
        )
        return frames if opened.tape is None else self._taped(frames, opened, opened.tape)

    def _stream(
        self,
        call: Call,
        exchange: Reply,
        frames: AsyncGenerator[list[bytes], None],
        headers: dict[str, str],
    ) -> ASGIApp:
        settings = self._service.settings

        def refuse(failure: ClientError) -> Response:
            return error_response(call, failure)

        return EventStream(
            frames,
            fail=lambda failure: exchange.fail(
                failure.message, code=failure.code, status=failure.status
            ),
            refuse=refuse,
            keep_alive_seconds=settings.keep_alive_seconds,
            stall_seconds=settings.stall_seconds,
            ping=PING if call.protocol == "messages" else KEEP_ALIVE,
            on_end=lambda how: self._ended(call, how),
            headers=headers,
        )

    async def _whole(
        self,
        request: Request,
        call: Call,
        opened: _Opened,
        frames: AsyncGenerator[list[bytes], None],
        headers: dict[str, str],
    ) -> Response:
        async def whole() -> Response:
            try:
                async with aclosing(frames):
                    async for _ in frames:
                        pass
                tokens = call.notes.get("completion_tokens", 0)
                try:
                    body = await in_thread_if(
                        opened.exchange.heavy_body(tokens), opened.exchange.body
                    )
                except ReplyError as error:
                    if opened.tape is not None:
                        await self._record(opened, opened.tape, error.code)
                    raise
                if opened.tape is not None:
                    opened.tape.reply.append(body)
                    await self._record(opened, opened.tape, None)
                await self._keep(call, opened)
            except ClientError as failure:
                self._ended(call, failure)
                return error_response(call, failure)
            return Response(body, media_type="application/json", headers=headers)

        try:
            reply = await until_disconnect(request.receive, whole())
        except asyncio.CancelledError:  # as for a stream: the server ends before the reply does
            failure = shutting_down()
            self._ended(call, failure)
            return error_response(call, failure)
        if reply is None:
            self._ended(call, "client_left")
            return nobody_listens()
        return reply

    def _ended(self, call: Call, how: str | ClientError) -> None:
        """Note how a reply ended that did not by itself; a refused request has had none."""
        call.outcome = how.code if isinstance(how, ClientError) else how
        if how == "client_left" and not call.status:
            call.status = CLIENT_LEFT_STATUS
        metrics = self._service.metrics
        counter = metrics.refused if isinstance(how, RefusedError) else metrics.aborted
        counter.labels(call.outcome).inc()

    async def _keep(self, call: Call, opened: _Opened) -> None:
        """Put a response that ended well into the store; a full disk costs nobody his reply."""
        exchange, store = opened.exchange, self._service.store
        if not isinstance(exchange, Exchange) or exchange.stored is None or store is None:
            return
        if exchange.error is not None:
            return
        if not (exchange.stored.wanted or exchange.stored.background):
            return
        try:
            record = await in_thread(exchange.record)
            await in_thread(store.put, opened.id, call.key, record)
        except StoreError:
            logger.exception("a response is not kept")

    async def _taped(
        self, frames: AsyncGenerator[list[bytes], None], opened: _Opened, tape: Tape
    ) -> AsyncGenerator[list[bytes], None]:
        """Record what a stream sends, and write it down when it is over, however it ends."""
        failure: str | None = "left"
        try:
            async with aclosing(frames):
                async for step in frames:
                    tape.reply += step
                    yield step
            failure = None
        except ClientError as error:
            failure = error.code
            raise
        finally:
            if opened.exchange.stream or failure is not None:
                await self._record(opened, tape, failure)

    async def _record(self, opened: _Opened, tape: Tape, failure: str | None) -> None:
        recorder = self._service.recorder
        assert recorder is not None
        if opened.lent is not None:
            tape.reasoning = opened.lent.lent
        try:
            await in_thread(lambda: recorder.write(tape.line(failure)))
        except OSError:
            logger.exception("an exchange is not recorded")


def _previous_id(body: bytes) -> str | None:
    """Look for the response that a body continues; what is wrong with it the parsers say."""
    if b'"previous_response_id"' not in body:
        return None
    found = _field(body, "previous_response_id")
    return found if isinstance(found, str) else None


def _field(body: bytes, name: str) -> Any:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return fields.get(name) if isinstance(fields, dict) else None


def _notes(exchange: Reply) -> dict[str, str]:
    """Headers that say what was not done: fields of the request that have no effect."""
    names = [
        name for name in exchange.ignored if re.fullmatch(r"[\w.\-\[\]]{1,64}", name, re.ASCII)
    ]
    return {"x-bathyal-ignored": ", ".join(names)} if names else {}
