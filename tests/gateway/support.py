"""Tools of the gateway's tests: a raw ASGI caller, a loopback server, backends that misbehave.

Streams are never tested through httpx.ASGITransport: it collects the whole body before it returns.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.api import EngineStats, GenerateRequest, ModelInfo, TokenDelta
from gateway import Settings, create_app
from gateway.backends.scripted import Line, ScriptedBackend
from gateway.launch import bind

T = TypeVar("T")

EOS = 1
SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜image｜>",
)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine; a test that hangs fails instead."""
    return asyncio.run(asyncio.wait_for(work, 30))


def save_tokenizer(path: Path) -> None:
    """Write a tokenizer of single bytes and the codec's special tokens."""
    vocab = {
        token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(path))


def make_info(tokenizer_path: Path, **changes: Any) -> ModelInfo:
    fields = {
        "name": "test-model",
        "version": "v4.1",
        "max_model_len": 32_768,
        "eos_token_ids": (EOS,),
        "tokenizer_path": str(tokenizer_path),
        **changes,
    }
    return ModelInfo(**fields)


def text_line(output: str, **fields: Any) -> Line:
    """A script's line with markers in it."""
    return Line("output", output, **fields)


class FunctionBackend:
    """A backend whose generation is a function of the test's; records what it was told."""

    def __init__(
        self,
        info: ModelInfo,
        generate: Callable[[GenerateRequest], AsyncGenerator[TokenDelta, None]],
    ) -> None:
        self.info = info
        self._generate = generate
        self.aborted: list[str] = []
        self.requests: list[GenerateRequest] = []
        self.live = 0
        self.alive = True

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        self.alive = False

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        self.live += 1
        try:
            async for delta in self._generate(request):
                yield delta
        finally:
            self.live -= 1

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def stats(self) -> EngineStats:
        return EngineStats(running=self.live, alive=self.alive)


class RawCall:
    """One ASGI call whose messages are seen as they are sent."""

    def __init__(self, app: ASGIApp, path: str, body: bytes, **options: Any) -> None:
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in options.get("headers", {}).items()
        ]
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": options.get("method", "POST"),
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": options.get("query", b""),
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        for part in options.get("parts", [body]):
            self._incoming.put_nowait({"type": "http.request", "body": part, "more_body": True})
        if options.get("ends", True):
            self._incoming.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self.task = asyncio.create_task(app(self._scope, self._incoming.get, self.sent.put))

    async def message(self) -> Message:
        """The next message, or the application's failure."""
        getter = asyncio.create_task(self.sent.get())
        await asyncio.wait({getter, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if getter.done():
            return getter.result()
        getter.cancel()
        if self.sent.empty():
            self.task.result()
            raise EOFError("the application has ended")
        return self.sent.get_nowait()

    async def start(self) -> tuple[int, dict[str, str]]:
        message = await self.message()
        assert message["type"] == "http.response.start"
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in message["headers"]}
        return message["status"], headers

    async def until(self, part: bytes) -> bytes:
        """Read the body until it holds `part`."""
        body = b""
        while part not in body:
            body += (await self.message())["body"]
        return body

    async def rest(self) -> bytes:
        """Read the body to its end."""
        body, more = b"", True
        while more:
            message = await self.message()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await self.task
        return body

    def leave(self) -> None:
        """The client closes its connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})


async def call(app: ASGIApp, path: str, body: Any = b"", **options: Any) -> tuple[int, Any]:
    """One whole call; returns the status and the decoded JSON body."""
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    one = RawCall(app, path, raw, **options)
    status, _ = await one.start()
    data = await one.rest()
    return status, orjson.loads(data) if data else None


@asynccontextmanager
async def running(backend: Any, **settings: Any) -> Any:
    """An application between its start and its stop."""
    app = create_app(Settings(**settings), backend)
    async with app.router.lifespan_context(app):
        yield app


@contextmanager
def loopback(app: Starlette) -> Iterator[str]:
    """Serve an application on a free port of 127.0.0.1; yields its base URL."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(app, lifespan="on", log_level="warning", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server did not start")
            thread.join(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(15)
        listener.close()
    assert not thread.is_alive()


@contextmanager
def scripted_server(info: ModelInfo, lines: Sequence[Line], **settings: Any) -> Iterator[str]:
    """A loopback server over a script."""
    with loopback(create_app(Settings(**settings), ScriptedBackend(lines, info))) as url:
        yield url


async def eventually(holds: Callable[[], bool], within: float = 5.0) -> None:
    """Wait until a condition holds; fail when it never does."""
    async with asyncio.timeout(within):
        while not holds():  # noqa: ASYNC110 (it may be about anything)
            await asyncio.sleep(0.005)


def chat_body(content: str = "Hi", **fields: Any) -> dict[str, Any]:
    """A chat request; thinking is off unless the test says otherwise."""
    return {
        "model": "test-model",
        "messages": [{"role": "user", "content": content}],
        "thinking": {"type": "disabled"},
        **fields,
    }


def data_frames(stream: bytes) -> list[Any]:
    """Decode the JSON of each data frame; the closing [DONE] stays a string."""
    frames = []
    for frame in stream.decode().split("\n\n"):
        for line in frame.splitlines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                frames.append(data if data == "[DONE]" else orjson.loads(data))
    return frames
