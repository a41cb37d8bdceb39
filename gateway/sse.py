"""A streaming reply that hears, pings and cleans up.

Knows frames (bytes ready for the wire), silence and disconnects; knows nothing of tokens, models or
protocols. One task pumps frames from the source to the socket; this response's own task waits for
the pump's end, for the client's leaving, or for a silence, whichever comes first, so a token costs
no task switch of ours and a client that leaves in the middle of a long prefill is seen at once.

When the status is decided: headers go out with the first frame or with the first keep-alive comment,
whichever is earlier. A failure within one keep-alive interval is therefore a real HTTP status
(a failing backend nearly always fails at once), while a prefill longer than the interval still keeps
its connection open; after that the status is spent and a failure is the protocol's own error frame.

Starlette's StreamingResponse does neither: it never closes its iterator and, from ASGI 2.4 on, sees
a disconnect only at its next send.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.call import BODY_SEND
from gateway.errors import ServerError, shutting_down
from parsers import ClientError

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: An SSE comment: every SSE reader skips it, every idle timer sees it.
KEEP_ALIVE = b": keep-alive\n\n"
#: The Messages protocol's own event for the same.
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
#: What a reply that outlasts its server gets for saying so, in seconds.
LAST_WORDS_SECONDS = 1.0
#: How long a whole reply is made before anybody listens whether its client leaves, in seconds.
LISTEN_AFTER_SECONDS = 0.02

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the whole reply
)


class _ClientLeftError(Exception):
    """The socket refused a write; servers may report a disconnect this way instead of by message."""


class EventStream:
    """ASGI response that sends frames as they come.

    Args:
        frames: what to send, one item per step; closed in every case, also when the client leaves or
            the server stops, so its `finally` is where a generation is aborted.
        fail: failure to the protocol's last frames, for one after the headers.
        refuse: failure to a plain response, for a failure before the headers.
        keep_alive_seconds: silence after which a comment is sent.
        stall_seconds: how long one write may wait for its reader, to the next look at it; longer,
            and the reader counts as gone.
        ping: sent in place of the comment once there was a frame: some protocols have an event for it.
        on_end: told once how it ended, where that was not by itself: `client_left`, `slow_reader`
            or a failure.
        headers: further response headers; values must be latin-1.
    """

    def __init__(
        self,
        frames: AsyncGenerator[list[bytes], None],
        *,
        fail: Callable[[ClientError], list[bytes]],
        refuse: Callable[[ClientError], Response],
        keep_alive_seconds: float,
        stall_seconds: float,
        ping: bytes = KEEP_ALIVE,
        on_end: Callable[[str | ClientError], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._frames = frames
        self._fail = fail
        self._refuse = refuse
        self._keep_alive_seconds = keep_alive_seconds
        self._stall_seconds = stall_seconds
        self._ping = ping
        self._on_end = on_end or _told
        self._headers = [
            *_STREAM_HEADERS,
            *(
                (name.encode("latin-1"), text.encode("latin-1"))
                for name, text in (headers or {}).items()
            ),
        ]
        self._committed = False  # headers are out
        self._finished = False  # the last body message is out
        self._last_sent = 0.0  # loop time at the begin of the last write, seconds
        self._spoken = False  # a frame is out
        self._sending = False  # a write waits for its reader
        self._comment: asyncio.Future[None] | None = None  # pending while a comment is written

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or as much as the client's and the server's lives allow.

        Raises:
            Exception: what a broken source raises before the headers are out.
        """
        loop = self._loop = asyncio.get_running_loop()
        self._send_body = scope.get(BODY_SEND, send)
        self._last_sent = loop.time()
        pump = asyncio.create_task(self._pump(scope, receive, send))
        listener = asyncio.create_task(_disconnected(receive))
        try:
            while not (pump.done() or listener.done()):
                silence = loop.time() - self._last_sent
                if silence < self._keep_alive_seconds:
                    await asyncio.wait(
                        {pump, listener},
                        timeout=self._keep_alive_seconds - silence,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                elif self._sending or self._finished:  # the reader is slow, not the source
                    if silence > self._stall_seconds:
                        self._ended("slow_reader")
                        break
                    await asyncio.wait(
                        {pump, listener},
                        timeout=min(self._keep_alive_seconds, self._stall_seconds),
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                else:
                    await self._keep_alive(send)
            if not pump.done():
                self._ended("client_left")
        except TimeoutError:  # of a comment that nobody reads
            self._ended("slow_reader")
        except _ClientLeftError:
            self._ended("client_left")  # the finally below ends the generation
        except asyncio.CancelledError:
            # The server ends before the reply does. A cut reply must not look whole; once that is
            # said there is nothing to cancel any more, and servers log a raised cancel as a crash.
            await _end(pump, listener)
            with suppress(_ClientLeftError, TimeoutError):
                async with asyncio.timeout(LAST_WORDS_SECONDS):  # its reader may be stuck
                    await self._fail_with(shutting_down(), scope, receive, send)
        finally:
            await _end(pump, listener)
        if not pump.cancelled():
            pump.result()

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._frames):
                async for frames in self._frames:
                    data = frames[0] if len(frames) == 1 else b"".join(frames)
                    if self._comment is None and self._spoken:
                        # as `_write` does for any frame but the first, at a call's cost less
                        self._last_sent = self._loop.time()
                        self._sending = True
                        try:
                            await self._send_body(
                                {"type": "http.response.body", "body": data, "more_body": True}
                            )
                        except OSError as error:
                            raise _ClientLeftError from error
                        self._sending = False
                    else:
                        await self._commented()
                        self._spoken = True
                        await self._write(send, data, more=True)
        except _ClientLeftError:
            self._ended("client_left")
        except ClientError as failure:
            await self._fail_with(failure, scope, receive, send)
        except Exception:
            if not self._committed:
                raise  # the application's own 500
            logger.exception("a stream broke after its headers")
            await self._fail_with(ServerError("internal error"), scope, receive, send)
        else:
            await self._end_with(send, b"")

    async def _fail_with(
        self, failure: ClientError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if self._finished:
            return
        self._ended(failure)
        if self._committed:
            await self._end_with(send, b"".join(self._fail(failure)))
        else:
            self._committed = self._finished = True
            await self._refuse(failure)(scope, receive, send)

    def _ended(self, how: str | ClientError) -> None:
        self._on_end(how)
        self._on_end = _told

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment; the pump waits for its end, so that it cannot run into a frame."""
        self._comment = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self._write(send, self._ping if self._spoken else KEEP_ALIVE, more=True)
        finally:
            self._comment.set_result(None)
            self._comment = None

    async def _end_with(self, send: Send, data: bytes) -> None:
        """Send the last message."""
        await self._commented()
        await self._write(send, data, more=False)

    async def _commented(self) -> None:
        """Wait for the end of a comment that is being written."""
        if self._comment is not None:
            await asyncio.shield(self._comment)

    async def _write(self, send: Send, data: bytes, *, more: bool) -> None:
        self._last_sent = self._loop.time()
        self._sending = True
        try:
            if not self._committed:
                self._committed = True
                await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            self._finished = not more
            await self._send_body({"type": "http.response.body", "body": data, "more_body": more})
        except OSError as error:
            raise _ClientLeftError from error
        finally:
            self._sending = False


def _told(_: str | ClientError) -> None:
    """Take the place of `on_end` once it was called."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Await `work`, or cancel it and return None when the client leaves first.

    The work is done in the caller's task, which is cancelled when the client leaves, as
    `asyncio.timeout` does it. Whether he leaves is listened to once the work has taken a moment, so
    that what is answered at once costs no task at all.

    Raises:
        Exception: whatever `work` raises.
    """
    task = asyncio.current_task()
    assert task is not None
    left = cancelled = False

    async def listen() -> None:
        nonlocal left
        await _disconnected(receive)
        left = True
        task.cancel()

    listener: asyncio.Task[None] | None = None

    def begin() -> None:
        nonlocal listener
        listener = asyncio.create_task(listen())

    timer = asyncio.get_running_loop().call_later(LISTEN_AFTER_SECONDS, begin)
    try:
        return await work
    except asyncio.CancelledError:
        cancelled = True
        if left and not task.uncancel():
            return None
        raise  # the server cancels too
    finally:
        timer.cancel()
        if listener is not None:
            listener.cancel()
        if left and not cancelled:  # at the last moment: the cancel has yet to come, and comes here
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            task.uncancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what still runs and wait until its `finally` blocks have run."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
