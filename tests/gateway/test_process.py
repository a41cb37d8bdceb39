"""`bathyal serve` as a process: how it starts, what it says, how it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from engine import TINY_CHECKPOINT
from engine.api import EngineError, ModelInfo
from gateway import Settings
from gateway.launch import open_backend, serve
from tests.gateway.agent import ask
from tests.gateway.support import FunctionBackend, chat_body, data_frames

ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("BATHYAL_")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer_path: Path) -> Path:
    """A checkpoint without weights: what a script needs."""
    folder = tmp_path_factory.mktemp("checkpoint") / "test-model"
    folder.mkdir()
    shutil.copy(TINY_CHECKPOINT / "config.json", folder)
    shutil.copy(tokenizer_path, folder / "tokenizer.json")
    return folder


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.jsonl"
    rows: list[dict[str, Any]] = [
        {"name": "hello", "output": "Hello."},
        {"name": "slow", "output": "a" * 40, "delay_ms": 25},
        {"name": "endless", "output": "a" * 3000, "delay_ms": 50},
    ]
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "gateway", *map(str, arguments)]


def refused(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextmanager
def server(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A server process on a free port; yields it, its URL and what it printed when ready."""
    process = subprocess.Popen(
        command("serve", "--port", "0", *arguments),
        env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = ""
        while "curl" not in said:
            line = process.stdout.readline()
            assert line, process.stderr and process.stderr.read()
            said += line
        found = re.search(r"http://127\.0\.0\.1:\d+", said)
        assert found
        yield process, found[0], said
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_the_ready_text_holds_a_command_that_works(checkpoint: Path, script: Path) -> None:
    """A newcomer can paste the line that the server prints."""
    with server("--model", checkpoint, "--backend", f"scripted:{script}") as (_, url, said):
        pasted = re.search(r"curl (\S+) -d '(.*)'", said)
        assert pasted
        reply = httpx.post(pasted[1], content=pasted[2]).json()

    assert pasted[1] == f"{url}/v1/chat/completions"
    assert reply["choices"][0]["message"]["content"] == ""
    assert reply["choices"][0]["message"]["reasoning_content"] == "Hello."  # thinking is on


def refuses_within_two_seconds(url: str) -> bool:
    for _ in range(100):
        try:
            httpx.get(url)
        except httpx.TransportError:
            return True
        time.sleep(0.02)
    return False


def test_sigterm_lets_an_open_stream_end(checkpoint: Path, script: Path) -> None:
    """A server stopped in the middle of a stream finishes it, takes nothing new, and exits 0."""
    body = orjson.dumps(chat_body(stream=True))
    headers = {"x-bathyal-script": "slow"}
    with server("--model", checkpoint, "--backend", f"scripted:{script}") as (process, url, _):
        path = f"{url}/v1/chat/completions"
        with httpx.stream("POST", path, content=body, headers=headers) as response:
            stream = response.iter_raw()
            received = next(stream)
            process.send_signal(signal.SIGTERM)
            received += next(stream)
            assert refuses_within_two_seconds(f"{url}/health")
            received += b"".join(stream)
        assert process.wait(10) == 0
        assert process.stderr
        lines = [orjson.loads(line) for line in process.stderr]

    assert {line["message"] for line in lines} == {"request"}
    assert [line["completion_tokens"] for line in lines if "completion_tokens" in line] == [41]
    frames = data_frames(received)
    assert frames[-1] == "[DONE]"
    text = "".join(f["choices"][0]["delta"].get("content") or "" for f in frames[:-1])
    assert text == "a" * 40


@pytest.mark.parametrize("stream", [True, False])
def test_a_reply_longer_than_the_drain_ends_in_an_error(
    checkpoint: Path, script: Path, stream: bool
) -> None:
    """When the time for draining is over the client hears it: no reply is cut silently."""
    arguments = ("--model", checkpoint, "--backend", f"scripted:{script}", "--drain-seconds", "1")
    with server(*arguments) as (process, url, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            threading.Timer(0.5, process.send_signal, [signal.SIGTERM]).start()
            with pytest.raises(openai.APIError, match="shutting down"):
                ask(
                    client,
                    stream=stream,
                    model="test-model",
                    messages=[{"role": "user", "content": "?"}],
                    extra_headers={"x-bathyal-script": "endless"},
                )
        assert process.wait(10) == 0
        assert process.stderr
        assert "Traceback" not in process.stderr.read()


def test_a_second_sigint_does_not_wait(checkpoint: Path, script: Path) -> None:
    """Ctrl-C twice ends the server at once, open streams or not."""
    body = orjson.dumps(chat_body(stream=True))
    headers = {"x-bathyal-script": "endless"}
    with server("--model", checkpoint, "--backend", f"scripted:{script}") as (process, url, _):
        path = f"{url}/v1/chat/completions"
        with httpx.stream("POST", path, content=body, headers=headers) as response:
            stream = response.iter_raw()
            next(stream)
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
            assert b"shutting down" in b"".join(stream)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "http"], "--port: expected a port, 0 to 65535, got 'http'"),
        (["--model", "/no/such"], "--model: expected a folder that exists, got '/no/such'"),
        (["--backend", "magic"], "--backend: expected 'embedded' or 'scripted:FILE'"),
        (["--model", "/"], "config.json"),
    ],
)
def test_a_wrong_setting_ends_the_start_with_one_line(arguments: list[str], words: str) -> None:
    """The message names the setting; no traceback, exit status 2."""
    result = refused("serve", *arguments)

    assert result.returncode == 2
    assert result.stderr.startswith("bathyal: ")
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_wrong_variable_ends_the_start(checkpoint: Path) -> None:
    """An environment variable is checked like a flag."""
    result = refused("serve", BATHYAL_KEEP_ALIVE_SECONDS="-1")

    assert result.returncode == 2
    assert "BATHYAL_KEEP_ALIVE_SECONDS: expected a number of seconds above 0" in result.stderr


def test_a_wrong_script_ends_the_start(checkpoint: Path, tmp_path: Path) -> None:
    """The message names the line of the file."""
    script = tmp_path / "script.jsonl"
    script.write_text('{"output": "a"}\n{"ouput": "b"}\n')

    result = refused("serve", "--model", checkpoint, "--backend", f"scripted:{script}")

    assert result.returncode == 2
    assert f"{script}, line 2: ouput: no such field" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_tokenizer_without_a_marker_ends_the_start(checkpoint: Path, tmp_path: Path) -> None:
    """The codec's start-up check speaks through the command line and names the token."""
    folder = tmp_path / "lame"
    shutil.copytree(checkpoint, folder)
    spec = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(spec.replace("<｜System｜>", "<｜Sistem｜>"))
    script = tmp_path / "script.jsonl"
    script.write_text('{"output": "a"}\n')

    result = refused("serve", "--model", folder, "--backend", f"scripted:{script}")

    assert result.returncode == 2
    assert "<｜System｜>" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_settings_reach_the_backend(checkpoint: Path, script: Path) -> None:
    """Context, batch and script are what the user set."""
    for backend in ("embedded", f"scripted:{script}"):
        opened = open_backend(Settings(model=checkpoint, backend=backend, max_model_len=512))
        assert opened.info.max_model_len == 512
        assert opened.info.name == "test-model"
    with pytest.raises(EngineError, match="max_batched_tokens: expected at least 17, got 16"):
        open_backend(Settings(model=checkpoint, max_num_seqs=16, max_batched_tokens=16))
    with pytest.raises(EngineError, match=r"absent\.jsonl"):
        open_backend(Settings(model=checkpoint, backend="scripted:/absent.jsonl"))


def test_a_taken_port_ends_the_start(checkpoint: Path, script: Path) -> None:
    """The message names host and port before any model is loaded."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])

        result = refused(
            "serve", "--model", checkpoint, "--backend", f"scripted:{script}", "--port", port
        )

    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in result.stderr


def test_a_dead_backend_ends_the_process_with_status_1(info: ModelInfo) -> None:
    """Whoever supervises the server sees that it has to be started again."""

    async def generate(request: Any) -> Any:
        return
        yield

    backend = FunctionBackend(info, generate)
    said: list[str] = []

    def announce(text: str) -> None:
        said.append(text)
        backend.alive = "curl" not in text

    assert serve(Settings(port=0), backend, announce) == 1
    loads, ready = said
    assert loads.startswith("bathyal loads /")
    assert ready.startswith("bathyal serves test-model at http://127.0.0.1:")


@pytest.mark.parametrize("module", ["gateway", "gateway.app", "gateway.cli", "gateway.launch"])
def test_the_gateway_loads_no_torch(module: str) -> None:
    """Every module of the room, the command line included, starts without the GPU stack."""
    code = f"import sys, {module}; print([m for m in ('torch', 'triton') if m in sys.modules])"

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert result.stdout.strip() == "[]"
