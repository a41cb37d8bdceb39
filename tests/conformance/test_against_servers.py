"""The suite against two servers it did not make: the bare codec, and this project's gateway.

Each has a file of expected failures. So the cases' expectations are tested by the official codec
for all three protocols, and an entry that no longer fails is an error here.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from conformance import baseline, load, scripts
from conformance.client import HttpSender
from conformance.model import PROTOCOLS, Case, Protocol
from conformance.report import record, terminal
from conformance.runner import Options, Run, run

HERE = Path(__file__).parent
BARE = "tests.conformance.codec_server"


@contextmanager
def serving(command: list[str], port: int) -> Iterator[str]:
    """Starts a server process, waits for it, and ends it."""
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=HERE.parents[1])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"{url}/v1/models", trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            assert process.poll() is None, f"{command} ended"
            assert time.monotonic() < deadline, f"{command} does not answer"
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def against(
    url: str, cases: list[Case], protocols: tuple[Protocol, ...], model: str, expected: str
) -> Run:
    todo = load.variants(cases, protocols=protocols)
    entries = baseline.read(HERE / expected)
    options = Options(
        model=model, concurrency=4, unsupported=frozenset({"v4-tokenizer", "context-32k"})
    )

    async def go() -> Run:
        sender = HttpSender(url)
        try:
            return await run(
                todo,
                sender,
                options,
                expected=entries,
                meta={"endpoint": url, "model": model, "suite": "", "command": "", "started": ""},
            )
        finally:
            await sender.aclose()

    return asyncio.run(go())


@pytest.fixture
def played(cases: list[Case], tmp_path: Path) -> tuple[list[Case], Path]:
    chosen = load.select(cases, tiers=["scripted", "agents", "prompt"])
    path = tmp_path / "scripts.jsonl"
    path.write_bytes(scripts.dump(load.variants(chosen)))
    return chosen, path


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_bare_codec_fails_as_known(played: tuple[list[Case], Path]) -> None:
    """The official codec meets the suite but for the entries of codec.expected, all still true."""
    chosen, path = played
    port = free_port()
    with serving([BARE, "--scripts", str(path), "--port", str(port)], port) as url:
        found = against(url, chosen, PROTOCOLS, "m", "codec.expected")

    assert not found.failed, "\n".join(terminal.lines(record.record(found)))


@pytest.mark.slow
def test_own_gateway_fails_as_known(played: tuple[list[Case], Path]) -> None:
    """The gateway meets the suite on chat but for the entries of gateway.expected."""
    chosen, path = played
    port = free_port()
    command = ["gateway", "serve", "--backend", f"scripted:{path}", "--port", str(port)]
    with serving(command, port) as url:
        found = against(url, chosen, ("chat",), "bathyal-tiny", "gateway.expected")

    assert not found.failed, "\n".join(terminal.lines(record.record(found)))
