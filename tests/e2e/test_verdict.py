"""The judge of make e2e, against a whole loop and one planted fault at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from e2e import report
from e2e.drive import ARGUMENTS, script
from e2e.manifest import ManifestError, clients, load
from e2e.verdict import Evidence, Expected, judge, reasoning_back

EXPECTED = Expected("chat", True, "mark", "ok-1", "why-1", "done-1")


def exchange(**changes: Any) -> dict[str, Any]:
    body = {"stream": True, "tools": [{}], "messages": changes.pop("messages", [])}
    whole = {"protocol": "chat", "failure": None, "history": None, "reasoning": {}, "reply": ""}
    return {**whole, "body": orjson.dumps(body | changes.pop("body", {})).decode(), **changes}


def refers_to(item: str) -> dict[str, Any]:
    return exchange(body={"input": [{"type": "item_reference", "id": item}, {"role": "user"}]})


def logged(status: int, outcome: str) -> dict[str, Any]:
    return {
        "message": "request",
        "level": "info",
        "route": "/v1/chat/completions",
        "status": status,
        "outcome": outcome,
    }


FIRST, SECOND = exchange(), exchange(messages=["the result is ok-1"])
WHOLE = Evidence(0, "so: done-1\n", "mark", [logged(200, "done")] * 2, [FIRST, SECOND])


def test_a_whole_loop_has_no_fault() -> None:
    """A loop that did everything passes, with a request beside it or not."""
    title = exchange(body={"tools": None, "stream": False})

    assert judge(EXPECTED, WHOLE) == []
    assert judge(EXPECTED, replace(WHOLE, exchanges=[title, FIRST, SECOND])) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"status": 1}, "the client ended with 1"),
        ({"status": None}, "the client did not end in time"),
        ({"output": "so: ok-1"}, "the client does not show the final answer"),
        ({"mark": None}, "the tool did not run"),
        ({"mark": "Mark"}, "the tool got 'Mark' instead of 'mark'"),
        ({"exchanges": [FIRST]}, "1 requests with tools instead of 2"),
        ({"exchanges": [FIRST] * 2}, "the second request does not carry the tool's result"),
        (
            {"exchanges": [FIRST, {**SECOND, "protocol": "responses"}]},
            "a request speaks responses",
        ),
        (
            {"exchanges": [exchange(body={"stream": False}), SECOND]},
            "a request is not a stream",
        ),
        ({"exchanges": [FIRST, {**SECOND, "failure": "gone"}]}, "a reply failed: gone"),
        ({"log": [logged(400, "broken")]}, "/v1/chat/completions was answered 400 broken"),
        (
            {"log": [{**logged(404, "not_found"), "path": "/v2"}]},
            "/v2 was answered 404 not_found",
        ),
        ({"log": [{"level": "warning", "message": "hm"}]}, "the server logged: hm"),
    ],
)
def test_a_fault_is_named(change: dict[str, Any], fault: str) -> None:
    """Each thing that can be wrong with a loop, alone, is what the verdict says."""
    assert judge(EXPECTED, replace(WHOLE, **change)) == [fault]


@pytest.mark.parametrize(
    ("log", "faults"),
    [
        ([logged(400, "refused")], []),
        ([], ["the client was not refused: refused"]),
        ([logged(400, "refused")] * 2, ["/v1/chat/completions was answered 400 refused"]),
        (
            [logged(500, "refused")],
            [
                "/v1/chat/completions was answered 500 refused",
                "the client was not refused: refused",
            ],
        ),
    ],
)
def test_a_refusal_that_is_meant_counts_once(log: list[dict[str, Any]], faults: list[str]) -> None:
    """A client's announced 4xx excuses one such line, and has to come."""
    expected = replace(EXPECTED, client_errors=("refused",))

    assert judge(expected, replace(WHOLE, log=log)) == faults


@pytest.mark.parametrize(
    ("second", "who"),
    [
        (exchange(messages=["why-1", "ok-1"]), "client"),
        (exchange(messages=["ok-1"], reasoning={"call_1": "why-1"}), "server"),
        (exchange(messages=["ok-1"], history="[why-1]"), "server"),
        (refers_to("rs_1"), "server"),
        (refers_to("rs_2"), "none"),
        (refers_to("fc_1"), "none"),
        (SECOND, "none"),
    ],
)
def test_whose_doing_the_reasoning_is(second: dict[str, Any], who: str) -> None:
    """The page's column follows the second request and what the server lent to it."""
    first = exchange(reply='{"id":"rs_1"},{"id":"fc_1"}')

    assert reasoning_back(EXPECTED, replace(WHOLE, exchanges=[first, second])) == who


def test_every_script_gives_call_and_answer() -> None:
    """A script of the manifest has the arguments in its first call and the answer at its end."""
    for client in clients().values():
        for run in client.runs:
            texts = script(run.script, "why-1", "done-1")

            assert texts[0].startswith("why-1</think>")
            assert "done-1" in texts[-1]
            assert not any("done-1" in text for text in texts[:-1])
            shell = ":" in run.script
            assert ("mark.txt" if shell else ARGUMENTS["city"]) in "".join(texts[:-1])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('[a]\nkind = "python"\npackages = ["a==1"]\nruns = []', "a: expected one of driver"),
        ('[a]\nkind = "ruby"\npackages = ["a"]\nruns = []\ndriver = "a"', "a: kind: expected"),
        (
            '[a]\nkind = "node"\npackages = ["a@1"]\ndriver = "a"\n'
            'runs = [{protocol = "soap", stream = true}]',
            "a: protocol: expected",
        ),
        (
            '[a]\nkind = "node"\npackages = ["a@1"]\ndriver = "a"\nport = 1\nruns = []',
            "a: .*port",
        ),
    ],
)
def test_a_wrong_manifest_is_refused(text: str, fault: str) -> None:
    """The fault names the client and the field."""
    with pytest.raises(ManifestError, match=fault):
        load(text)


def test_the_page_is_what_the_rows_say() -> None:
    """docs/clients.md is the committed rows' page, and every loop of the manifest has its row."""
    rows = report.read()

    assert report.PAGE.read_text() == report.page(rows)
    assert [
        (client.name, client.version, run.protocol, run.stream, run.variant)
        for client in clients().values()
        for run in client.runs
    ] == [
        tuple(row[key] for key in ("client", "version", "protocol", "stream", "variant"))
        for row in rows
    ]


def test_new_rows_take_the_place_of_old_ones() -> None:
    """A run of some clients leaves the rows of the others, in the manifest's order."""
    known = clients()
    old = [{"client": name, "at": 1} for name in ("gone", "codex", "openai-py", "openai-py")]
    new = [{"client": "openai-py", "at": 2}]

    rows = report.merged(old, new, known)

    assert rows == [{"client": "openai-py", "at": 2}, {"client": "codex", "at": 1}]
