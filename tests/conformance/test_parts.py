"""Case files, expected failures, repeats, the vocabulary and imported fixtures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest
from hypothesis import given, strategies as st

from conformance import baseline, canitoolcall, load, repeats, scripts
from conformance.client import Exchange, HttpSender, Request
from conformance.dialect import respell
from conformance.model import PROTOCOLS, Case
from conformance.vocabulary import Vocabulary, VocabularyError, _byte_letters

GOOD = {
    "id": "mine/one",
    "tier": "scripted",
    "why": "A sentence that says why.",
    "source": "a test",
    "expect": {"content": "ok"},
}


def write(folder: Path, *cases: dict[str, object], **more: object) -> Path:
    path = folder / "cases.json"
    path.write_bytes(orjson.dumps({"cases": list(cases), **more}))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": "noslash"}, "cases/0/id"),
        ({"level": "MAY"}, "cases/0/level"),
        ({"why": ""}, "cases/0/why"),
        ({"expect": {"contents": "x"}}, "cases/0/expect"),
        ({"request": {"tool": ["now"]}}, "cases/0/request"),
        ({"source": None}, "cases/0/source"),
        ({"id": "call/one"}, "case call/one is also in calls.json"),
    ],
)
def test_bad_case_is_named(tmp_path: Path, change: dict[str, object], words: str) -> None:
    """A case that breaks the schema, or takes an id, is refused with file and place."""
    path = write(tmp_path, GOOD | change)

    with pytest.raises(load.CaseError, match=words) as caught:
        load.load_cases([path])
    assert str(path) in str(caught.value)


def test_missing_source_is_named(tmp_path: Path) -> None:
    """A case says where it comes from, itself or by the file's defaults."""
    bare = {k: v for k, v in GOOD.items() if k != "source"}

    with pytest.raises(load.CaseError, match="'source' is missing"):
        load.load_cases([write(tmp_path, bare)])
    assert load.load_cases([write(tmp_path, bare, defaults={"source": "a test"})])


def test_suite_is_as_large_as_promised(cases: list[Case]) -> None:
    """At least 250 cases, every tier, three protocols, both spellings."""
    todo = load.variants(cases, protocols=(*PROTOCOLS, "parse"))

    assert len(cases) >= 250
    assert {"live", "scripted", "parse", "agents", "prompt"} == {c.tier for c in cases}
    assert {*PROTOCOLS, "parse"} == {v.protocol for v in todo}
    assert {"v4", "v4.1", None} == {v.dialect for v in todo}
    assert len(todo) == len({v.id for v in todo})


def test_expected_failures_need_a_reason(tmp_path: Path) -> None:
    """A line without check or reason is refused with its number."""
    path = tmp_path / "expected"
    for line in ("call/one[*", "call/one[* expect/calls", "a b c # three words"):
        path.write_text(f"# comment\n{line}\n")
        with pytest.raises(baseline.BaselineError, match=":2: expected"):
            baseline.read(path)


@pytest.mark.parametrize(
    ("passed", "runs", "low", "high"),
    [(10, 10, 0.7225, 1.0), (0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (1, 1, 0.2065, 1.0)],
)
def test_wilson_interval(passed: int, runs: int, low: float, high: float) -> None:
    """The interval has the published values of the Wilson score interval at 95 %."""
    assert pytest.approx((low, high), abs=5e-4) == repeats.wilson(passed, runs)


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_pass_power_falls_with_k(counts: tuple[int, int]) -> None:
    """pass^1 is the share, pass^k never rises with k, and pass^n is one only if all passed."""
    passed, runs = counts
    powers = [repeats.pass_power(passed, runs, k) for k in range(1, runs + 1)]

    assert pytest.approx(passed / runs) == powers[0]
    assert sorted(powers, reverse=True) == powers
    assert (passed == runs) == (powers[-1] == 1.0)


def test_respelling_is_textual() -> None:
    """V4's spelling has no blank and another block name; broken tags stay broken."""
    assert (
        respell("<｜DSML｜ calls><｜DSML｜ invoke", "v4") == "<｜DSML｜tool_calls><｜DSML｜invoke"
    )
    assert respell("<｜DSML｜ cal", "v4.1") == "<｜DSML｜ cal"


def test_scripts_have_one_line_each(cases: list[Case]) -> None:
    """The script file has one line a name, also for readers that know more line ends."""
    lines = scripts.dump(load.variants(cases)).decode().splitlines()
    names = [orjson.loads(line)["name"] for line in lines]

    assert len(names) == len(set(names)) > 300


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> tuple[Vocabulary, dict[int, bytes]]:
    letters = {byte: letter for letter, byte in _byte_letters().items()}
    pieces = [bytes([b]) for b in range(256)] + [b"call", b"in", b" Paris", "日".encode()]
    vocab = {"".join(letters[b] for b in piece): n for n, piece in enumerate(pieces)}
    special = [{"content": "</think>", "id": 900}, {"content": "｜DSML｜", "id": 901}]
    path = tmp_path_factory.mktemp("v") / "tokenizer.json"
    path.write_bytes(orjson.dumps({"model": {"vocab": vocab}, "added_tokens": special}))
    known = dict(enumerate(pieces)) | {900: b"</think>", 901: "｜DSML｜".encode()}
    return Vocabulary(path), known


@given(
    text=st.text(st.characters(codec="utf-8"))
    | st.sampled_from(["<｜DSML｜ calls>", "R</think>日"])
)
def test_ids_have_the_bytes_of_the_text(
    vocabulary: tuple[Vocabulary, dict[int, bytes]], text: str
) -> None:
    """Whatever the segmentation, the ids' bytes are the text; special tokens are single ids."""
    encoder, known = vocabulary

    assert text.encode() == b"".join(known[i] for i in encoder.encode(text))
    assert not {900, 901} & set(encoder.encode(text, special=False))
    assert text.count("｜DSML｜") == encoder.encode(text).count(901)


def test_bad_tokenizer_is_named(tmp_path: Path) -> None:
    """A file that is no byte-level vocabulary is refused."""
    (tmp_path / "t.json").write_text('{"model": {"vocab": {"a": 1}}}')
    for name in ("t.json", "none.json"):
        with pytest.raises(VocabularyError, match=name):
            Vocabulary(tmp_path / name)


def test_fixtures_become_cases(tmp_path: Path) -> None:
    """V4-family fixtures become cases that load, with their attribution in the notice."""
    fixture = {
        "id": "deepseek/some-call",
        "models": ["org/DeepSeek-V4-Test"],
        "provenance": {"attribution": "Somebody", "license": "MIT", "source_url": "x://y"},
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "raw_output": "text",
        "thinking": False,
        "expected": {"content": "text", "tool_calls": []},
        "tags": [],
    }
    other = fixture | {"id": "x/y", "models": ["org/Other"]}
    refused = {k: v for k, v in fixture.items() if k != "expected"}
    refused |= {"id": "deepseek/cut", "expected_error": "no end"}
    quoting = fixture | {"id": "deepseek/quote", "expected": {"content": "<｜DSML｜ calls>"}}
    lines = b"\n".join(map(orjson.dumps, (fixture, other, refused, quoting)))
    (tmp_path / "f.jsonl").write_bytes(lines)
    out = tmp_path / "cases.json"

    assert canitoolcall.convert(tmp_path, out) == 3
    assert "Somebody (MIT)" in orjson.loads(out.read_bytes())["notice"]
    cases = {c.id.split("/")[-1]: c for c in load.load_cases([out]) if "imported" in c.id}
    assert set(cases) == {"some-call", "cut", "quote"}
    assert cases["cut"].expect[-1] == {"finish": "length"}
    assert (cases["some-call"].exempt, set(cases["quote"].exempt)) == ({}, {"leak/dsml"})
    (tmp_path / "f.jsonl").write_text("{broken")
    with pytest.raises(canitoolcall.FixtureError, match=":1:"):
        canitoolcall.convert(tmp_path, out)


@pytest.mark.parametrize(("refused", "status"), [(1, 200), (2, 0)])
def test_closed_connection_is_tried_once_more(refused: int, status: int) -> None:
    """A connection that ends before any byte is no verdict; twice in a row it is one."""

    async def go() -> Exchange:
        left = refused

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal left
            await reader.readuntil(b"\r\n\r\n")
            if left:
                left -= 1
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        sender = HttpSender(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            return await sender.send(Request("GET", "/", {}, b""))
        finally:
            await sender.aclose()
            server.close()

    exchange = asyncio.run(go())

    assert exchange.status == status
    assert (exchange.fault is None) == (status == 200)
