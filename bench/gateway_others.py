"""Other gateways beside ours in the same run: LiteLLM's proxy and smg, for `bench.gateway`.

    python -m venv DIR; DIR/bin/pip install 'litellm[proxy]==1.108.7' smg==1.13.0
    python -m bench.gateway --others DIR/bin

Both pass on what an OpenAI-compatible engine says: neither renders a prompt, parses an output nor
gates a call here, so their figures are what a hop costs, beside what ours costs with all of that.
LiteLLM sends the arguments of a call at once, so it has no row for a call a frame at a time. Their
engine is our own server over the same played tokens, one per script, on the core of the load;
its CPU is not counted, but where a gateway is quick it bounds the requests a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import orjson

KEY = "sk-bench-0123456789abcdef0123456789abcdef"
START_SECONDS = 120
CONFIG = """
model_list:
{models}
litellm_settings: {{drop_params: true, telemetry: false}}
general_settings: {{master_key: {key}}}
"""
MODEL = (
    "  - model_name: {name}\n"
    "    litellm_params: {{model: hosted_vllm/{name}, api_key: none,"
    ' api_base: "http://127.0.0.1:{port}/v1"}}\n'
)


def last_words(errors: BinaryIO) -> str:
    """Give the end of what a process has written to stderr, to be put behind what went wrong."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 4000))
    text = errors.read().decode(errors="replace").strip()
    return f": {text}" if text else ", and said nothing"


def ready(process: subprocess.Popen[Any], port: int, model: str, errors: BinaryIO) -> None:
    """Wait until a gateway answers a chat; SystemExit with its last words where it does not."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        orjson.dumps(body),
        {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=10):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"{process.args!r} does not answer{last_words(errors)}")


@contextmanager
def running(command: list[str], port: int, model: str, core: int | None) -> Iterator[Any]:
    """A gateway's process, pinned to a core and ready."""
    pinned = command if core is None else ["taskset", "-c", str(core), *command]
    with TemporaryFile() as errors:
        process = subprocess.Popen(pinned, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            ready(process, port, model, errors)
            yield process, port
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def engines(folder: Path, lines: list[dict[str, Any]], server: Any) -> Iterator[dict[str, int]]:
    """One of our servers for each script, which plays that alone; yields their ports by name."""
    with ExitStack() as stack:
        ports = {}
        for line in lines:
            path = folder / f"{line['name']}.jsonl"
            path.write_bytes(orjson.dumps(line))
            command = [
                *(sys.executable, "-m", "gateway", "serve", "--port", "0", "--aliases", "*"),
                *("--backend", f"scripted:{path}", "--max-open-requests", "2000", "--log", "error"),
            ]
            _, ports[line["name"]] = stack.enter_context(server(command, None))
        yield ports


@contextmanager
def litellm(bin_: Path, folder: Path, ports: dict[str, int], port: int, core: int | None) -> Any:
    """LiteLLM's proxy, with one model for each script."""
    config = folder / "litellm.yaml"
    models = "".join(MODEL.format(name=name, port=at) for name, at in ports.items())
    config.write_text(CONFIG.format(models=models, key=KEY))
    command = [str(bin_ / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
    with running([*command, "--port", str(port)], port, next(iter(ports)), core) as found:
        yield found


@contextmanager
def smg(bin_: Path, engine: int, port: int, core: int | None) -> Any:
    """One smg in front of one engine."""
    command = [
        *(str(bin_ / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(port + 1), "--worker-urls", f"http://127.0.0.1:{engine}"),
    ]
    with running(command, port, "bathyal-tiny", core) as found:
        yield found
