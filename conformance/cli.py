"""`bathyal-conform`: run, list, show, diff, scripts, import-canitoolcall.

Exit status: 0 nothing found, 1 something found, 2 misuse.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import httpx
import orjson

from conformance import baseline, canitoolcall, load, scripts
from conformance.checks import CHECKS
from conformance.client import HttpSender
from conformance.model import DIALECTS, PROTOCOLS, SWITCHES, TIERS, Case, Protocol, Variant
from conformance.protocols.render import render
from conformance.report import badge, diff, junit, markdown, matrix, page, record, terminal
from conformance.runner import Options, Run, run
from conformance.upstream import Upstream
from conformance.vocabulary import Vocabulary, VocabularyError

OK, FOUND, MISUSE = 0, 1, 2

# Features that few endpoints have: cases that need one are skipped unless --supported names it.
# So is every feature "NAME-tokenizer", which tables of prompt sizes need (docs/conformance.md).
OPT_IN = {"v4-tokenizer", "context-32k", "token-ids"}


class MisuseError(Exception):
    """The command line asks for something impossible; the message says what."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; None for those of the process.

    Returns:
        The exit status.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.act(arguments))
    except (
        MisuseError,
        load.CaseError,
        baseline.BaselineError,
        record.ReportError,
        VocabularyError,
    ) as error:
        print(f"bathyal-conform: {error}", file=sys.stderr)
        return MISUSE
    except BrokenPipeError:
        # The reader of stdout (head, a pager) left: no fault of this program.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bathyal-conform",
        description="Tells whether an endpoint speaks the tool-call protocol, and shows the bytes "
        "when it doesn't.",
        epilog="exit status: 0 nothing found, 1 something found, 2 misuse",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("run", help="run cases against an endpoint")
    command.set_defaults(act=_run)
    command.add_argument("--base-url", required=True, help="root of the endpoint")
    _selection(command)
    command.add_argument("--model", help="model to ask for (default: the first of /v1/models)")
    command.add_argument(
        "--upstream",
        metavar="PORT",
        type=int,
        help="play scripts from 127.0.0.1:PORT, which the endpoint has as its engine",
    )
    command.add_argument("--tokenizer", type=Path, help="tokenizer.json for --upstream's token ids")
    command.add_argument("--unsupported", default="", metavar="A,B", help="features to skip")
    command.add_argument(
        "--supported",
        default="",
        metavar="A,B",
        help=f"features to test that are skipped by default: {', '.join(sorted(OPT_IN))}",
    )
    command.add_argument("--expected-failures", type=Path, metavar="FILE")
    command.add_argument("--repeat", type=int, default=1, metavar="N", help="runs of live variants")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--concurrency", type=int, default=8)
    command.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="longest silence of the endpoint (default: 30; 300 with the live tier, where a whole "
        "reply is silent until the model has written it)",
    )
    command.add_argument("--key-env", metavar="NAME", help="variable that holds the API key")
    command.add_argument(
        "--parse-path", default="/parse_function_call", help="smg has /parse/function_call"
    )
    command.add_argument("--parser", default="deepseekv4", help="parser name in the parse tier")
    command.add_argument(
        "--thinking-switch",
        default="thinking",
        choices=SWITCHES,
        help="the chat field that turns thinking on and off; vLLM and SGLang have the second",
    )
    command.add_argument("--name", default="", help="the endpoint's name in reports")
    command.add_argument("--verbose", action="store_true", help="print warnings as well")
    for form in ("json", "junit", "html", "markdown", "badge"):
        command.add_argument(f"--{form}", type=Path, metavar="FILE")

    command = commands.add_parser("list", help="list cases, or checks")
    command.set_defaults(act=_list)
    command.add_argument("--checks", action="store_true", help="list checks instead of cases")
    _selection(command)

    command = commands.add_parser("show", help="show a case with its requests, or a check")
    command.set_defaults(act=_show)
    command.add_argument("id")
    command.add_argument("--cases", type=Path, action="append", default=[])
    command.add_argument("--protocol", choices=PROTOCOLS, help="only this protocol's request")

    command = commands.add_parser("diff", help="compare two JSON reports: regressions only")
    command.set_defaults(act=_diff)
    command.add_argument("before", type=Path)
    command.add_argument("after", type=Path)

    command = commands.add_parser("page", help="one page of several JSON reports")
    command.set_defaults(act=_page)
    command.add_argument("reports", type=Path, nargs="+")
    command.add_argument("--html", type=Path, metavar="FILE")
    command.add_argument("--markdown", type=Path, metavar="FILE")

    command = commands.add_parser("scripts", help="write the model outputs for a scripted server")
    command.set_defaults(act=_scripts)
    command.add_argument("--out", type=Path, required=True, help="JSON lines, one per output")
    command.add_argument(
        "--tokenizer", type=Path, help="the server's tokenizer.json, for outputs that are no text"
    )
    _selection(command)

    command = commands.add_parser("import-canitoolcall", help="turn its fixtures into parse cases")
    command.set_defaults(act=_import)
    command.add_argument("fixtures", type=Path, help="folder of the fixtures")
    command.add_argument("--out", type=Path, required=True)
    return parser


def _selection(command: argparse.ArgumentParser) -> None:
    command.add_argument("prefixes", nargs="*", metavar="ID-PREFIX")
    command.add_argument("--tier", default="scripted", help=f"of {', '.join(TIERS)}; comma list")
    command.add_argument("--profile", default="core", help="comma list; 'full' for every case")
    command.add_argument("--protocol", default="chat", help="comma list, or 'all'")
    command.add_argument("--dialect", default=",".join(DIALECTS), help="spellings of the tags")
    command.add_argument("--cases", type=Path, action="append", default=[], help="extra cases")


Word = TypeVar("Word", bound=str)


def _split(text: str, known: Sequence[Word], what: str) -> list[Word]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise MisuseError(f"unknown {what} {name!r}; known: {', '.join(known)}")
    return [word for name in names for word in known if word == name]


def _selected(arguments: argparse.Namespace) -> list[Case]:
    cases = load.load_cases(arguments.cases)
    tiers = _split(arguments.tier, TIERS, "tier")
    profiles = sorted({name for case in cases for name in case.profiles})
    wanted = _split(arguments.profile, [*profiles, "full"], "profile")
    if tiers != ["scripted"] and arguments.profile == "core":
        wanted = ["full"]  # core is a profile of the scripted tier
    if arguments.prefixes:
        wanted = ["full"]
    found = load.select(cases, tiers=tiers, profiles=wanted, prefixes=arguments.prefixes)
    if not found:
        raise MisuseError("no case is selected; see `bathyal-conform list --profile full`")
    return found


def _variants(arguments: argparse.Namespace) -> list[Variant]:
    named = (
        PROTOCOLS
        if arguments.protocol == "all"
        else _split(arguments.protocol, PROTOCOLS, "protocol")
    )
    dialects = _split(arguments.dialect, DIALECTS, "dialect")
    todo = load.variants(
        _selected(arguments),
        protocols=[*named, "parse"],
        dialects=dialects,
    )
    if not todo:
        raise MisuseError(f"the selected cases have no variant for protocol {arguments.protocol}")
    return todo


def _run(arguments: argparse.Namespace) -> int:
    todo = _variants(arguments)
    key = None
    if arguments.key_env:
        key = os.environ.get(arguments.key_env)
        if not key:
            raise MisuseError(f"the variable {arguments.key_env} is not set")
    expected = baseline.read(arguments.expected_failures) if arguments.expected_failures else []
    model = arguments.model or _first_model(arguments.base_url, key)
    meta = {
        "endpoint": arguments.base_url,
        "name": arguments.name,
        "model": model,
        "suite": metadata.version("bathyal"),
        "command": shlex.join(["bathyal-conform", *sys.argv[1:]]),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    found = asyncio.run(_against(arguments, todo, key, model, expected, meta))
    data = record.record(found, key_env=arguments.key_env)
    if arguments.json:
        record.dump(data, arguments.json)
    for path, text in (
        (arguments.junit, junit.render),
        (arguments.markdown, markdown.render),
        (arguments.badge, badge.render),
        (arguments.html, lambda report: page.render([report])),
    ):
        if path:
            path.write_text(text(data))
    print("\n".join(terminal.lines(data, verbose=arguments.verbose)))
    return FOUND if found.failed else OK


async def _against(
    arguments: argparse.Namespace,
    todo: list[Variant],
    key: str | None,
    model: str,
    expected: list[baseline.Entry],
    meta: dict[str, Any],
) -> Run:
    sender = HttpSender(
        arguments.base_url,
        key=key,
        timeout_s=arguments.timeout or (300.0 if "live" in arguments.tier else 30.0),
        connections=arguments.concurrency,
    )
    upstream: Upstream | None = None
    if arguments.upstream is not None:
        upstream = Upstream(arguments.upstream, tokenizer=arguments.tokenizer)
        await upstream.start()
    options = Options(
        model=model,
        concurrency=1 if upstream else arguments.concurrency,
        repeats=arguments.repeat,
        seed=arguments.seed,
        unsupported=_unsupported(arguments, todo),
        before=upstream.play if upstream else None,
        left=upstream.left if upstream else None,
        parse_path=arguments.parse_path,
        parser=arguments.parser,
        switch=arguments.thinking_switch,
    )
    try:
        return await run(
            todo,
            sender,
            options,
            expected=expected,
            progress=terminal.Progress(len(todo)),
            meta=meta,
        )
    finally:
        await sender.aclose()
        if upstream is not None:
            await upstream.aclose()


def _unsupported(arguments: argparse.Namespace, todo: list[Variant]) -> frozenset[str]:
    needed = {feature for v in todo for feature in v.case.needs}
    opt_in = OPT_IN | {feature for feature in needed if feature.endswith("-tokenizer")}
    named = _split(arguments.unsupported, sorted(needed | opt_in | {*PROTOCOLS}), "feature")
    supported = _split(arguments.supported, sorted(opt_in), "feature")
    return (frozenset(named) | opt_in) - frozenset(supported)


def _first_model(base_url: str, key: str | None) -> str:
    root = base_url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.get(f"{root}/v1/models", headers=headers, timeout=10, trust_env=False)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise MisuseError(f"--base-url: expected an http or https URL, got {base_url!r}") from error
    except httpx.HTTPError as error:
        raise MisuseError(f"{root} does not answer: {type(error).__name__}: {error}") from error
    try:
        return str(reply.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise MisuseError(
            f"{root}/v1/models names no model (status {reply.status_code}: {reply.text[:200]!r});"
            " give --model"
        ) from None


def _list(arguments: argparse.Namespace) -> int:
    if arguments.checks:
        for slug, check in CHECKS.items():
            print(f"{slug:42} {check.level:6} {check.why}")
        return OK
    found = _selected(arguments)
    for case in found:
        print(f"{case.id:44} {case.level:6} {case.tier:8} {case.why}")
    print(f"{len(found)} cases", file=sys.stderr)
    return OK


def _show(arguments: argparse.Namespace) -> int:
    if arguments.id in CHECKS:
        check = CHECKS[arguments.id]
        print(f"{check.slug} ({check.level}): {check.why}")
        return OK
    case = next((c for c in load.load_cases(arguments.cases) if c.id == arguments.id), None)
    if case is None:
        raise MisuseError(f"no case and no check is called {arguments.id!r}")
    print(f"{case.id} ({case.level}, tier {case.tier}, {case.file})\n{case.why}\n[{case.source}]")
    if case.script:
        print(f"\nmodel output ({case.script.finish}):\n{case.script.output}")
    for number, expect in enumerate(case.expect):
        print(f"\n{'accepted' if number else 'expected'}: {orjson.dumps(expect).decode()}")
    wanted: Sequence[Protocol] = [arguments.protocol] if arguments.protocol else PROTOCOLS
    tools = load.load_tools()
    for variant in load.variants([case], protocols=[*wanted, "parse"]):
        request, _ = render(variant, "MODEL", tools)
        print(f"\n{variant.id}\n{request.method} {request.path}")
        print(request.body.decode(errors="backslashreplace"))
    return OK


def _diff(arguments: argparse.Namespace) -> int:
    worse, better = diff.compare(record.load(arguments.before), record.load(arguments.after))
    for line in worse:
        print(f"worse  {line}")
    print(f"{len(worse)} regressions, {len(better)} improvements")
    return FOUND if worse else OK


def _page(arguments: argparse.Namespace) -> int:
    reports = [record.load(path) for path in arguments.reports]
    if arguments.html is None and arguments.markdown is None:
        raise MisuseError("give --html FILE or --markdown FILE, or both")
    if arguments.html is not None:
        arguments.html.write_text(page.render(reports))
    if arguments.markdown is not None:
        arguments.markdown.write_text(matrix.render(reports))
    return OK


def _scripts(arguments: argparse.Namespace) -> int:
    todo = load.variants(_selected(arguments))
    vocabulary = Vocabulary(arguments.tokenizer) if arguments.tokenizer else None
    arguments.out.write_bytes(scripts.dump(todo, vocabulary))
    return OK


def _import(arguments: argparse.Namespace) -> int:
    try:
        number = canitoolcall.convert(arguments.fixtures, arguments.out)
    except canitoolcall.FixtureError as error:
        raise MisuseError(str(error)) from None
    print(f"{number} cases in {arguments.out}")
    return OK


if __name__ == "__main__":
    sys.exit(main())
