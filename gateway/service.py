"""What every handler of a server shares: the model, the codec, the counters, the memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.admission import read_body
from gateway.backends import Backend
from gateway.call import CLIENT_LEFT_STATUS, Call
from gateway.errors import error_response, not_served
from gateway.images import ImageLimits, Images
from gateway.metrics import Metrics
from gateway.recorder import Recorder
from gateway.settings import Settings
from gateway.store import ResponseStore
from gateway.threads import THREAD_FROM_BYTES, in_thread
from parsers import PROFILES, ClientError, Codec, Protocol, ReasoningCache, ServedModel


class Service:
    """One server, between its start and its stop and around them.

    Args:
        settings: limits and intervals.
        backend: generates; started and stopped by `start` and `stop`.
        model: what is served, under which names.
        metrics: what is counted.

    Attributes:
        reasoning: what was thought before calls, for clients that do not send it back.
        tasks: background replies by the id of their response.
    """

    def __init__(
        self, settings: Settings, backend: Backend, model: ServedModel, metrics: Metrics
    ) -> None:
        self.settings = settings
        self.backend = backend
        self.model = model
        self.metrics = metrics
        self.profile = PROFILES[settings.profile]
        self.reasoning = ReasoningCache()
        self._images: Images | None = None
        self.recorder = None if settings.record is None else Recorder(settings.record)
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._codec: Codec | None = None
        self._store: ResponseStore | None = None

    async def start(self) -> None:
        """Load the codec, whose check is quick, then the backend.

        Raises:
            parsers.BootError: the tokenizer cannot serve this model.
            gateway.store.StoreError: the file of responses cannot be used.
            engine.api.EngineError: the backend cannot serve it.
        """
        codec = await in_thread(Codec.load, self.model, self.profile)
        if self.model.has_vision:
            settings = self.settings
            limits = ImageLimits(
                settings.max_images,
                settings.max_image_bytes,
                settings.max_image_pixels,
                settings.image_seconds,
            )
            self._images = await in_thread(Images, limits)
        if self.settings.store != "off":
            path = ":memory:" if self.settings.store == "memory" else self.settings.store
            self._store = await in_thread(ResponseStore, path, self.settings.store_max_bytes)
        await self.backend.start()
        self._codec = codec

    async def stop(self) -> None:
        """Serve nothing any more; background replies end as failed."""
        self._codec = None
        for task in self.tasks.values():
            task.cancel()
        if self.tasks:
            await asyncio.wait(set(self.tasks.values()))
        await self.backend.stop()
        if self._images is not None:
            await self._images.close()
        if self._store is not None:
            self._store.close()
            self._store = None

    @property
    def serving(self) -> bool:
        """Whether requests can be opened."""
        return self._codec is not None

    @property
    def codec(self) -> Codec:
        """The codec.

        Raises:
            ServerError: 503; the model is not loaded, or no more.
        """
        if self._codec is None:
            raise not_served()
        return self._codec

    @property
    def store(self) -> ResponseStore | None:
        """Where responses are kept, None where they are not."""
        return self._store

    async def body(self, request: Request) -> bytes:
        """Read a request's body within the settings' limits."""
        settings = self.settings
        return await read_body(request, settings.max_body_bytes, settings.body_seconds)

    async def seen_body(self, request: Request, protocol: Protocol) -> bytes:
        """Read a body; where the model sees, with its images fetched and checked.

        Raises:
            ClientError: as `body`, or an image cannot be taken.
        """
        body = await self.body(request)
        return body if self._images is None else await self._images.inline(protocol, body)

    async def reply(
        self,
        request: Request,
        work: Callable[[Codec, bytes], bytes],
        protocol: Protocol | None = None,
    ) -> Response:
        """Answer a request whose reply is a function of its body, in a thread where it is long.

        Args:
            request: to be answered.
            work: the function.
            protocol: of the body, where it may hold images.
        """
        try:
            codec = self.codec
            if protocol is None:
                body = await self.body(request)
            else:
                body = await self.seen_body(request, protocol)
            if len(body) < THREAD_FROM_BYTES:
                return json_response(work(codec, body))
            return json_response(await in_thread(work, codec, body))
        except ClientError as error:
            return self.refuse(request, error)
        except ClientDisconnect:
            return nobody_listens()

    def refuse(self, request: Request, error: ClientError) -> Response:
        """Refuse a request, and count that."""
        self.metrics.refused.labels(error.code).inc()
        return error_response(Call.of(request.scope), error)


def json_response(content: object, *, status: int = 200) -> Response:
    """Reply in JSON; bytes are JSON already."""
    body = content if isinstance(content, bytes) else orjson.dumps(content)
    return Response(body, status_code=status, media_type="application/json")


def nobody_listens() -> Response:
    """Answer a client that has left; the status is for the log."""
    return Response(status_code=CLIENT_LEFT_STATUS)
