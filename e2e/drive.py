"""Drives one loop: writes the script, starts the server, runs the client, collects what is left.

The model is the scripted backend, so that a loop's outcome says nothing of a model. It stands in for
the checkpoint that ships with its context lengthened: coding agents send more tokens of tools than
that one was trained for, and a script reads none of its weights.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from string import Template
from typing import Any

import orjson

from e2e.environments import interpreter
from e2e.manifest import FOLDER, WORK, Client, Run
from e2e.verdict import Evidence, Expected, judge, reasoning_back

ROOT = FOLDER.parent
CHECKPOINT = ROOT / "engine" / "checkpoints" / "tiny"
CONTEXT = 1 << 20
MODEL_NAME = "bathyal"
KEY = "sk-e2e-loopback"
SECONDS = 180
#: What the SDKs' tool is called with: quotes, escapes, other scripts, a number.
ARGUMENTS = {"city": 'São "Tomé" \\ 東京\n🌊', "days": 3}
#: What programs that bring a shell tool run: it leaves a mark and shows the result.
COMMAND = "tee mark.txt < result.txt"
OPENER = "\n\n<｜DSML｜ calls>\n"
INVOKE = '<｜DSML｜ invoke name="{}">\n'
SCRIPTS = ("text", "final_answer", "second_try")
PROMPT = "What is the weather? Use the tool, then answer."


def block(name: str, arguments: dict[str, Any]) -> str:
    """Spell one call as the model does."""
    parameters = "".join(
        f'<｜DSML｜ parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else orjson.dumps(value).decode()}</｜DSML｜ parameter>\n"
        for key, value in arguments.items()
    )
    return f"{OPENER}{INVOKE.format(name)}{parameters}</｜DSML｜ invoke>\n</｜DSML｜ calls>"


def script(kind: str, thought: str, final: str) -> list[str]:
    """What the model says, one text per generation.

    Args:
        kind: a name of SCRIPTS, or `NAME:PARAMETER` for a program's shell tool.
        thought: reasoning before the call.
        final: what the client is to show.
    """
    think, again = f"{thought}</think>", "That will do.</think>"
    if kind == "text":
        return [think + block("lookup", ARGUMENTS), again + final]
    # Where the client forces a call, the server ends the generation after the reasoning and starts
    # another, in which the call is already opened: the model goes on from there.
    if kind == "final_answer":  # any call is forced; the answer is one too
        calls = [block("lookup", ARGUMENTS), block("final_answer", {"answer": final})]
        return [think, calls[0].removeprefix(OPENER), again, calls[1].removeprefix(OPENER)]
    if kind == "second_try":  # one call is forced; its first arguments fail the client's own check
        opened = OPENER + INVOKE.format("Weather")
        calls = [block("Weather", {**ARGUMENTS, "answer": text}) for text in ("a guess", final)]
        return [think, calls[0].removeprefix(opened), again, calls[1].removeprefix(opened)]
    name, _, parameter = kind.partition(":")
    return [think + block(name, {parameter: COMMAND}), again + final]


def drive(client: Client, run: Run) -> dict[str, Any]:
    """Run one loop.

    Returns:
        A row of results: client, version, protocol, stream, variant, verdict, note, reasoning,
        seconds.
    """
    folder = client.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    home, work = folder / "home", folder / "work"
    home.mkdir(parents=True)
    work.mkdir()
    result, final, thought = (f"{word}-{secrets.token_hex(6)}" for word in ("ok", "done", "why"))
    shell = run.script not in SCRIPTS
    expected = Expected(
        protocol=run.protocol,
        stream=run.stream,
        mark=result if shell else orjson.dumps(ARGUMENTS).decode(),
        result=result,
        thought=thought,
        final=final,
        client_errors=run.client_errors,
    )
    lines = [{"output": text} for text in script(run.script, thought, final)]
    lines.append({"output": "A title.</think>Weather", "name": "aside"})
    (folder / "script.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    (work / "result.txt").write_text(result)

    started = time.monotonic()
    with server(folder) as url:
        status, output = _run_client(client, run, url, home, work)
    seconds = round(time.monotonic() - started, 1)

    mark = work / "mark.txt"
    evidence = Evidence(
        status=status,
        output=output,
        mark=mark.read_text() if mark.is_file() else None,
        log=_lines(folder / "server.log"),
        exchanges=_lines(folder / "record.jsonl"),
    )
    faults = judge(expected, evidence)
    return {
        "client": client.name,
        "version": client.version,
        "protocol": run.protocol,
        "stream": run.stream,
        "variant": run.variant,
        "verdict": "FAIL" if faults else "PASS",
        "note": "; ".join(faults),
        "reasoning": reasoning_back(expected, evidence),
        "seconds": seconds,
    }


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Serve the folder's script on a free port of 127.0.0.1.

    Yields:
        The address, without a path.

    Raises:
        RuntimeError: the server did not start; the message is its log.
    """
    command = (
        *(sys.executable, "-m", "gateway", "serve", "--host", "127.0.0.1", "--port", "0"),
        *("--model", str(_model()), "--name", MODEL_NAME, "--profile", "agent"),
        *("--backend", f"scripted:{folder / 'script.jsonl'}"),
        *("--record", str(folder / "record.jsonl")),
    )
    environment = {**_environment(folder), "BATHYAL_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
    out, log = folder / "server.out", folder / "server.log"
    with out.open("w") as stdout, log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=stdout, stderr=stderr, env=environment, cwd=folder
        )
    try:
        yield _address(process, out, log)
    finally:
        process.terminate()
        process.wait(60)


def _address(process: subprocess.Popen[bytes], out: Path, log: Path) -> str:
    for _ in range(1200):
        if process.poll() is not None:
            break
        _, found, rest = out.read_text().partition("http://")
        if found and "/v1" in rest:
            url = f"http://{rest.partition('/v1')[0]}"
            with urllib.request.urlopen(f"{url}/readyz", timeout=10):
                return url
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start: {log.read_text()[-500:]}")


def _run_client(
    client: Client, run: Run, url: str, home: Path, work: Path
) -> tuple[int | None, str]:
    values = {"url": url, "protocol": run.protocol, "prompt": PROMPT, "model": MODEL_NAME}
    values |= {"key": KEY, "folder": str(client.folder), "variant": run.variant}

    def fill(text: str) -> str:
        return Template(text).substitute(values)

    for path, text in client.files.items():
        target = home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(fill(text))
    environment = {
        **_environment(home),
        **{f"E2E_{key.upper()}": value for key, value in values.items()},
        "E2E_STREAM": "1" if run.stream else "",
        **{key: fill(value) for key, value in client.env.items()},
    }
    if client.argv:
        command = [fill(part) for part in client.argv]
    elif client.kind == "python":
        command = [str(interpreter(client)), str(FOLDER / "drivers" / client.driver)]
    else:
        # a module finds its packages from where it lies
        for source in (FOLDER / "drivers").glob("*.mjs"):
            shutil.copy(source, client.folder)
        command = ["node", str(client.folder / client.driver)]
    with (work.parent / "client.err").open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            cwd=work,
            start_new_session=True,
        )
    try:
        output, _ = process.communicate(timeout=SECONDS)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        output, status = b"", None
    finally:
        with suppress(ProcessLookupError):  # it, and what it left running
            os.killpg(process.pid, signal.SIGKILL)
    if status is None:
        output, _ = process.communicate()
    text = output.decode(errors="replace")
    (work.parent / "client.out").write_text(text)
    return status, text


def _environment(home: Path) -> dict[str, str]:
    """Nothing of the caller's: no key, no proxy, no configuration reaches a client."""
    node = shutil.which("node")
    path = ":".join(
        dict.fromkeys([*([str(Path(node).parent)] if node else []), *os.defpath.split(":")])
    )
    return {
        "PATH": path.strip(":"),
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _model() -> Path:
    folder = WORK / "model"
    folder.mkdir(parents=True, exist_ok=True)
    config = orjson.loads((CHECKPOINT / "config.json").read_bytes())
    config["text_config"]["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_bytes(orjson.dumps(config))
    shutil.copy(CHECKPOINT / "tokenizer.json", folder)
    return folder


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [orjson.loads(line) for line in path.read_bytes().splitlines() if line.startswith(b"{")]
