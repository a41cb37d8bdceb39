"""Hostile requests, made from good ones, and what must hold for the reply to every one of them.

    python -m tests.gateway.fuzz_requests --count 50000      cases of a seed; prints what broke a rule
    python -m tests.gateway.fuzz_requests --singles          every single change of the rich bodies
    python -m tests.gateway.fuzz_requests --only 4711        one of them again, with its body

A case is a function of the seed and its number: a good body of one of the endpoints, changed at one
or two nodes of its JSON tree (replaced by a hostile value, left out, doubled, nested, swapped with a
sibling, or given a member it did not have), or a body that is no such tree at all. What must hold:

* the status is never 5xx, and nothing raises behind a reply;
* a refusal has its protocol's form and a message; where the message names a field, so does `param`;
* a reply is whole: JSON of its protocol, or a stream that ends as its protocol's streams end;
* what a response leaves in the store can be fetched.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from starlette.types import ASGIApp
from tokenizers import Tokenizer

from engine.api import FinishReason, GenerateRequest, TokenDelta, TokenLogprob
from tests.gateway.fuzz_bodies import CLIENTS, KEPT, KEPT_ITEM, OUTPUTS, REST, RICH, SEEN
from tests.gateway.support import EOS, FunctionBackend, RawCall, make_info, running, save_tokenizer

PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "completions": "/v1/completions",
    "tokenize": "/v1/tokenize",
    "parse": "/parse_function_call",
    "separate": "/separate_reasoning",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "agent": {"profile": "agent", "store": "memory"},
    "official": {"profile": "official"},
    "sglang": {"profile": "sglang"},
    "sees": {"profile": "agent", "store": "memory"},
    "older": {"profile": "agent", "store": "memory"},  # V4, and every exchange recorded
}


class Text(str):
    """A value as it is to stand in the JSON text, whatever JSON says of it."""

    __slots__ = ()


def walk(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Give every node of a JSON tree with its path, the root first."""
    yield path, node
    if isinstance(node, dict):
        for key, value in node.items():
            yield from walk(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from walk(value, (*path, index))


GOOD = [
    *((p, {"model": "test-model", **body}) for p, body in RICH),
    *((one["protocol"], {**one["body"], "model": "test-model"}) for one in CLIENTS),
]
SIGHTED = [(p, {"model": "test-model", **body}) for p, body in SEEN]
_NODES = [(path, node) for _, body in (*GOOD, *SIGHTED) for path, node in walk(body)]
TYPES = sorted({n for p, n in _NODES if p and p[-1] in ("type", "role") and isinstance(n, str)})
KEYS = sorted({path[-1] for path, _ in _NODES if path and isinstance(path[-1], str)})
DEEP = (200, 1000)
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 2**63, "", " ", "\x00", "x", "x" * 5000, [], {}),
    *([None], [[]], [{}], [""], [1], {"": None}, {"type": None}, {"type": "x"}, {"type": []}),
    *(Text("1e400"), Text(str(2**70)), Text("-0"), Text("NaN"), Text(r'"\ud800"')),
    *(Text("[" * deep + "]" * deep) for deep in DEEP),
    *(Text('{"a":' * deep + "1" + "}" * deep) for deep in DEEP),
    *(Text('{"content":[' * (d // 2) + "]}" * (d // 2)) for d in DEEP),
    *(Text('{"$ref": "#"}'), {"type": ["x"]}, {"required": [{}]}, {"properties": {"a": 1}}),
    *(
        Text('"\\u2028"'),
        "<｜end▁of▁sentence｜>",
        "</think>",
        {"name": []},
        {"id": 1, "type": "text"},
    ),
    *({"type": name} for name in TYPES),
    *({"type": name, "role": name} for name in TYPES),
    *TYPES,
]
RAW = [
    *(
        b"",
        b" \n",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b"{",
        b"{}{}",
        b"{} x",
        b"null",
        b"[]",
        b'"x"',
    ),
    *(b"NaN", b"1e999", b'{"model": NaN}', b'{"model": Infinity}', b"{'model': 1}", b'{"a": 1,}'),
    *(b'{"model": "test-model", "model": "x"}', b'{"": 1}', b'{"model": "\xc3"}', b"[" * 100_000),
    *(b'{"a":' * 2000 + b"1" + b"}" * 2000, b'{"model": "\\ud800"}', b"\x00", b"a=1&b=2"),
    *(gzip.compress(b'{"model": "test-model"}', mtime=0), b'{"model": /* c */ 1}', b"-", b"tru"),
]
HEADERS: list[dict[str, str]] = [
    {"content-type": "text/plain"},
    {"content-type": "multipart/form-data; boundary=x"},
    {"content-type": ""},
    {"content-type": "application/json; charset=utf-16"},
    {"content-encoding": "gzip"},
    {"x-bathyal-script": ",,"},
    {"x-bathyal-prefill": "\xff"},
]


@dataclass(frozen=True)
class Case:
    """One request.

    Args:
        number: within the seed.
        server: which of ``SETTINGS`` it is sent to.
        protocol: which of ``PATHS``.
        body: as it is sent; holds ``KEPT`` where the id of a kept response belongs.
        headers: beside none.
        what: how it was made.
    """

    number: int
    server: str
    protocol: str
    body: bytes
    headers: dict[str, str]
    what: str


def rendered(node: Any) -> bytes:
    """Write a tree as JSON; a ``Text`` stands as it is."""
    if isinstance(node, Text):
        return node.encode()
    if isinstance(node, dict):
        return (
            b"{" + b",".join(orjson.dumps(k) + b":" + rendered(v) for k, v in node.items()) + b"}"
        )
    if isinstance(node, list):
        return b"[" + b",".join(map(rendered, node)) + b"]"
    return orjson.dumps(node)


def changed(node: Any, path: tuple[Any, ...], how: str, value: Any) -> Any:
    """Return a tree with a change at a path; nodes off the path are shared."""
    if not path:
        return _changed_root(node, how, value)
    if not isinstance(node, dict | list):
        return node  # the other change of a pair has taken the path away
    copy: Any = dict(node) if isinstance(node, dict) else list(node)
    key = path[0]
    there = key in copy if isinstance(copy, dict) else isinstance(key, int) and key < len(copy)
    if not there:
        return node
    if len(path) > 1 or how in ("replace", "nest", "name", "add"):
        copy[key] = changed(copy[key], path[1:], how, value)
        return copy
    if how == "delete":
        del copy[key]
    elif how == "double":
        if isinstance(copy, list):
            copy.insert(key, copy[key])
        else:
            text = rendered(copy[key]).decode()
            copy[key] = Text(f"{text},{orjson.dumps(key).decode()}:{text}")
    elif how == "rename":
        copy = {(value if k == key else k): v for k, v in copy.items()} if path else copy
    else:
        keys = list(copy) if isinstance(copy, dict) else list(range(len(copy)))
        other = keys[(keys.index(key) + 1) % len(keys)]
        copy[key], copy[other] = copy[other], copy[key]
    return copy


def _changed_root(node: Any, how: str, value: Any) -> Any:
    if how == "replace":
        return value
    if how == "nest":
        return [node]
    if how == "name":
        return {value: node}
    if how == "add" and isinstance(node, dict):
        return {**node, value[0]: value[1]}
    return node


def _change(rng: random.Random, tree: Any) -> tuple[tuple[Any, ...], str, Any]:
    """Draw a change of a tree: where, how and with what."""
    path, node = rng.choice([*walk(tree)])
    how = rng.choices(
        ("replace", "delete", "double", "nest", "name", "swap", "add", "rename"),
        (12, 2, 1, 1, 1, 1, 3, 1),
    )[0]
    value: Any = None
    if how == "replace":
        value = rng.choice(HOSTILE)
    elif how == "name":
        value = rng.choice(("", "type", "text", "function", "content"))
    elif how == "rename":
        if not path or not isinstance(path[-1], str):
            how = "swap"
        value = rng.choice((*KEYS, "", "x" * 5000, "a.b[0]"))
    elif how == "add":
        if not isinstance(node, dict):
            how, value = "replace", rng.choice(HOSTILE)
        else:
            value = (rng.choice(KEYS), rng.choice((*HOSTILE, rng.choice(_NODES)[1])))
    return path, how, value


def make(seed: int, number: int) -> Case:
    """Make a case; a function of its arguments."""
    rng = random.Random(f"{seed} {number}")
    server = rng.choices(list(SETTINGS), (5, 2, 2, 1, 2))[0]
    if server == "sees":
        protocol, tree = rng.choice(SIGHTED)
    else:
        protocol, tree = rng.choice(GOOD[: len(RICH)] if rng.random() < 0.6 else GOOD)
    if protocol == "messages" and rng.random() < 0.1:
        protocol = "count_tokens"
    if rng.random() < 0.01:
        raw = rng.choice(RAW)
        return Case(number, server, protocol, raw, {}, f"raw {raw[:40]!r}")
    mutant: Any = tree
    notes = []
    for _ in range(1 if rng.random() < 0.6 else 2):
        path, how, value = _change(rng, tree)
        mutant = changed(mutant, path, how, value)
        notes.append(f"{how} {path} {str(value)[:80]!r}")
    if isinstance(mutant, dict) and "stream" in mutant and rng.random() < 0.5:
        mutant = {key: value for key, value in mutant.items() if "stream" not in key}
    headers = rng.choice(HEADERS) if rng.random() < 0.02 else {}
    return Case(number, server, protocol, rendered(mutant), headers, "; ".join(notes))


REPLY_AT_FAULT = (
    "response_format is not met",
    "tool_choice asks for a call",
    "the arguments of a call of",
)
"""How refusals begin that are the model's doing: what it was asked for, this backend does not write."""


def singles() -> Iterator[Case]:
    """Give every single change of the rich bodies: each node, each hostile value, each other change."""
    number = 0
    rich = [("agent", one) for one in GOOD[: len(RICH)]] + [("sees", one) for one in SIGHTED]
    for server, (protocol, tree) in rich:
        for path, _ in walk(tree):
            changes = [("replace", value) for value in HOSTILE]
            changes += [(how, "type") for how in ("delete", "double", "nest", "name", "swap")]
            for how, value in changes:
                body = rendered(changed(tree, path, how, value))
                what = f"{how} {path} {str(value)[:80]!r}"
                yield Case(number, server, protocol, body, {}, what)
                number += 1


class BrokenError(AssertionError):
    """A reply broke a rule."""


def _holds(ok: Any, rule: str, reply: Any) -> None:
    if not ok:
        raise BrokenError(f"{rule}: {str(reply)[:600]}")


class Servers:
    """Applications with every profile, over a backend that answers anything.

    Attributes:
        apps: by the names of `SETTINGS`.
        kept: a response that each of them keeps, where it keeps some.
        refusals: messages of refusals without `param`, by how often they came.
        statuses: of all replies.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "tokenizer.json"
        save_tokenizer(self._path)
        self._encoded: dict[str, list[int]] = {}
        self._tokenizer: Any = Tokenizer.from_file(str(self._path))
        self.apps: dict[str, ASGIApp] = {}
        self.kept: dict[str, Any] = {}
        self.output = OUTPUTS[0]
        self._stack = AsyncExitStack()
        self.refusals: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()

    async def __aenter__(self) -> Servers:
        for name, settings in SETTINGS.items():
            older = name == "older"
            version = "v4" if older else "v4.1"
            info = make_info(self._path, has_vision=name == "sees", version=version)
            if older:
                settings = {**settings, "record": self._path.with_name("recorded.jsonl")}
            backend = FunctionBackend(info, self._generate)
            app = await self._stack.enter_async_context(running(backend, **settings))
            self.apps[name] = app
            if "store" in settings:
                status, reply = await self.send(
                    app, "responses", b'{"model":"test-model","input":"x"}'
                )
                _holds(status == 200, "a response is kept", reply)
                self.kept[name] = orjson.loads(reply)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Think, and answer; inside an opened call, end it."""
        if request.id.endswith("-call"):
            prompt = self._tokenizer.decode(request.prompt_ids[-8:], skip_special_tokens=False)
            text = REST if prompt.endswith('">\n') else f'<｜DSML｜ invoke name="f">\n{REST}'
        else:
            text = self.output
        if text not in self._encoded:
            self._encoded[text] = self._tokenizer.encode(text).ids
        ids = [*self._encoded[text], EOS][: request.sampling.max_tokens]
        scored = request.sampling.top_logprobs
        for i, token_id in enumerate(ids):
            score = None
            if scored is not None:
                score = (TokenLogprob(-1.0, tuple((20 + k, -2.0) for k in range(scored))),)
            finish = None
            if i + 1 == len(ids):
                finish = FinishReason.STOP if token_id == EOS else FinishReason.LENGTH
            yield TokenDelta(request.id, (token_id,), logprobs=score, finish_reason=finish)

    async def send(
        self, app: ASGIApp, protocol: str, body: bytes, **options: Any
    ) -> tuple[int, bytes]:
        """Send one request and return its status and reply; what raises behind it raises here."""
        path = options.pop("path", None) or PATHS[protocol]
        one = RawCall(app, path, body, **options)
        status, _ = await one.start()
        reply = await one.rest()
        return status, reply

    def filled(self, case: Case) -> bytes:
        """Put the ids of what the server keeps into a body."""
        kept = self.kept.get(case.server, {"id": "none", "output": [{"id": "none"}]})
        body = case.body.replace(KEPT.encode(), kept["id"].encode())
        return body.replace(KEPT_ITEM.encode(), kept["output"][-1]["id"].encode())

    async def check(self, case: Case) -> None:
        """Send a case and hold its reply to the rules.

        Raises:
            BrokenError: it breaks one.
            Exception: something raised inside the server.
        """
        app = self.apps[case.server]
        body = self.filled(case)
        self.output = OUTPUTS[case.number % len(OUTPUTS)]
        async with asyncio.timeout(20):
            status, reply = await self.send(app, case.protocol, body, headers=case.headers)
        self.statuses[status] += 1
        if status >= 400:
            self._check_refusal(case, status, reply)
        elif reply.startswith((b"data:", b"event:", b":")):
            check_stream(case.protocol, reply)
        else:
            whole = orjson.loads(reply)
            check_whole(case.protocol, whole)
            if case.protocol == "responses" and whole.get("store") is True:
                for tail in ("", "/input_items"):
                    path = f"/v1/responses/{whole['id']}{tail}"
                    status, kept = await self.send(app, "", b"", path=path, method="GET")
                    _holds(status == 200, "what is kept can be fetched", kept)

    def _check_refusal(self, case: Case, status: int, reply: bytes) -> None:
        _holds(status < 500 or (status == 502 and _is_replys(reply)), "the status is no 5xx", reply)
        error = orjson.loads(reply)
        if case.protocol in ("messages", "count_tokens"):
            _holds(error.get("type") == "error" and error.get("request_id"), "the form", error)
            inner = error["error"]
            _holds(set(inner) <= {"type", "message", "details"}, "the form", error)
        elif error.get("object") == "error":
            inner = error
            _holds(inner["code"] == status, "the form", error)
        else:
            inner = error["error"]
            _holds(set(inner) == {"message", "type", "param", "code"}, "the form", error)
        message = inner["message"]
        _holds(isinstance(message, str) and len(message) > 10, "a message", error)
        _holds(len(message) <= 1003, "a message that can be read", error)
        if case.protocol not in ("messages", "count_tokens") and inner["param"] is None:
            self.refusals[message[:100]] += 1


def _is_replys(text: bytes) -> bool:
    return any(words.encode() in text for words in REPLY_AT_FAULT)


def check_stream(protocol: str, reply: bytes) -> None:
    """Hold a stream to the rules of its protocol's streams: frames of JSON, no error, a proper end.

    Raises:
        BrokenError: it breaks one.
    """
    data = [
        line.removeprefix(b"data: ")
        for frame in reply.split(b"\n\n")
        for line in frame.split(b"\n")
        if line.startswith(b"data: ")
    ]
    _holds(data, "a stream has frames", reply)
    if _is_replys(reply):
        return
    last = data[-1]
    frames = [orjson.loads(one) for one in data if one != b"[DONE]"]
    for frame in frames:
        failed = frame.get("error") or frame.get("type") in ("error", "response.failed")
        if frame.get("type") != "response.completed" and frame.get("object") != "response":
            _holds(not failed, "a stream has no error", frame)
    if protocol in ("chat", "completions"):
        _holds(last == b"[DONE]", "a stream ends", last)
    elif protocol == "messages":
        _holds(frames[-1]["type"] == "message_stop", "a stream ends", last)
    else:
        ends = ("response.completed", "response.incomplete")
        _holds(frames[-1]["type"] in ends, "a stream ends", last)


def check_whole(protocol: str, reply: Any) -> None:
    """Hold a reply that is no stream to the form of its protocol.

    Raises:
        BrokenError: it has another.
    """
    ok = {
        "chat": lambda: reply["object"] == "chat.completion" and reply["choices"],
        "completions": lambda: reply["object"] == "text_completion" and reply["choices"],
        "responses": lambda: reply["object"] == "response" and isinstance(reply["output"], list),
        "messages": lambda: reply["type"] == "message" and isinstance(reply["content"], list),
        "count_tokens": lambda: reply["input_tokens"] > 0,
        "tokenize": lambda: reply["count"] == len(reply["tokens"]),
        "parse": lambda: isinstance(reply["normal_text"], str),
        "separate": lambda: "text" in reply or "reasoning_text" in reply,
    }[protocol]()
    _holds(ok, "the form", reply)


async def play(cases: Iterable[Case], shown: int = 40) -> int:
    """Play cases and print what broke; returns how many did."""
    broken, slow, played = Counter[str](), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        async with Servers(Path(folder)) as servers:
            for case in cases:
                number, began = case.number, time.monotonic()
                played += 1
                try:
                    await servers.check(case)
                except Exception as error:
                    trace = traceback.extract_tb(error.__traceback__)[-1]
                    key = f"{type(error).__name__} {Path(trace.filename).name}:{trace.lineno}"
                    if isinstance(error, BrokenError):
                        key = str(error)[:90]
                    broken[key] += 1
                    if broken[key] == 1 and len(broken) <= shown:
                        print(f"#{number} {case.server} {case.protocol}: {case.what}")
                        print(f"    {type(error).__name__}: {str(error)[:700]}  ({key})")
                took = time.monotonic() - began
                if took > 1:
                    slow += 1
                    print(f"#{number} took {took:.1f} s: {case.protocol} {case.what}")
            print(dict(servers.statuses))
            for message, count in servers.refusals.most_common(shown):
                print(f"  without param, {count}: {message}")
    print(f"{played} cases, {sum(broken.values())} broken, {slow} slow")
    for key, count in broken.most_common():
        print(f"  {count}: {key}")
    return sum(broken.values())


def main() -> None:
    """Play what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--only", type=int)
    parser.add_argument("--singles", action="store_true")
    args = parser.parse_args()
    if args.only is not None:
        case = make(args.seed, args.only)
        print(case)
        raise SystemExit(asyncio.run(play([case])) > 0)
    drawn = (make(args.seed, number) for number in range(args.first, args.first + args.count))
    raise SystemExit(asyncio.run(play(singles() if args.singles else drawn)) > 0)


if __name__ == "__main__":
    main()
