"""Pairs, the memory of reasoning, several choices, raw completions, custom tools in chat."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from parsers import ClientError, Codec, ReasoningCache, separate_reasoning
from parsers.edits import ChatEdits
from parsers.pairs import Item, Placed, pair
from tests.parsers import streams
from tests.parsers.support import (
    chunks,
    complete,
    drive,
    each,
    encode,
    function,
    open_chat,
    request,
)
from tests.parsers.test_gate import block, call, param

USER = {"role": "user", "content": "q"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS = [function("f", {"a": "string"}), function("g")]

# Pairs


def test_what_is_in_order_stays_so() -> None:
    """Every item once, in its place."""
    items = [Item(), Item(calls=("a", "b")), Item(answers="a"), Item(answers="b"), Item()]

    assert pair(items) == [
        Placed("item", 0),
        Placed("item", 1),
        Placed("item", 2, "a"),
        Placed("item", 3, "b"),
        Placed("item", 4),
    ]


@given(st.data())
def test_every_call_is_answered_once(data: st.DataObject) -> None:
    """Any history: nothing is lost, every call is answered right behind its turn, in one way."""
    ids = st.sampled_from("abc")
    item = st.one_of(
        st.just(Item()),
        st.lists(ids, min_size=1, max_size=3, unique=True).map(lambda c: Item(calls=tuple(c))),
        ids.map(lambda a: Item(answers=a)),
    )
    items = data.draw(st.lists(item, max_size=12))
    placed = pair(items)

    assert sorted(p.at for p in placed if p.kind != "missing") == list(range(len(items)))
    open_: list[str] = []
    for p in placed:
        if p.kind == "repeat":
            assert items[p.first].answers == items[p.at].answers
            assert placed.index(p) > [q.at if q.kind == "item" else -1 for q in placed].index(
                p.first
            )
        if p.kind in ("orphan", "repeat"):
            continue
        answered = p.call if p.kind == "missing" else items[p.at].answers
        if answered is not None:
            open_.remove(answered)
            continue
        assert open_ == []
        open_ = list(items[p.at].calls)
    assert open_ == []


def test_calls_that_belong_together_keep_their_results_behind_them() -> None:
    """Items of one call each, as Responses has them, form one turn."""
    one = Item(calls=("a",), joins=True)
    two = Item(calls=("b",), joins=True)

    assert [p.at for p in pair([one, two, Item(answers="b"), Item(answers="a")])] == [0, 1, 2, 3]


# Reasoning


def test_the_memory_is_bounded() -> None:
    """The least recently used is forgotten; what is longer than all of it is not kept."""
    store = ReasoningCache(max_chars=10)
    store.put(["a"], "1234")
    store.put(["b"], "5678")
    assert store.get("a") == "1234"
    store.put(["c"], "9012")
    assert (store.get("a"), store.get("b"), store.get("c")) == ("1234", None, "9012")
    store.put(["d"], "x" * 11)
    assert store.get("d") is None
    store.put(["a"], "")
    assert store.get("a") == ""
    assert len(store) == 2


def test_calls_without_reasoning_are_forgotten_too() -> None:
    """Their ids count; else a server that never thinks would remember without end."""
    store = ReasoningCache(max_chars=100)
    for i in range(1000):
        store.put([f"call_{i:05}"], "")
    assert len(store) == 10


def test_threads_share_the_memory() -> None:
    """Long replies end in threads: none of them may meet another in the middle of a step."""
    store = ReasoningCache()
    store.put(map(str, range(20_000)), "")  # much to walk through, for one that would

    def remember(name: int) -> None:
        for i in range(50):
            store.put([f"{name}-{i}", f"{name}-{i}b"], "x" * (i % 7))
            store.get(f"{name}-{i // 2}")

    def give_way(*_: object) -> None:  # as whatever a collection of garbage finalises may do
        time.sleep(0)

    gc.callbacks.append(give_way)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(remember, range(4)))
    finally:
        gc.callbacks.remove(give_way)
    assert len(store) == 20_000 + 4 * 50 * 2


REASONINGS = [
    ("I think</think>", "I think"),
    ("\n\nI think\n\n</think>\n\n", "I think"),
    ("日本 👩</think>", "日本 👩"),
    ("</think>", ""),
    ("I think\n\n", "I think"),  # the call comes without an end of the reasoning
]


@pytest.mark.parametrize(("begin", "want"), REASONINGS)
@pytest.mark.parametrize("protocol", streams.PROTOCOLS)
@pytest.mark.parametrize("stream", [True, False])
def test_the_reasoning_of_a_call_is_remembered(
    codec: Codec, begin: str, want: str, protocol: str, stream: bool
) -> None:
    """Under every id of the turn, as it was delivered, streamed or whole."""
    store = ReasoningCache()
    body = {**streams.body_for(protocol, tools=TOOLS), "stream": stream}
    for size in (1, 5):
        exchange = codec.open_exchange(
            protocol,
            orjson.dumps(body),
            exchange_id="ID",
            reasoning=store,  # type: ignore[arg-type]
        )
        output = begin + block(call("f"), call("g"))
        frames = drive(exchange, each(encode(codec, output), size))
        if stream:
            got = streams.message(protocol, frames)
        else:
            got = streams.whole(protocol, exchange.body())

        assert got["reasoning"] == want
        assert [store.get(id_) for _, _, id_ in got["calls"]] == [want, want]


def test_nothing_is_remembered_without_a_call(codec: Codec, official: Codec) -> None:
    """A plain answer needs no memory; a profile that rejects keeps none."""
    store = ReasoningCache()
    for any_, output in [(codec, "R</think>Hi"), (official, "R</think>" + block(call("f")))]:
        exchange = any_.open_exchange(
            "chat", request(tools=TOOLS), exchange_id="ID", reasoning=store
        )
        drive(exchange, each(encode(any_, output)))
    assert len(store) == 0


def test_a_client_that_drops_reasoning_finishes_its_loop(codec: Codec) -> None:
    """The second step's prompt is the one of a client that sent it back."""
    store = ReasoningCache()

    def step(messages: list[Any], output: str = "") -> Any:
        exchange = codec.open_exchange(
            "chat", request(tools=TOOLS, messages=messages), exchange_id="ID", reasoning=store
        )
        drive(exchange, each(encode(codec, output)))
        return exchange

    first = step([USER], "because</think>" + block(call("f", param("a", "x"))))
    sent = orjson.loads(first.body())["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": sent["tool_calls"][0]["id"], "content": "r"}
    dropped = {k: v for k, v in sent.items() if k != "reasoning_content"}
    renamed = {**dropped, "reasoning": "because"}

    want = step([USER, sent, result]).prompt_ids
    assert step([USER, dropped, result]).prompt_ids == want
    store = ReasoningCache()
    assert step([USER, renamed, result]).prompt_ids == want
    assert step([USER, dropped, result]).prompt_ids != want


# Choices

OUTPUTS = ["R1</think>" + block(call("f", param("a", "x"))), "a much longer thought</think>plain"]


def test_choices_share_a_prompt_and_nothing_else(codec: Codec) -> None:
    """Interleaved: a parser per choice, its own index, one id; usage counts the prompt once."""
    first = open_chat(codec, tools=TOOLS, n=2, stream=True)
    assert first.choices[0] is first
    assert first.choices[0].prompt_ids == first.choices[1].prompt_ids
    steps = [each(encode(codec, output), 2) for output in OUTPUTS]
    frames: list[bytes] = []
    for choice in first.choices:
        frames += choice.start(10, 4)
    for i in range(max(map(len, steps))):
        for choice, mine in zip(first.choices, steps, strict=True):
            frames += choice.receive(mine[i]) if i < len(mine) else []
    frames += first.choices[1].close("stop", 7)
    assert b"data: [DONE]\n\n" not in frames
    frames += first.close("stop", 5)
    assert frames[-1] == b"data: [DONE]\n\n"
    assert frames.count(frames[-1]) == 1

    stream = chunks(frames)
    assert {c["id"] for c in stream} == {"ID"}
    usages = [c["usage"] for c in stream if c.get("usage")]
    assert [(u["prompt_tokens"], u["completion_tokens"], u["total_tokens"]) for u in usages] == [
        (10, 12, 22)
    ]
    assert usages[0]["completion_tokens_details"]["reasoning_tokens"] > 4
    apart = [[c for c in stream if c["choices"][0]["index"] == i] for i in (0, 1)]
    said = []
    for mine in apart:
        mine[-1].setdefault("usage", None)
        got = streams.support.message(mine)
        said.append(
            (got["reasoning"], got["content"], [c[:2] for c in got["calls"]], got["finish"])
        )
    assert said == [
        ("R1", "", [["f", '{"a": "x"}']], "tool_calls"),
        ("a much longer thought", "plain", [], "stop"),
    ]


def test_a_choice_that_fails_ends_the_stream(codec: Codec) -> None:
    """A reply of which a part is missing is an error: nothing of the others goes on behind it."""
    first = open_chat(codec, n=2, stream=True)
    for choice in first.choices:
        choice.start(1, 0)
    error, done = first.fail("m")
    assert b'"message":"m"' in error
    assert done == b"data: [DONE]\n\n"
    other = first.choices[1]
    assert other.finished
    assert other.receive(encode(codec, "R</think>Hi")) + other.close("stop") + other.fail("m") == []


def test_a_whole_reply_of_several_choices(codec: Codec) -> None:
    """One body: choices in order, usage summed, a report with its choice."""
    first = open_chat(codec, tools=TOOLS, n=3)
    outputs = [*OUTPUTS, "R</think>" + block(call("rm"))]
    for choice, output in zip(first.choices, outputs, strict=True):
        drive(choice, each(encode(codec, output)), completion_tokens=4)
    reply = orjson.loads(first.body())

    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    assert [c["finish_reason"] for c in reply["choices"]] == ["tool_calls", "stop", "stop"]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (10, 12)
    assert [c.get("bathyal") is not None for c in reply["choices"]] == [False, False, True]
    ids = [
        c["id"] for choice in reply["choices"] for c in choice["message"].get("tool_calls") or ()
    ]
    assert len(set(ids)) == len(ids) == 1


# Custom tools in chat

CUSTOM = {"type": "custom", "custom": {"name": "exec", "description": "run"}}
TEXTS = ['a "b"\n\\c', "👩 é", "", "\\u0041 \ud7ff", "x" * 50]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_custom_call_is_its_text(codec: Codec, text: str, size: int) -> None:
    """Streamed and whole: the input as the model wrote it, beside ordinary functions."""
    output = "R</think>" + block(call("exec", param("input", text)), call("f", param("a", "x")))
    tools = [CUSTOM, TOOLS[0]]
    stream = open_chat(codec, tools=tools, stream=True)
    sent: list[list[str]] = []
    for chunk in chunks(drive(stream, each(encode(codec, output), size))):
        for piece in chunk["choices"][0]["delta"].get("tool_calls", ()):
            inner = piece.get("custom") or piece["function"]
            if "id" in piece:
                sent.append([piece["type"], inner["name"], ""])
            sent[piece["index"]][2] += inner.get("input", inner.get("arguments", ""))
    exchange = open_chat(codec, tools=tools)
    drive(exchange, each(encode(codec, output), size))
    calls = orjson.loads(exchange.body())["choices"][0]["message"]["tool_calls"]

    assert sent == [["custom", "exec", text], ["function", "f", '{"a": "x"}']]
    assert calls[0]["custom"] == {"name": "exec", "input": text}
    assert calls[1]["function"] == {"name": "f", "arguments": '{"a": "x"}'}


@given(st.text(), st.integers(1, 7))
def test_escapes_are_read_in_any_split(text: str, size: int) -> None:
    """Fragments of a JSON string, cut anywhere, give the text; half a pair waits for the other."""
    arguments = '{"input": ' + orjson.dumps(text.encode("utf-8", "replace").decode()).decode() + "}"
    escaped = "".join(
        c if ord(c) < 128 else "".join(f"\\u{u:04x}" for u in _units(c)) for c in arguments
    )
    for whole in (arguments, escaped):
        edits, got = ChatEdits(frozenset(["e"])), ""
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        calls = [{"index": 0, "id": "i", "type": "function", "function": {"name": "e"}}]
        calls += [{"index": 0, "function": {"arguments": piece}} for piece in pieces]
        for one in calls:
            data = {"choices": [{"delta": {"tool_calls": [one]}}]}
            for chunk in edits.chunk(orjson.dumps(data).decode().replace(" ", " ")):
                (piece,) = orjson.loads(chunk)["choices"][0]["delta"]["tool_calls"]
                got += piece["custom"]["input"]
        assert got == orjson.loads(arguments)["input"]


def _units(char: str) -> list[int]:
    raw = char.encode("utf-16-be")
    return [int.from_bytes(raw[i : i + 2], "big") for i in range(0, len(raw), 2)]


def test_custom_calls_come_back(codec: Codec) -> None:
    """A custom call in the history is the function's call in the prompt."""
    custom = {"id": "c1", "type": "custom", "custom": {"name": "exec", "input": 'a "b"'}}
    plain = {**CALL, "function": {"name": "exec", "arguments": '{"input": "a \\"b\\""}'}}
    prompts = [
        open_chat(
            codec,
            tools=[CUSTOM],
            messages=[
                USER,
                {"role": "assistant", "content": None, "tool_calls": [made]},
                {"role": "tool", "tool_call_id": "c1", "content": "r"},
            ],
        ).prompt_ids
        for made in (custom, plain)
    ]
    assert prompts[0] == prompts[1]


# Completions


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_completion_is_plain_text(codec: Codec, size: int) -> None:
    """Nothing is parsed, markers are text, the stop token is cut; streamed or whole."""
    text = "<think>x</think>｜DSML｜ 👩 é\u2028"
    ids = encode(codec, text + "<｜end▁of▁sentence｜>more")
    stream, whole = complete(codec, stream=True), complete(codec)
    frames = drive(stream, each(ids, size), completion_tokens=9)
    drive(whole, each(ids, size), completion_tokens=9)
    got = chunks(frames)
    reply = orjson.loads(whole.body())

    assert not any("\u2028" in frame.decode() for frame in frames)  # see frames.data_line
    assert "".join(c["choices"][0]["text"] for c in got) == text
    assert [c["choices"][0]["finish_reason"] for c in got][-1] == "stop"
    assert reply["choices"] == [
        {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}
    ]
    prompt = len(encode(codec, "Say"))
    assert (
        reply["usage"]
        == got[-1]["usage"]
        == {
            "prompt_tokens": prompt,
            "completion_tokens": 9,
            "total_tokens": prompt + 9,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
    )
    assert stream.continuation() is None


def test_a_prompt_is_text_or_ids(codec: Codec) -> None:
    """Special tokens spelled in a raw prompt are special; ids are taken as they are."""
    spelled = "<｜begin▁of▁sentence｜><｜User｜>q"
    assert complete(codec, prompt=spelled).prompt_ids == tuple(encode(codec, spelled))
    assert complete(codec, prompt=[0, 5, 7]).prompt_ids == (0, 5, 7)
    assert complete(codec, prompt=[[0, 5, 7]]).prompt_ids == (0, 5, 7)
    assert complete(codec, prompt=["Say"]).prompt_ids == complete(codec).prompt_ids


@given(st.text("abE", max_size=12), st.integers(1, 4))
def test_a_stop_string_is_cut_in_any_split(codec: Codec, text: str, size: int) -> None:
    """Of several the one that ends first; what only began one is delivered."""
    stops = ["aEb", "bb", "EE"]
    exchange = complete(codec, stop=stops)
    drive(exchange, each(codec.vocabulary.spell(text), size), "length")
    choice = orjson.loads(exchange.body())["choices"][0]

    ends = [(i, s) for i in range(len(text) + 1) for s in stops if text[:i].endswith(s)]
    want = text if not ends else text[: ends[0][0] - len(ends[0][1])]
    assert (choice["text"], choice["finish_reason"]) == (want, "stop" if ends else "length")


def test_logprobs_are_listed(codec: Codec) -> None:
    """Token, its logprob, its rivals and where it stands."""
    exchange = complete(codec, logprobs=1)
    exchange.start(1, 0)
    a, b = codec.vocabulary.spell("ab")
    exchange.receive([a], [(-0.5, [(b, -1.0)])])
    exchange.receive([b], [(-0.25, [])])
    exchange.close("stop")

    assert orjson.loads(exchange.body())["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"b": -1.0}, {}],
        "text_offset": [0, 1],
    }


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt[1]"),
    ({"prompt": [10**7]}, "prompt[0]"),
    ({"prompt": [[1, -1]]}, "prompt[0][1]"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"model": "zz"}, "model"),
    ({"n": 2}, "n"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"max_tokens": 100_000}, "max_tokens"),
    ({"stream_options": {}}, "stream_options"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_a_bad_completion_is_refused(codec: Codec, fields: dict[str, Any], param: str) -> None:
    """400 with the field."""
    with pytest.raises(ClientError) as caught:
        complete(codec, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_completion_that_fails_ends_in_an_error(codec: Codec) -> None:
    """An error and the end of the stream; for a whole reply nothing."""
    error, done = complete(codec, stream=True).fail("m")
    assert b'"message":"m"' in error
    assert done == b"data: [DONE]\n\n"
    assert complete(codec).fail("m") == []


# Separate reasoning

PARTS = [
    ("<think>r</think>c", ("r", "c")),
    ("r</think>c", ("r", "c")),
    ("<think>only", ("only", "")),
    ("plain", ("", "plain")),
    ("r</think>\n\n" + block(call("f")), ("r", "\n\n" + block(call("f")))),
]


@pytest.mark.parametrize(("text", "want"), PARTS)
def test_reasoning_is_separated(text: str, want: tuple[str, str]) -> None:
    """SGLang's rule; calls stay in the text."""
    got = separate_reasoning(text)
    assert (got.reasoning_text, got.text) == want
    assert got.reply(blocks=False) == {"reasoning_text": want[0], "text": want[1]}
    assert got.reply(blocks=True)["blocks"] == [
        {"type": kind, "text": part}
        for kind, part in zip(("reasoning", "text"), want, strict=True)
        if part
    ]
