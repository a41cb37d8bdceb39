"""The command line: serve, doctor, render, parse, replay, and the engine's own commands.

Exit status: 0 fine, 1 found something, 2 misuse.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import orjson

import gateway
from engine.api import EngineError
from engine.cpu_wait import wait_briefly
from gateway.app import served_model
from gateway.backends.embedded import EmbeddedBackend
from gateway.backends.scripted import encoders
from gateway.doctor import examine
from gateway.launch import open_backend, serve
from gateway.logs import to_stderr
from gateway.recorder import ReplayError, replay
from gateway.settings import Settings, SettingsError, flags
from gateway.store import StoreError
from parsers import PROFILES, BootError, ClientError, Codec

_REPORTED = (
    SettingsError,
    EngineError,
    BootError,
    ClientError,
    ReplayError,
    StoreError,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        The exit status.
    """
    wait_briefly(os.environ)  # before any command loads torch
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["engine"]:
        from engine.cli import main as engine_main

        try:
            return engine_main(arguments[1:])
        except KeyboardInterrupt:  # an audit takes minutes
            return 130
    parsed = _parser().parse_args(arguments)
    given = {name: getattr(parsed, name, None) for name, _, _ in flags()}
    try:
        status: int = parsed.run(Settings.load(os.environ, given), parsed)
    except OSError as error:
        told = str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
        print(f"bathyal: {told}", file=sys.stderr)
        return 2
    except _REPORTED as error:
        print(f"bathyal: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while loading: once it serves, a signal ends it with status 0
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bathyal",
        description="Agent gateway for DeepSeek-V4 and V4.1 with its own engine.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"bathyal {gateway.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve", help="run the server", description=_serve.__doc__, allow_abbrev=False
    )
    for _, flag, about in flags():
        serve.add_argument(flag, metavar="VALUE", help=about.replace("%", "%%"))
    serve.set_defaults(run=_serve)

    doctor = commands.add_parser("doctor", help="look at this installation")
    doctor.set_defaults(run=_doctor)

    render = commands.add_parser("render", help="show the prompt that a request body becomes")
    render.add_argument("body", type=Path, metavar="BODY.json", help="a chat request body")
    render.set_defaults(run=_render)

    parse = commands.add_parser("parse", help="show what raw model output becomes on the wire")
    parse.add_argument("output", type=Path, metavar="OUT.txt", help="raw output, markers spelt out")
    parse.add_argument("--tools", type=Path, metavar="T.json", help="the tools of the request")
    parse.add_argument(
        "--raw",
        action="store_true",
        help="read marker spellings as plain text, as a model that"
        " imitates them would have written them",
    )
    parse.set_defaults(run=_parse)

    again = commands.add_parser("replay", help="run a recorded exchange again")
    again.add_argument("record", type=Path, metavar="RECORD.jsonl", help="written by --record")
    again.set_defaults(run=_replay)

    for command in (doctor, render, parse, again):
        command.add_argument("--model", metavar="DIR", help="folder of the checkpoint")
    for command in (render, parse, again):
        command.add_argument("--profile", metavar="NAME", help="official, sglang or agent")
    commands.add_parser("engine", help="commands of the engine: see bathyal engine --help")
    return parser


def _serve(settings: Settings, _: argparse.Namespace) -> int:
    """Run the server. Every flag is also a variable: --max-body-bytes is BATHYAL_MAX_BODY_BYTES."""
    to_stderr(settings.log)
    return serve(settings, open_backend(settings), partial(print, flush=True))


def _doctor(settings: Settings, _: argparse.Namespace) -> int:
    findings = examine(settings.model, settings.engine)
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        mark = "ok" if finding.ok else "PROBLEM"
        print(f"{mark:8}{finding.subject:{width}}  {finding.text}")
    return 0 if all(finding.ok for finding in findings) else 1


def _render(settings: Settings, parsed: argparse.Namespace) -> int:
    """Print the prompt as text, its ids and what the request asks of the engine."""
    codec = _codec(settings)
    exchange = codec.open_exchange("chat", parsed.body.read_bytes(), exchange_id="render")
    pieces = [codec.vocabulary.bytes_of(token_id) or b"" for token_id in exchange.prompt_ids]
    print(b"".join(pieces).decode(errors="replace"))
    print(f"\nprompt_ids ({len(pieces)}): {' '.join(map(str, exchange.prompt_ids))}")
    print(f"sampling: {exchange.sampling}")
    if exchange.constraint is not None:
        print(f"constraint: {exchange.constraint}")
    if exchange.ignored:
        print(f"ignored: {', '.join(exchange.ignored)}")
    return 0


def _parse(settings: Settings, parsed: argparse.Namespace) -> int:
    """Print each token with the frames it causes, then what the gate reported; 1 if anything.

    The output is read as the reply to a request with the given tools, of a thinking model where it
    holds the end of a thought.
    """
    codec = _codec(settings)
    try:
        text = parsed.output.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{parsed.output}: expected text in UTF-8: {error}") from error
    body: dict[str, object] = {
        "model": codec.model.name,
        "messages": [{"role": "user", "content": "-"}],
        "thinking": {"type": "enabled" if "</think>" in text else "disabled"},
        "stream": True,
    }
    if parsed.tools is not None:
        body["tools"] = _json_file(parsed.tools)
    exchange = codec.open_exchange("chat", orjson.dumps(body), exchange_id="parse")
    encode = encoders(codec.model.tokenizer_path)["raw_output" if parsed.raw else "output"].encode
    token_ids = encode(text, add_special_tokens=False).ids

    _show("start", exchange.start(len(exchange.prompt_ids), 0))
    for token_id in token_ids:
        spelt = (codec.vocabulary.bytes_of(token_id) or b"").decode(errors="replace")
        _show(f"{token_id} {spelt!r}", exchange.receive((token_id,)))
    _show("close", exchange.close("stop", len(token_ids)))
    found = exchange.report.extension()
    print(f"report: {orjson.dumps(found, option=orjson.OPT_INDENT_2).decode()}")
    return 1 if found else 0


def _replay(settings: Settings, parsed: argparse.Namespace) -> int:
    """Feed recorded tokens to the parsers again; 1 if a reply comes out otherwise.

    Any name of the model is answered to: which ones were served is not what a replay compares.
    """
    codec = _codec(dataclasses.replace(settings, aliases=("*",)))
    played = differing = 0
    for found in replay(parsed.record, codec):
        played += 1
        if found is not None:
            differing += 1
            print(f"line {found.line}, {found.exchange_id}: {found.text}")
    print(f"{played} exchanges, {differing} otherwise than recorded")
    return 1 if differing else 0


def _show(step: str, frames: list[bytes]) -> None:
    print(step)
    for frame in frames:
        print(f"    {frame.decode().rstrip()}")


def _json_file(path: Path) -> object:
    try:
        return orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise SettingsError(f"{path}: not JSON: {error}") from error


def _codec(settings: Settings) -> Codec:
    """Load the codec of a checkpoint whose weights are not needed."""
    model = served_model(settings, EmbeddedBackend(settings.model))
    return Codec.load(model, PROFILES[settings.profile])
