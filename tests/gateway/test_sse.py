"""EventStream: what it sends, when it commits to a status, and that it always closes its source."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, strategies as st
from starlette.responses import Response

from gateway.call import Call
from gateway.errors import ServerError, error_response
from gateway.sse import KEEP_ALIVE, EventStream, until_disconnect
from parsers import ClientError
from tests.gateway.support import RawCall, eventually, run


class Source:
    """Frames under the test's hand; remembers whether its `finally` ran."""

    def __init__(self, *steps: Any) -> None:
        self.steps: asyncio.Queue[Any] = asyncio.Queue()
        for step in steps:
            self.steps.put_nowait(step)
        self.closed = 0

    async def frames(self) -> AsyncGenerator[list[bytes], None]:
        try:
            while (step := await self.steps.get()) is not None:
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            await asyncio.sleep(0)  # an await in a finally must be waited for, too
            self.closed += 1


def stream(source: Source, keep_alive: float = 30.0, **headers: str) -> EventStream:
    return EventStream(
        source.frames(),
        fail=lambda failure: [b"FAIL " + failure.message.encode(), b" END"],
        refuse=lambda error: error_response(Call("id", "chat", "/"), error),
        keep_alive_seconds=keep_alive,
        stall_seconds=30.0,
        headers=headers,
    )


def test_frames_arrive_as_they_are_made() -> None:
    """Each step reaches the client before the next one exists; the stream ends once."""

    async def main() -> None:
        source = Source([b"one"])
        call = RawCall(stream(source), "/", b"")
        status, headers = await call.start()
        assert status == 200
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["cache-control"] == "no-cache"
        assert headers["x-accel-buffering"] == "no"
        assert await call.until(b"one") == b"one"
        source.steps.put_nowait([b"two", b"three"])
        assert await call.until(b"three") == b"twothree"
        source.steps.put_nowait(None)
        assert await call.rest() == b""
        assert source.closed == 1

    run(main())


def test_further_headers_are_sent() -> None:
    """What the endpoint has to say in headers goes out with them."""

    async def main() -> None:
        call = RawCall(stream(Source(None), **{"x-bathyal-ignored": "user"}), "/", b"")
        _, headers = await call.start()
        assert headers["x-bathyal-ignored"] == "user"
        assert await call.rest() == b""

    run(main())


@given(st.lists(st.lists(st.binary(max_size=4), max_size=3), max_size=8))
def test_the_bytes_are_the_joined_frames(steps: list[list[bytes]]) -> None:
    """However the frames are spread over the steps, the body is their concatenation."""

    async def main() -> bytes:
        call = RawCall(stream(Source(*steps, None)), "/", b"")
        await call.start()
        return await call.rest()

    assert run(main()) == b"".join(frame for step in steps for frame in step)


def test_silence_is_filled_with_comments() -> None:
    """A stream that has nothing to say stays open: a comment per interval, frames in between."""

    async def main() -> None:
        source = Source()
        call = RawCall(stream(source, keep_alive=0.02), "/", b"")
        status, _ = await call.start()
        assert status == 200
        assert await call.until(KEEP_ALIVE * 3) == KEEP_ALIVE * 3
        source.steps.put_nowait([b"data"])
        assert (await call.until(b"data")).replace(KEEP_ALIVE, b"") == b"data"
        assert await call.until(KEEP_ALIVE) == KEEP_ALIVE
        source.steps.put_nowait(None)
        assert (await call.rest()).replace(KEEP_ALIVE, b"") == b""

    run(main())


def test_no_comment_goes_into_a_stream_that_talks() -> None:
    """Steps that come faster than the interval leave no room for comments."""

    async def main() -> bytes:
        source = Source(*([b"x"] for _ in range(200)), None)
        call = RawCall(stream(source, keep_alive=5.0), "/", b"")
        await call.start()
        return await call.rest()

    assert run(main()) == b"x" * 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ServerError("backend down", status=503, code="c"), 503),
        (ServerError("backend broke", status=502, code="c"), 502),
        (ClientError("too long", status=400), 400),
    ],
)
def test_a_failure_before_the_first_frame_is_a_status(error: Exception, status: int) -> None:
    """An early failure is a plain reply with its own status, not a 200."""

    async def main() -> None:
        source = Source(error)
        call = RawCall(stream(source), "/", b"")
        got, headers = await call.start()
        assert (got, headers["content-type"]) == (status, "application/json")
        assert str(error).encode() in await call.rest()
        assert source.closed == 1

    run(main())


def test_a_failure_after_the_first_frame_is_a_frame() -> None:
    """Once the status is spent the protocol's own error ends the stream."""

    async def main() -> bytes:
        call = RawCall(stream(Source([b"a"], ServerError("broke"))), "/", b"")
        assert (await call.start())[0] == 200
        return await call.rest()

    assert run(main()) == b"aFAIL broke END"


def test_a_keep_alive_spends_the_status_too() -> None:
    """After a long silence the headers are out, and a failure is a frame."""

    async def main() -> bytes:
        source = Source()
        call = RawCall(stream(source, keep_alive=0.02), "/", b"")
        assert (await call.start())[0] == 200
        source.steps.put_nowait(ClientError("late"))
        return await call.rest()

    assert run(main()).replace(KEEP_ALIVE, b"") == b"FAIL late END"


def test_a_bug_before_the_headers_reaches_the_application() -> None:
    """An unexpected exception is the application's 500, with its traceback."""

    async def main() -> None:
        source = Source(ZeroDivisionError("bug"))
        call = RawCall(stream(source), "/", b"")
        with pytest.raises(ZeroDivisionError):
            await call.task
        assert source.closed == 1

    run(main())


def test_a_bug_after_the_headers_ends_the_stream_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client hears that it failed, not what failed; the log holds the traceback."""

    async def main() -> bytes:
        call = RawCall(stream(Source([b"a"], ZeroDivisionError("secret"))), "/", b"")
        await call.start()
        return await call.rest()

    with caplog.at_level(logging.ERROR):
        body = run(main())

    assert body == b"aFAIL internal error END"
    assert "ZeroDivisionError: secret" in caplog.text


@pytest.mark.parametrize("sent_before", [0, 1, 3])
def test_a_client_that_leaves_closes_the_source_while_it_is_quiet(sent_before: int) -> None:
    """The generation ends although nothing is being sent."""

    async def main() -> None:
        source = Source(*([b"x"] for _ in range(sent_before)))
        call = RawCall(stream(source), "/", b"")
        if sent_before:
            await call.start()
            await call.until(b"x" * sent_before)
        else:
            await asyncio.sleep(0.01)
        call.leave()
        await call.task
        assert source.closed == 1

    run(main())


def test_a_client_that_leaves_closes_the_source_while_a_write_hangs() -> None:
    """A reader that stopped reading and then left does not keep the generation alive."""

    async def main() -> None:
        source = Source([b"x"])
        blocked = asyncio.Event()
        left = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                blocked.set()
                await asyncio.Event().wait()

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(stream(source, keep_alive=0.01)({}, receive, send))
        await blocked.wait()
        await asyncio.sleep(0.05)  # several keep-alive intervals pass without a second write
        left.set()
        await task
        assert source.closed == 1

    run(main())


def test_no_comment_runs_into_a_refusal() -> None:
    """A plain error reply that a slow reader takes its time over stays what it is."""

    async def main() -> list[str]:
        seen: list[str] = []

        async def send(message: Any) -> None:
            seen.append(f"{message['type']} {message.get('body', b'')[:12]!r}")
            if message["type"] == "http.response.start":
                await asyncio.sleep(0.1)

        refused = stream(Source(ServerError("no", status=503)), keep_alive=0.01)
        await refused({"type": "http"}, asyncio.Queue().get, send)
        return seen

    start, body = run(main())
    assert start.startswith("http.response.start")
    assert "error" in body


def test_a_stuck_reader_does_not_hold_up_the_servers_end() -> None:
    """Saying that the server stops is given up when nobody reads."""

    async def main() -> None:
        source = Source([b"x"])
        blocked = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                blocked.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(stream(source)({}, asyncio.Queue().get, send))
        await blocked.wait()
        task.cancel()
        await task
        assert source.closed == 1

    run(main())


def test_a_server_that_reports_the_disconnect_at_a_write_is_understood() -> None:
    """ASGI 2.4 lets `send` raise OSError; that is a leaving client, not a bug."""

    async def main() -> None:
        source = Source([b"x"], [b"y"])

        async def send(message: Any) -> None:
            raise OSError("gone")

        await stream(source)({}, asyncio.Queue().get, send)
        assert source.closed == 1

    run(main())


@pytest.mark.parametrize(("steps", "want"), [([[b"a"]], b"aFAIL"), ([], b"shutting_down")])
def test_a_server_that_stops_says_so(steps: list[Any], want: bytes) -> None:
    """A stream cut by the server's end never looks like one that ended by itself."""

    async def main() -> None:
        source = Source(*steps)
        call = RawCall(stream(source), "/", b"")
        await eventually(lambda: source.steps.empty())
        await asyncio.sleep(0.01)
        call.task.cancel()
        await call.task
        status, _ = await call.start()
        assert status == (200 if steps else 503)
        body = b""
        while not call.sent.empty():
            body += call.sent.get_nowait()["body"]
        assert want in body
        assert b"shutting down" in body
        assert source.closed == 1

    run(main())


def test_until_disconnect_gives_the_result_of_the_work() -> None:
    """A client that stays gets its answer, or its error."""

    async def work(error: Exception | None = None) -> int:
        if error is not None:
            raise error
        return 7

    async def main() -> None:
        never = asyncio.Queue[Any]().get
        assert await until_disconnect(never, work()) == 7
        with pytest.raises(ValueError, match="x"):
            await until_disconnect(never, work(ValueError("x")))

    run(main())


def test_until_disconnect_ends_the_work_of_a_client_that_left() -> None:
    """The work's `finally` has run when the call returns."""
    ended: list[bool] = []

    async def work() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)
        return 7

    async def main() -> None:
        messages: asyncio.Queue[Any] = asyncio.Queue()
        messages.put_nowait({"type": "http.request"})
        messages.put_nowait({"type": "http.disconnect"})
        assert await until_disconnect(messages.get, work()) is None
        assert ended == [True]

    run(main())


def test_refusals_are_whole_replies() -> None:
    """`refuse` may return any response of Starlette's."""

    async def main() -> int:
        one = EventStream(
            Source(ServerError("x", status=507)).frames(),
            fail=lambda failure: [],
            refuse=lambda error: Response(status_code=error.status),
            keep_alive_seconds=1,
            stall_seconds=1,
        )
        return (await RawCall(one, "/", b"").start())[0]

    assert run(main()) == 507


def test_a_comment_that_nobody_reads_gives_the_reader_up() -> None:
    """A reader that stops while nothing is said is noticed too, and its source is closed."""
    how: list[str] = []

    async def main() -> None:
        source = Source()
        one = EventStream(
            source.frames(),
            fail=lambda failure: [],
            refuse=lambda error: error_response(Call("id", "chat", "/"), error),
            keep_alive_seconds=0.02,
            stall_seconds=0.1,
            on_end=how.append,
        )
        never = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await never.wait()

        async def receive() -> Any:
            await never.wait()

        await one({"type": "http"}, receive, send)
        assert source.closed == 1

    run(main())
    assert how == ["slow_reader"]


def test_how_a_stream_ended_is_told_once() -> None:
    """A client that left, a fault, and nothing for a stream that ended by itself."""
    fault = ServerError("x", code="broke")

    def ends(*steps: Any, leave: bool = False) -> list[str | ClientError]:
        how: list[str | ClientError] = []

        async def main() -> None:
            one = EventStream(
                Source(*steps).frames(),
                fail=lambda failure: [b"x"],
                refuse=lambda error: error_response(Call("id", "chat", "/"), error),
                keep_alive_seconds=30,
                stall_seconds=30,
                on_end=how.append,
            )
            call = RawCall(one, "/", b"")
            if leave:
                await call.start()
                call.leave()
                await call.task
            else:
                await call.start()
                await call.rest()

        run(main())
        return how

    assert ends([b"a"], None) == []
    assert ends([b"a"], leave=True) == ["client_left"]
    assert ends([b"a"], fault) == [fault]
    assert ends(fault) == [fault]


def test_a_frame_that_nobody_reads_gives_the_reader_up_once() -> None:
    """A write that waits too long ends the stream as a slow reader's, and as nothing else."""
    how: list[str] = []

    async def main() -> None:
        source = Source([b"a"])
        one = EventStream(
            source.frames(),
            fail=lambda failure: [],
            refuse=lambda error: error_response(Call("id", "chat", "/"), error),
            keep_alive_seconds=0.02,
            stall_seconds=0.1,
            on_end=how.append,
        )
        never = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await never.wait()

        async def receive() -> Any:
            await never.wait()

        await asyncio.wait_for(one({"type": "http"}, receive, send), 5)
        assert source.closed == 1

    run(main())
    assert how == ["slow_reader"]


def test_a_frame_waits_for_a_comment_under_way() -> None:
    """Two writes at once would run into each other; the second begins when the first is done."""

    async def main() -> list[bytes]:
        source, begun, release = Source(), asyncio.Event(), asyncio.Event()
        writing, written = 0, []

        async def send(message: Any) -> None:
            nonlocal writing
            if message["type"] != "http.response.body":
                return
            writing += 1
            assert writing == 1
            if message["body"] == KEEP_ALIVE:
                begun.set()
                await release.wait()
            written.append(message["body"])
            writing -= 1

        async def receive() -> Any:
            await asyncio.Event().wait()

        one = stream(source, keep_alive=0.02)
        task = asyncio.create_task(one({"type": "http"}, receive, send))
        await begun.wait()
        source.steps.put_nowait([b"frame"])
        source.steps.put_nowait(None)
        for _ in range(20):
            await asyncio.sleep(0)
        release.set()
        await task
        return written

    assert run(main())[:2] == [KEEP_ALIVE, b"frame"]
