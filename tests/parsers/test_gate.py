"""The gate's rules, each with its default and its other settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from parsers import BARE, Action, Codec, Doubt, GatePolicy, Hold, ReplyError
from tests.parsers.support import (
    chunks,
    drive,
    each,
    encode,
    function,
    message,
    open_chat,
    plainly,
    said,
    talk,
    under,
)

TOOLS = [
    function("f", {"s": "string", "n": "integer", "o": "object", "any": {}, "b": "boolean"}),
    function("g"),
]
Play = Callable[..., dict[str, Any]]


def param(name: str, value: str, string: str | None = "true") -> str:
    says = "" if string is None else f' string="{string}"'
    return f'<｜DSML｜parameter name="{name}"{says}>{value}</｜DSML｜parameter>\n'


def call(name: str, *body: str) -> str:
    return f'<｜DSML｜invoke name="{name}">\n{"".join(body)}</｜DSML｜invoke>\n'


def block(*calls: str) -> str:
    return f"<｜DSML｜tool_calls>\n{''.join(calls)}</｜DSML｜tool_calls>"


@pytest.fixture
def play(codec: Codec) -> Play:
    """Play an answer (after the reasoning) past a gate with some rules changed."""

    def run(output: str, *, finish: str = "stop", rules: Any = None, **fields: Any) -> Any:
        changed = under(codec, replace(GatePolicy(), **rules or {}))
        return talk(changed, f"R</think>{output}", finish, **{"tools": TOOLS, **fields})

    return run


def arguments(reply: dict[str, Any]) -> list[str]:
    return [text for _name, text, _id in reply["calls"]]


def reasons(reply: dict[str, Any]) -> list[tuple[str | None, str]]:
    report = reply["bathyal"] or {}
    return [(w["name"], w["reason"]) for w in report.get("withheld_calls", ())]


def mends(reply: dict[str, Any]) -> list[tuple[str, str | None]]:
    report = reply["bathyal"] or {}
    return [(r["rule"], r["parameter"]) for r in report.get("repaired_calls", ())]


# undeclared_tool


def test_an_undeclared_call_is_withheld_and_told(play: Play) -> None:
    """Not a byte of it is sent; the reply says so, in its text where it has no other, and as data."""
    got = play(block(call("rm", param("s", "/"))))

    assert said(got) == {
        "content": '[A call of the tool "rm" was not delivered: the tool is not declared.]',
        "reasoning": "R",
        "finish": "stop",
        "calls": [],
    }
    (entry,) = got["bathyal"]["withheld_calls"]
    assert (entry["name"], entry["reason"]) == ("rm", "undeclared_tool")
    assert entry["raw"].splitlines()[0] == '<dsml:invoke name="rm">'


def test_an_answer_beside_an_undeclared_call_is_left_alone(play: Play) -> None:
    """With text or another call in the reply, the report is data only."""
    got = play("Let me see.\n\n" + block(call("rm")))
    assert got["content"].strip() == "Let me see."
    assert reasons(got) == [("rm", "undeclared_tool")]

    got = play(block(call("rm"), call("g"), call("rm")))
    assert (got["content"], [n for n, _, _ in got["calls"]]) == ("", ["g"])
    assert reasons(got) == [("rm", "undeclared_tool")] * 2


def test_an_undeclared_call_can_be_passed_and_is_flagged(play: Play) -> None:
    """PASS delivers it, and the report names it."""
    got = play(block(call("rm", param("s", "/"))), rules={"undeclared_tool": Action.PASS})

    assert [(n, a) for n, a, _ in got["calls"]] == [("rm", '{"s": "/"}')]
    assert got["bathyal"] == {"undeclared_calls": ["rm"]}


def test_names_are_compared_as_they_are(play: Play) -> None:
    """Case, blanks and an empty name make another name."""
    for name in ("F", " f", "f\n", ""):
        assert reasons(play(block(call(name))))[0][1] == "undeclared_tool"


@pytest.mark.parametrize("bars", ["｜DSML｜", "|DSML|"])
def test_a_name_that_shows_a_marker_is_no_name(codec: Codec, bars: str) -> None:
    """Such a call is malformed even where undeclared ones are passed."""
    policy = GatePolicy(undeclared_tool=Action.PASS)
    changed = under(codec, policy)
    ids = encode(codec, 'R</think><｜DSML｜tool_calls><｜DSML｜invoke name="')
    ids += plainly(codec, f"rm<{bars}") + encode(codec, '">\n</｜DSML｜invoke>')
    got = message(chunks(drive(open_chat(changed, stream=True, tools=TOOLS), each(ids))))

    assert reasons(got) == [(None, "malformed_call")]


def test_text_after_a_withheld_call_is_the_answer(play: Play) -> None:
    """As long as no call was delivered, text goes on."""
    got = play(block(call("rm")) + "\nSorry.")

    assert got["content"].strip() == "Sorry."


def test_the_note_ends_open_reasoning_first(codec: Codec) -> None:
    """A note is an answer, also when the model never ended its thinking."""
    got = talk(codec, "R\n\n" + block(call("rm")), tools=TOOLS)

    assert got["content"].startswith('[A call of the tool "rm"')
    assert got["reasoning"].strip() == "R"


# tool_choice and parallel_tool_calls


def test_with_tool_choice_none_markup_is_withheld(play: Play) -> None:
    """The gate stands although no call may be made."""
    got = play("Hm." + block(call("g")), tool_choice="none")

    assert (got["content"], got["calls"]) == ("Hm.", [])
    assert reasons(got) == [("g", "tool_choice_none")]


QUIET = {"thinking": {"type": "disabled"}}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "g"}}, **QUIET}


def test_a_forced_call_starts_inside_the_block(codec: Codec) -> None:
    """The prompt has opened the block: the output begins with the call."""
    inside = block(call("g")).removeprefix("<｜DSML｜tool_calls>\n")
    for output in (inside, "\n\n" + block(call("g"))):
        got = talk(codec, output, tools=TOOLS, **NAMED)
        assert [n for n, _, _ in got["calls"]] == ["g"]
        assert (got["finish"], got["bathyal"]) == ("tool_calls", None)


def test_another_call_than_the_named_one_is_withheld(codec: Codec) -> None:
    """tool_choice names one tool; a call of another is not delivered, and the demand is unmet."""
    got = talk(codec, block(call("f")).removeprefix("<｜DSML｜tool_calls>\n"), tools=TOOLS, **NAMED)

    assert reasons(got) == [("f", "not_chosen")]
    assert got["bathyal"]["unmet"] == "tool_choice"
    assert "tool_choice names another tool" in got["content"]


@pytest.mark.parametrize(
    "output", ["Sorry, no.", "</｜DSML｜tool_calls>", "</｜DSML｜tool_calls>Sorry, no."]
)
def test_a_forced_call_that_does_not_come_is_unmet(codec: Codec, output: str) -> None:
    """Prose in its place is the answer, not lost; the report names the demand."""
    got = talk(codec, output, tools=TOOLS, **NAMED)

    assert got["content"] == output.removeprefix("</｜DSML｜tool_calls>")
    assert got["bathyal"] == {"unmet": "tool_choice"}


def test_parallel_tool_calls_false_holds(codec: Codec) -> None:
    """One call is delivered, the reply is finished with it, and no more tokens are wanted."""
    ids = encode(codec, "R</think>" + block(call("g"), call("f"), call("g")))
    for size in (1, 1000):
        exchange = open_chat(codec, stream=True, tools=TOOLS, parallel_tool_calls=False)
        frames = exchange.start(10, 4)
        for piece in each(ids, size):
            frames += exchange.receive(piece)
        assert exchange.finished
        got = message(chunks(frames + exchange.close("stop")))
        assert ([n for n, _, _ in got["calls"]], got["finish"]) == (["g"], "tool_calls")


def test_a_withheld_call_does_not_use_up_the_one_call(play: Play) -> None:
    """The one call that is allowed is the first that is delivered."""
    got = play(block(call("rm"), call("g"), call("f")), parallel_tool_calls=False)

    assert [n for n, _, _ in got["calls"]] == ["g"]


# broken_json and the values of parameters

VALUES = [
    ("n", "5", "5", None),
    ("n", " 5\n", " 5\n", None),
    ("n", "-1e2", "-1e2", None),
    ("any", "1.50", "1.50", None),
    ("any", "9" * 40, "9" * 40, None),
    ("o", '{"k":[ 1 , 2 ]}', '{"k":[ 1 , 2 ]}', None),
    ("o", '{"k": "｜"}', '{"k": "\\uff5c"}', None),
    ("b", "True", "true", "python_literal"),
    ("any", "None", "null", "python_literal"),
    ("any", '"\\ud83d"', '"\\ufffd"', "lone_surrogate"),
    ("o", '{"k": "a\n\tb", "l":\n"\\n"}', '{"k": "a\\n\\tb", "l":\n"\\n"}', "unescaped_string"),
    ("o", r'{"k": "\d+\.py \" \\"}', r'{"k": "\\d+\\.py \" \\"}', "unescaped_string"),
    ("any", '["C:\\Users\\\n", "\\ud83d"]', r'["C:\\Users\\\n", "\ufffd"]', "unescaped_string"),
    ("s", '{"k": "\n"}', '"{\\"k\\": \\"\\n\\"}"', "broken_json"),
    ("s", "Paris", '"Paris"', "broken_json"),
    ("s", "True", '"True"', "broken_json"),
    ("any", "{bad", '"{bad"', "broken_json"),
    ("any", "", '""', "broken_json"),
    ("any", '{"a":1,"a":2}', '"{\\"a\\":1,\\"a\\":2}"', "broken_json"),
    ("any", '1, "b": 2', '"1, \\"b\\": 2"', "broken_json"),
]


@pytest.mark.parametrize(
    ("name", "value", "want", "mend"), VALUES, ids=[f"{v[0]}-{v[1][:14]}" for v in VALUES]
)
@pytest.mark.parametrize("hold", [Hold.PARAMETER, Hold.CALL])
def test_a_value_is_json_or_is_mended(
    play: Play, name: str, value: str, want: str, mend: str | None, hold: Hold
) -> None:
    """Strict JSON is kept as written; else literals, then a string where the schema admits one."""
    got = play(block(call("f", param(name, value, "false"))), rules={"hold": hold})

    assert arguments(got) == [f'{{"{name}": {want}}}']
    assert mends(got) == ([] if mend is None else [(mend, name)])


def test_broken_json_that_cannot_be_a_string_withholds_the_call(play: Play) -> None:
    """Before anything was sent the call is withheld; after, the tool gets a string to refuse."""
    bad = param("n", "{bad", "false")

    assert reasons(play(block(call("f", bad)))) == [("f", "broken_json")]
    doubtful = param("o", r'{"path": "C:\Users\new"}', "false")  # a line end, or a folder
    assert reasons(play(block(call("f", doubtful)))) == [("f", "broken_json")]
    got = play(block(call("f", param("s", "x"), bad)))
    assert arguments(got) == ['{"s": "x", "n": "{bad"}']
    assert mends(got) == [("broken_json", "n")]
    held = play(block(call("f", param("s", "x"), bad)), rules={"hold": Hold.CALL})
    assert reasons(held) == [("f", "broken_json")]


def test_broken_json_can_be_refused_where_a_string_would_do(play: Play) -> None:
    """WITHHOLD makes no string of what was not meant to be one."""
    rules = {"broken_json": Action.WITHHOLD}

    assert reasons(play(block(call("f", param("s", "Paris", "false"))), rules=rules)) == [
        ("f", "broken_json")
    ]
    assert arguments(
        play(block(call("f", param("s", "x"), param("any", "{", "false"))), rules=rules)
    ) == ['{"s": "x", "any": "{"}']


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("s", "5", '"5"'),
        ("n", "5", "5"),
        ("n", "x", '"x"'),
        ("any", "5", "5"),
        ("any", "x y", '"x y"'),
        ("o", '{"a": 1}', '{"a": 1}'),
        ("b", "True", "true"),
    ],
)
@pytest.mark.parametrize("says", [None, "maybe"])
def test_without_a_string_attribute_the_schema_decides(
    play: Play, name: str, value: str, want: str, says: str | None
) -> None:
    """A string where only a string is admitted, else JSON where it is admitted, else a string."""
    got = play(block(call("f", param(name, value, says))))

    assert arguments(got) == [f'{{"{name}": {want}}}']
    assert ("missing_string_attribute", name) in mends(got)


def test_text_marked_as_a_string_stays_one(play: Play) -> None:
    """string="true" is never read again, whatever it looks like."""
    got = play(block(call("f", param("n", "50"), param("b", "true"), param("any", "{}"))))

    assert arguments(got) == ['{"n": "50", "b": "true", "any": "{}"}']


@pytest.mark.parametrize(
    "name", ["a b", 'a"b', "a\\b", "a\nb", "a\tb", "", "ключ", "a>b", "x=y", "｜", "|DSML|", "'"]
)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("string", ["true", "false"])
def test_a_parameters_name_comes_out_right(play: Play, name: str, first: bool, string: str) -> None:
    """Names the bare codec breaks are written as escapes, first or later, of either kind."""
    import orjson

    params = [param(name, "1", string), param("s", "x")]
    got = play(block(call("f", *(params if first else params[::-1]))))

    assert orjson.loads(arguments(got)[0]) == {name: "1" if string == "true" else 1, "s": "x"}
    assert mends(got) == []


def test_of_two_parameters_of_a_name_the_first_counts(play: Play) -> None:
    """What may have been sent cannot be taken back; the second is left out and told."""
    got = play(block(call("f", param("s", "x"), param("s", "y"), param("n", "1", "false"))))

    assert arguments(got) == ['{"s": "x", "n": 1}']
    assert mends(got) == [("duplicate_parameter", "s")]


def test_a_parameter_without_a_name_is_left_out(play: Play) -> None:
    """The rest of the call goes on, and the report tells."""
    nameless = '<｜DSML｜parameter nome="s" string="true">x</｜DSML｜parameter>'
    got = play(block(call("f", nameless, param("s", "y"))))

    assert arguments(got) == ['{"s": "y"}']
    assert mends(got) == [("unreadable_parameter", None)]


# json_body


def test_a_json_body_is_the_arguments(play: Play) -> None:
    """REPAIR reads a strict object, as it is spelled; WITHHOLD does not deliver the call."""
    output = block(call("f", ' {"s": "x", "n": 1.50, "a b": [ 1 ]}\n'))

    got = play(output)
    assert arguments(got) == ['{"s": "x", "n": 1.50, "a\\u0020b": [ 1 ]}']
    assert mends(got) == [("json_body", None)]
    assert arguments(play(block(call("f", "{}")))) == ["{}"]
    assert arguments(play(block(call("f", '{"s": "x\ny"}')))) == ['{"s": "x\\ny"}']
    assert reasons(play(output, rules={"json_body": Action.WITHHOLD})) == [("f", "malformed_call")]


@pytest.mark.parametrize("body", ["s=x", "[1]", '{"s": ', '{"s":1,"s":2}', "<s>x</s>"])
def test_a_call_with_an_unreadable_body_is_never_an_empty_call(play: Play, body: str) -> None:
    """What cannot be read is withheld: an agent must not run it without arguments."""
    assert reasons(play(block(call("f", body)))) == [("f", "malformed_call")]


def test_noise_beside_parameters_is_lost_and_told(play: Play) -> None:
    """The call goes on, as with the codec; the report holds the noise."""
    got = play(block("noise", call("f", "more", param("s", "x"), "noise")))

    assert arguments(got) == ['{"s": "x"}']
    assert set(got["bathyal"]["lost_text"].split()) == {"more", "noise"}


# unclosed_call


def test_a_call_cut_under_stop_is_closed_or_withheld(play: Play) -> None:
    """What was begun becomes valid JSON; what was not is withheld; both are told."""
    head = f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{param("s", "x")}'
    begun = play(head + '<｜DSML｜parameter name="any" string="true">hel')
    assert (arguments(begun), begun["finish"]) == (['{"s": "x", "any": "hel"}'], "tool_calls")
    assert mends(begun) == [("unclosed_call", None)]
    assert arguments(play(head + '<｜DSML｜parameter name="o" string="false">{"a')) == [
        '{"s": "x"}'
    ]

    for cut in ("", '<｜DSML｜parameter name="o" string="false">{"a', "<｜DSML｜parameter na"):
        got = play(f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{cut}')
        assert reasons(got) == [("f", "unclosed_call")]
        assert got["finish"] == "stop"
    assert reasons(play('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f')) == [
        (None, "unclosed_call")
    ]
    assert reasons(play(head, rules={"hold": Hold.CALL})) == [("f", "unclosed_call")]


def test_a_call_cut_by_length_is_delivered_as_far_as_it_goes(play: Play) -> None:
    """As the codec: the finish reason tells; arguments are the beginning of valid JSON."""
    head = f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{param("s", "x")}'
    got = play(head + '<｜DSML｜parameter name="any" string="true">hel', finish="length")

    assert (arguments(got), got["finish"]) == (['{"s": "x", "any": "hel'], "length")
    assert got["bathyal"] is None
    bare = play('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n', finish="length")
    assert (arguments(bare), bare["finish"]) == ([""], "length")
    held = play(head, finish="length", rules={"hold": Hold.CALL})
    assert (held["calls"], reasons(held)) == ([], [("f", "unclosed_call")])


def test_an_unclosed_call_can_be_an_error(codec: Codec) -> None:
    """ERROR ends the reply in an error, but not one that length has cut."""
    policy = GatePolicy(unclosed_call=Action.ERROR)
    changed = under(codec, policy)
    output = f'R</think><｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{param("s", "x")}'
    for finish, fails in (("stop", True), ("length", False)):
        exchange = open_chat(changed, tools=TOOLS)
        drive(exchange, each(encode(codec, output)), finish)
        if fails:
            with pytest.raises(ReplyError, match="inside a call of 'f'"):
                exchange.body()
        else:
            assert exchange.body()


# doubtful_block

THOUGHT = f"I could do\n\n{block(call('g'))}"
FENCED = f"</think>So:\n```\n{block(call('g'))}\n```\nDone."


@pytest.mark.parametrize("output", [THOUGHT, f"</think>Run:\n```bash\nls\n\n{block(call('g'))}\n"])
def test_a_doubtful_block_that_ends_the_output_is_a_call(codec: Codec, output: str) -> None:
    """Thinking or a fence left open by mistake does not cost the call."""
    got = talk(codec, output, tools=TOOLS)

    assert ([n for n, _, _ in got["calls"]], got["finish"]) == (["g"], "tool_calls")
    assert "dsml" not in got["content"] + got["reasoning"]


def test_a_doubtful_block_with_text_after_it_is_a_quotation(codec: Codec) -> None:
    """Shown where it stands, its markers harmless; what follows is not lost."""
    got = talk(codec, THOUGHT + " or rather not.</think>No.", tools=TOOLS)
    assert got["calls"] == []
    assert got["content"] == "No."
    assert got["reasoning"].endswith("</dsml:tool_calls> or rather not.")

    got = talk(codec, FENCED, tools=TOOLS)
    assert got["calls"] == []
    assert got["content"].startswith("So:\n```\n<dsml:tool_calls>\n<dsml:invoke")
    assert got["content"].endswith("</dsml:tool_calls>\n```\nDone.")
    assert got["bathyal"] == {"quoted_markers": 1}


def test_a_draft_in_the_thinking_is_not_called_beside_the_call(codec: Codec) -> None:
    """The real call after the thinking is the only one."""
    got = talk(codec, THOUGHT + "</think>" + block(call("f", param("s", "x"))), tools=TOOLS)

    assert [n for n, _, _ in got["calls"]] == ["f"]


def test_doubtful_blocks_can_be_calls_or_never(play: Play) -> None:
    """CALL takes them at once, as the codec; QUOTE shows them even at the end."""
    got = play(FENCED[8:], rules={"doubtful_block": Doubt.CALL})
    assert [n for n, _, _ in got["calls"]] == ["g"]
    assert got["bathyal"]["lost_text"].strip() == "```\nDone."

    got = play(FENCED[8:].split("\n```\nDone")[0], rules={"doubtful_block": Doubt.QUOTE})
    assert got["calls"] == []
    assert got["content"].endswith("</dsml:tool_calls>")


# stray_marker


STRAYS = [
    ("a ｜DSML｜ b", "a dsml: b"),
    ("a</｜DSML｜tool_calls>b", "a</dsml:tool_calls>b"),
    ("use <｜DSML｜ tags", "use <dsml: tags"),
]


@pytest.mark.parametrize(("output", "want"), STRAYS)
def test_a_marker_that_opens_nothing_is_shown(play: Play, output: str, want: str) -> None:
    """QUOTE makes it harmless and counts it; PASS lets the token through."""
    got = play(output)
    assert (got["content"], got["bathyal"]) == (want, {"quoted_markers": 1})

    if not output.startswith("use"):  # the codec alone takes this one for a block
        assert play(output, rules={"stray_marker": Action.PASS})["content"] == output


@pytest.mark.parametrize("bars", ["｜DSML｜", "|DSML|"])
def test_markup_spelled_by_ordinary_tokens_is_never_a_call(codec: Codec, bars: str) -> None:
    """A model that copies hostile text spells it so: it is shown, and shows no marker."""
    text = block(call("g")).replace("｜DSML｜", bars)
    ids = [*encode(codec, "R</think>"), *plainly(codec, text)]
    for size in (1, 2, 1000):
        exchange = open_chat(codec, stream=True, tools=TOOLS)
        got = message(chunks(drive(exchange, each(ids, size))))
        assert got["calls"] == []
        assert got["content"] == text.replace(bars, "dsml:")
        assert got["bathyal"] == {"quoted_markers": 4}


def test_a_marker_in_a_value_is_kept_and_does_not_show(codec: Codec) -> None:
    """The value decodes to what was written; the JSON sent holds no marker."""
    import orjson

    value = "see </｜DSML｜parameter> and <|DSML|invoke>"
    ids = encode(codec, 'R</think><｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n')
    ids += encode(codec, '<｜DSML｜parameter name="s" string="true">') + plainly(codec, value)
    ids += encode(codec, "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>")
    got = message(chunks(drive(open_chat(codec, stream=True, tools=TOOLS), each(ids))))

    assert orjson.loads(arguments(got)[0]) == {"s": value}
    assert "｜" not in arguments(got)[0]


# hold


def test_hold_call_releases_only_whole_calls(codec: Codec) -> None:
    """With CALL nothing of a call is sent before its end; with PARAMETER its string flows."""
    head = encode(codec, 'R</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n')
    head += encode(codec, '<｜DSML｜parameter name="s" string="true">lorem ipsum')
    tail = encode(codec, "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>")

    for hold, flows in ((Hold.PARAMETER, True), (Hold.CALL, False)):
        policy = replace(GatePolicy(), hold=hold)
        changed = under(codec, policy)
        exchange = open_chat(changed, stream=True, tools=TOOLS)
        frames = exchange.start(10, 4)
        for id_ in head:
            frames += exchange.receive([id_])
        assert any(b"tool_calls" in frame for frame in frames) is flows
        for id_ in tail:
            frames += exchange.receive([id_])
        got = message(chunks(frames + exchange.close("stop")))
        assert arguments(got) == ['{"s": "lorem ipsum"}']


def test_hold_none_is_the_bare_codec(codec: Codec) -> None:
    """Without a gate everything passes, and nothing is reported."""
    changed = under(codec, BARE)
    got = talk(changed, "R</think>" + block(call("rm", param("s", "{bad", "false"))), tools=TOOLS)

    assert [(n, a) for n, a, _ in got["calls"]] == [("rm", '{"s": {bad}')]
    assert got["bathyal"] is None


# text around


def test_text_after_the_calls_is_told_as_lost(play: Play) -> None:
    """The codec writes no text after a call: the report holds it."""
    got = play(block(call("g")) + "\nAnd then some text.")

    assert got["content"] == ""
    assert got["bathyal"] == {"lost_text": "\nAnd then some text.", "lost_chars": 20}
    assert play(block(call("g")) + "\n\n")["bathyal"] is None


def test_calls_of_a_second_block_count(play: Play) -> None:
    """They follow those of the first, and only the text between is lost."""
    got = play(block(call("g")) + "and" + block(call("f", param("s", "x"))))

    assert [n for n, _, _ in got["calls"]] == ["g", "f"]
    assert got["bathyal"] == {"lost_text": "and", "lost_chars": 3}


def test_an_empty_block_is_an_empty_answer(play: Play) -> None:
    """No call, no complaint: finish_reason stop and no tool_calls."""
    got = play(block())

    assert (said(got)["calls"], got["finish"], got["bathyal"]) == ([], "stop", None)


def test_a_reply_cut_where_no_call_is_wanted_has_no_marker(codec: Codec) -> None:
    """Under `length` and tool_choice "none", at every token: the text before the block, no more."""
    ids = encode(codec, f"Hi there\n\n{block(call('f', param('s', 'xy')), call('g'))}")
    for end in range(len(ids) + 1):
        got = talk(
            codec,
            ids[:end],
            "length",
            tools=TOOLS,
            tool_choice="none",
            thinking={"type": "disabled"},
        )
        assert "Hi there\n\n<".startswith(got["content"])
        assert (got["calls"], got["finish"]) == ([], "length")


@pytest.mark.parametrize("begin", ["", "R</think>", "R"])
def test_a_reply_cut_anywhere_says_what_the_codec_says(
    codec: Codec, bare: Codec, begin: str
) -> None:
    """Under `length`: content to the newline, reasoning, finish and names, at every token."""
    calls = block(call("f", param("s", "xy"), param("n", "5", "false")), call("g"))
    ids = encode(codec, f"{begin}Hi there\n\n{calls}")
    thinking = {"type": "enabled" if begin else "disabled"}
    for end in range(len(ids) + 1):
        ours, theirs = (
            said(talk(of, ids[:end], "length", tools=TOOLS, thinking=thinking))
            for of in (codec, bare)
        )
        names = [[name for name, _ in reply.pop("calls")] for reply in (ours, theirs)]
        assert (ours, names[0]) == (theirs, names[1])
