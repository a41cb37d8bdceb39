"""Random and mutated model outputs against what must hold for every one of them (issue 3, figures).

    python -m bench.fuzz_outputs --count 100000          all cases of a seed; the result is kept
    python -m bench.fuzz_outputs --only 4711             one of them again, told in full

A case is a function of the seed and its number: an output (well-formed, mutated or a soup of markup),
a request (protocol, profile, thinking, tools, tool choice, stop strings) and two ways to cut the
output into steps, beside one token a step and all in one. What must hold:

* nothing raises, and every stream is a whole one of its protocol;
* no DSML marker is in any string that is sent, where tools are declared;
* the arguments of every call are a JSON object; under the finish `length` its beginning;
* the message is the same for every split, and for the reply that is not streamed.

The result goes to bench/results/fuzz-outputs.jsonl. Breadth is the point here; the properties that
hypothesis plays in tests/parsers/test_properties.py are narrower and shrink what they find.
"""

from __future__ import annotations

import argparse
import random
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from bench.rows import make_rows, write_rows
from engine import TINY_CHECKPOINT
from parsers import PROFILES, Codec, Exchange, Protocol, ReplyError, ServedModel
from tests.parsers.streams import body_for, message, whole
from tests.parsers.support import each, function, masked
from tests.parsers.test_properties import MARKER, PIECES, is_beginning

TOOLS = [function("f", {"a": "string", "n": "integer", "o": "object"}), function("g")]
CLOSED = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
STRICT = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": CLOSED}}
    for name in ("f", "h")
]
WORDS = (
    *(
        "the",
        " answer",
        " is",
        "\n",
        "\n\n",
        " 42",
        "é",
        "👩‍🚀",
        "中文",
        "`",
        "```",
        " <b>",
        " </",
        "|",
        "｜",
    ),
    *(
        "DSML",
        "END",
        "\\",
        '"',
        "\u2028",
        "\x00",
        "\ufffd",
        "</think>",
        "<think>",
        "<｜User｜>",
        " a||b",
    ),
)
VALUES = (
    *(
        '""',
        '"x"',
        "1",
        "-0.5",
        "12345678901234567890123",
        "1e400",
        "NaN",
        "true",
        "True",
        "null",
        "None",
    ),
    *("{}", "[]", '{"k": [1, {"z": null}]}', '{"a":1,"a":2}', "[1,", '{"k": "</think>"}', "plain"),
    *(
        '"\\ud83d"',
        '"\\ud83d\\ude00"',
        "[" * 200,
        "｜DSML｜",
        "2>&1",
        "a <b> c",
        "\n",
        " 1 ",
        "'x'",
    ),
)
NAMES = ("f", "g", "h", "rm", "f ", "F", "a b", "｜DSML｜", "")
PARAMETERS = ("a", "n", "o", "b", "b c", 'q"', "a\\", "", "é")
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"thinking": {"type": "disabled"}},
    {"tool_choice": "none"},
    {"parallel": False},
    {"stop": True},
)


Kind = Literal["written", "mutated", "soup"]


@dataclass(frozen=True)
class Case:
    """One output and what it is played to.

    Args:
        number: within the seed.
        kind: how the output was made.
        ids: of the output.
        profile: rules of the exchange.
        protocol: of the request.
        fields: of the request, beside messages, tools and model.
        finish: why the output ended.
        cuts: sizes of the steps of two more splits.
    """

    number: int
    kind: Kind
    ids: list[int]
    profile: str
    protocol: Protocol
    fields: dict[str, Any]
    finish: Literal["stop", "length"]
    cuts: list[int]


def spelled(codec: Codec, rng: random.Random, text: str) -> list[int]:
    """Encode a piece; one in ten so that no marker in it is a real one."""
    return codec.vocabulary.spell(text) if rng.random() < 0.1 else codec.tokenize(text)


def words(rng: random.Random, most: int) -> str:
    """Some text."""
    return "".join(rng.choice(WORDS) for _ in range(rng.randrange(most)))


def written(rng: random.Random) -> list[str]:
    """Give an output as a model writes it, in pieces: reasoning, an answer, calls, all of them well-formed."""
    pieces = [words(rng, 12), "</think>", words(rng, 8)]
    if rng.random() < 0.25:
        return pieces
    gap, block = rng.choice((("", "tool_calls"), (" ", "calls")))
    mark = f"<｜DSML｜{gap}"
    end = f"</｜DSML｜{gap}"
    pieces += ["\n\n", f"{mark}{block}>\n"]
    for _ in range(rng.randrange(1, 4)):
        pieces.append(f'{mark}invoke name="{rng.choice(NAMES)}">\n')
        for name in rng.sample(PARAMETERS, rng.randrange(4)):
            string = rng.random() < 0.5
            value = words(rng, 12) if string else rng.choice(VALUES)
            attribute = f' string="{str(string).lower()}"'
            pieces += [f'{mark}parameter name="{name}"{attribute}>', value, f"{end}parameter>\n"]
        pieces.append(f"{end}invoke>\n")
    pieces.append(f"{end}{block}>")
    if rng.random() < 0.2:
        pieces.append(words(rng, 6))
    return pieces


def mutate(codec: Codec, rng: random.Random, ids: list[int]) -> list[int]:
    """Change an output in one to four places."""
    size = max(codec.tokenize("x")) + 1 if not ids else max(*ids, 400)
    for _ in range(rng.randrange(1, 5)):
        at, width = rng.randrange(len(ids) + 1), rng.randrange(1, 8)
        cut = ids[at : at + width]
        match rng.randrange(6):
            case 0:
                del ids[at : at + width]
            case 1:
                ids[at:at] = cut
            case 2:
                ids[at : at + width] = cut[::-1]
            case 3:
                ids[at : at + 1] = [rng.randrange(3, size)]
            case 4:
                ids[at:at] = spelled(codec, rng, rng.choice(PIECES))
            case _:
                del ids[at:]
    return ids


def make(codec: Codec, seed: int, number: int) -> Case:
    """Make a case."""
    rng = random.Random(f"{seed}:{number}")
    kind: Kind = rng.choice(("written", "mutated", "mutated", "soup"))
    if kind == "soup":
        pieces = [rng.choice((*PIECES, *WORDS)) for _ in range(rng.randrange(30))]
    else:
        pieces = written(rng)
    ids = [id_ for piece in pieces for id_ in spelled(codec, rng, piece)]
    if kind == "mutated":
        ids = mutate(codec, rng, ids)
    protocol: Protocol = rng.choice(("chat", "chat", "responses", "messages"))
    return Case(
        number=number,
        kind=kind,
        ids=ids,
        profile=rng.choice(("agent", "agent", "sglang", "official")),
        protocol=protocol,
        fields=_fields(rng, protocol),
        finish=rng.choice(("stop", "stop", "length")),
        cuts=[rng.choice((1, 1, 2, 3, 5, 8, 13)) for _ in range(len(ids) + 1)],
    )


def _fields(rng: random.Random, protocol: Protocol) -> dict[str, Any]:
    """Give a request's fields; those that a protocol does not have are left out."""
    fields: dict[str, Any] = {"tools": STRICT if rng.random() < 0.15 else TOOLS}
    if protocol == "messages":
        fields["max_tokens"] = 10_000
    asked = dict(rng.choice(FIELDS))
    if asked.pop("stop", False):
        if protocol == "responses":
            return fields
        fields["stop" if protocol == "chat" else "stop_sequences"] = ["END", "\n\n"]
    if asked.pop("parallel", True) is False and protocol != "messages":
        fields["parallel_tool_calls"] = False
    if "tool_choice" in asked and protocol == "messages":
        asked["tool_choice"] = {"type": "none"}
    if protocol == "responses" and asked.pop("thinking", None):
        asked["reasoning"] = {"effort": "none"}
    return {**fields, **asked}


def steps(case: Case, cuts: Sequence[int]) -> list[list[int]]:
    """Cut an output; what the cuts leave is the last step."""
    found, at = [], 0
    for cut in cuts:
        if at >= len(case.ids):
            break
        found.append(case.ids[at : at + cut])
        at += cut
    return [*found, case.ids[at:]]


def play(codec: Codec, case: Case, split: Sequence[Sequence[int]], *, stream: bool) -> Exchange:
    """Play an output to a fresh exchange; its frames are in `sent`."""
    body = {**body_for(case.protocol, **case.fields), "model": codec.model.name, "stream": stream}
    exchange = codec.open_exchange(case.protocol, orjson.dumps(body), exchange_id="ID")
    frames = exchange.start(10, 4)
    for step in split:  # as a server drives it
        if stream or not exchange.gather(step):
            frames += exchange.receive(step)
    frames += exchange.close(case.finish)
    exchange.sent = frames  # type: ignore[attr-defined]
    return exchange


def outcome(case: Case, exchange: Exchange) -> Any:
    """Read a reply: its message, or the error that it ends in."""
    if exchange.stream and exchange.error is None:
        found = message(case.protocol, exchange.sent)  # type: ignore[attr-defined]
    else:
        try:
            if exchange.error is not None:
                raise exchange.error
            found = whole(case.protocol, exchange.body())
        except ReplyError as error:
            return {"error": [error.code, error.message]}
    return masked(
        {name: found[name] for name in ("content", "reasoning", "calls", "finish", "bathyal")}
    )


def check(codec: Codec, case: Case) -> str:
    """Play a case in every way; returns how it ends.

    Raises:
        Exception: something does not hold, or broke.
    """
    single = play(codec, case, each(case.ids), stream=True)
    others = [
        play(codec, case, steps(case, case.cuts), stream=True),
        play(codec, case, steps(case, case.cuts[::-1]), stream=True),
        play(codec, case, [case.ids], stream=True),
        play(codec, case, steps(case, case.cuts), stream=False),
    ]
    want = outcome(case, single)
    for exchange in (single, *others):
        for frame in exchange.sent:  # type: ignore[attr-defined]
            _require(not MARKER.search(frame.decode()), "a marker was sent", frame.decode())
        found = outcome(case, exchange)
        if not exchange.stream and case.protocol == "messages" and "calls" in found:
            _require(_parsed(found) == _parsed(want), "whole and stream differ", found, want)
        else:
            _require(found == want, "two splits differ", found, want)
    if "error" in want:
        return "error"
    for text in (want["content"], want["reasoning"], *(call[1] for call in want["calls"])):
        _require(not MARKER.search(text), "a marker is in a string", text)
    for _name, arguments, _id in want["calls"]:
        _require(is_beginning(arguments), "arguments are no beginning of JSON", arguments)
        if case.finish == "stop":
            value = orjson.loads(arguments)
            _require(isinstance(value, dict), "arguments are no object", arguments)
    ends = ("stop", "tool_calls", "length", "stop_sequence")
    _require(want["finish"] in ends, "an unknown end", want["finish"])
    return str(want["finish"])


def _parsed(found: dict[str, Any]) -> dict[str, Any]:
    """Read arguments as values: a whole Messages reply holds no text of them, and {} for cut ones."""
    calls = []
    for name, arguments, call_id in found["calls"]:
        if isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments)
            except orjson.JSONDecodeError:
                arguments = "cut"
        calls.append([name, arguments, call_id])
    if found["finish"] == "length" and calls:
        calls[-1][1] = "cut"
    return {**found, "calls": calls}


def _require(holds: bool, what: str, *shown: Any) -> None:
    if not holds:
        raise AssertionError(what + "".join(f"\n  {one!r}" for one in shown))


def codecs() -> dict[str, Codec]:
    """Load the tokenizer of the checkpoint that ships, under every profile."""
    path = str(TINY_CHECKPOINT / "tokenizer.json")
    model = ServedModel("bathyal-tiny", "v4.1", path, max_model_len=1 << 20, eos_token_ids=(1,))
    return {name: Codec.load(model, profile) for name, profile in PROFILES.items()}


def run(count: int, seed: int, most_failures: int) -> dict[str, Any]:
    """Play cases 0 to `count` - 1; returns the row."""
    loaded = codecs()
    ends: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    tokens = 0
    began = time.monotonic()
    for number in range(count):
        case = make(loaded["agent"], seed, number)
        kinds[case.kind] += 1
        tokens += len(case.ids)
        try:
            ends[check(loaded[case.profile], case)] += 1
        except Exception as error:  # all of them are findings
            failures.append({"number": number, "error": f"{type(error).__name__}: {error}"[:500]})
            print(f"case {number}: {failures[-1]['error']}", flush=True)
            if len(failures) >= most_failures:
                break
        if number % 1000 == 999:
            print(f"{number + 1} cases, {len(failures)} failures", flush=True)
    return {
        "bench": "fuzz-outputs",
        "seed": seed,
        "cases": sum(kinds.values()),
        "replies_a_case": 5,
        "tokens": tokens,
        "kinds": dict(sorted(kinds.items())),
        "ends": dict(sorted(ends.items())),
        "failures": failures,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    """Run the command line; the exit status says whether everything held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-failures", type=int, default=20, help="stop after so many")
    parser.add_argument("--only", type=int, help="play this case alone and tell it")
    arguments = parser.parse_args()
    if arguments.only is not None:
        loaded = codecs()
        case = make(loaded["agent"], arguments.seed, arguments.only)
        text = "".join(loaded["agent"].vocabulary.text_of(id_) or "?" for id_ in case.ids)
        print(case, repr(text), sep="\n")
        try:
            print(check(loaded[case.profile], case))
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    row = run(arguments.count, arguments.seed, arguments.most_failures)
    print({name: value for name, value in row.items() if name != "failures"})
    if arguments.count >= 100_000 or row["failures"]:
        print(write_rows("fuzz-outputs", make_rows("bench.fuzz_outputs", "cpu", [row])))
    return 1 if row["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
