"""Runs the server: backend, application and uvicorn in one process, from a free port to a clean end.

uvicorn is driven as a library. The application's lifespan is entered here rather than by uvicorn, so
that a model that cannot be served ends the start with one clear line instead of a traceback.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from gateway.app import create_app, served_model
from gateway.backends import Backend
from gateway.backends.embedded import EmbeddedBackend
from gateway.backends.scripted import ScriptedBackend
from gateway.settings import Settings, SettingsError
from gateway.sse import LAST_WORDS_SECONDS
from parsers import ServedModel

logger = logging.getLogger(__name__)

#: How often a running server looks whether its backend still lives, in seconds.
WATCH_SECONDS = 1.0
#: How long a worker's thread may keep the event loop waiting for the interpreter, in seconds.
SWITCH_SECONDS = 0.001


def serve(settings: Settings, backend: Backend, announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT, then let open replies end.

    Args:
        settings: where to listen, and the application's settings.
        backend: not yet started.
        announce: takes what the user is to read: first that the model loads, then where it is.

    Returns:
        The process's exit status: 0 after a signal, 1 when the backend died.

    Raises:
        SettingsError: the address cannot be listened on.
        parsers.BootError: the tokenizer cannot serve this model.
        engine.api.EngineError: the backend cannot serve it.
    """
    with bind(settings.host, settings.port) as listener:
        return asyncio.run(_serve(settings, backend, listener, announce))


def keep_loop_free() -> None:
    """Set the interpreter up so that the event loop is not held up; once all is loaded.

    A thread that computes gives the interpreter back to the loop soon. What was made until now is
    never garbage: collections leave it out, which else stop the loop for 100 ms and more.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()


def open_backend(settings: Settings) -> Backend:
    """Build the backend that the settings name, without starting it.

    Raises:
        engine.api.EngineError: the checkpoint's folder, the script or an option is wrong.
    """
    embedded = EmbeddedBackend(settings.model, settings.engine)
    kind, _, script = settings.backend.partition(":")
    if kind == "embedded":
        return embedded
    return ScriptedBackend(Path(script).expanduser(), embedded.info)  # nothing is loaded so far


def bind(host: str, port: int) -> socket.socket:
    """Take the address before the model is loaded, so that a taken port is known at once.

    Raises:
        SettingsError: the address is unknown or taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {host} port {port}: {error.strerror}; see --host and --port"
        ) from error
    return listener


async def _serve(
    settings: Settings,
    backend: Backend,
    listener: socket.socket,
    announce: Callable[[str], None],
) -> int:
    app = create_app(settings, backend)
    announce(f"bathyal loads {settings.model}")
    async with app.router.lifespan_context(app):
        keep_loop_free()
        server = _Server(app, settings, served_model(settings, backend), announce)
        watch = asyncio.create_task(_watch(backend, server))
        with _signals_held():
            await server.serve(sockets=[listener])
        if cut_off := set(server.server_state.tasks):
            # cancelled at the end of the drain, and not waited for: each has its error to send
            await asyncio.wait(cut_off, timeout=2 * LAST_WORDS_SECONDS)
        watch.cancel()
        if backend.stats().alive:
            return 0
        logger.error("the backend has ended; the server cannot go on")
        return 1


class _Server(uvicorn.Server):
    """uvicorn, but it says in our words when it is ready."""

    def __init__(
        self,
        app: Starlette,
        settings: Settings,
        model: ServedModel,
        announce: Callable[[str], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",  # entered by _serve
                log_config=None,  # whoever calls decides: see gateway.logs
                access_log=False,
                proxy_headers=False,  # nobody here looks at the client's address
                server_header=False,
                timeout_graceful_shutdown=settings.drain_seconds,
            )
        )
        self._model = model
        self._announce = announce
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then announce the address and a first command to try."""
        await super().startup(sockets)
        if self.started and sockets:
            self._announce(_ready_text(sockets[0].getsockname(), self._model))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal; on a second SIGINT end the open replies at once."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            self._loop.call_soon_threadsafe(self._cut_off)

    def _cut_off(self) -> None:
        for reply in self.server_state.tasks:
            reply.cancel()


def _ready_text(address: tuple[str, int], model: ServedModel) -> str:
    host, port = address[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    path, prompt = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    if model.version == "plain":
        path, prompt = "completions", '"prompt": "Hello"'
    return (
        f"bathyal serves {model.name} at {url}/v1\n\n"
        "Try it from another terminal:\n"
        f"""  curl {url}/v1/{path} -d '{{"model": "{model.name}", {prompt}}}'\n"""
    )


async def _watch(backend: Backend, server: uvicorn.Server) -> None:
    """End the server when its backend dies, so that whoever runs it can start a fresh one."""
    while backend.stats().alive:  # noqa: ASYNC110 (a thread dies without setting an event)
        await asyncio.sleep(WATCH_SECONDS)
    server.should_exit = True


@contextmanager
def _signals_held() -> Iterator[None]:
    """Keep the process alive over the signal that uvicorn, once drained, raises again."""
    held = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: None) for number in held}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
