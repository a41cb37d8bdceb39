"""What deepseek-recipe 0.2.0 does and this room relies on; a new codec that differs fails here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepseek_recipe as recipe
import orjson
import pytest

from parsers import Codec
from tests.parsers.support import encode, function, open_chat

Step = str | list[int]


@pytest.fixture
def play(codec: Codec) -> Callable[..., dict[str, Any]]:
    """Push steps (ids, or text) through a bare processor; returns fragments and finish reason."""

    def run(steps: list[Step], *, finish: str | None = "Stop", **fields: Any) -> dict[str, Any]:
        body = {"model": codec.model.name, "messages": [{"role": "user", "content": "q"}], **fields}
        converted = codec._convert(body)
        generator = recipe.ChatCompletionRequest.chunk_generator(converted, "ID", "M")
        processor = recipe.StreamProcessor(generator, converted.parsing_options, codec._tokenizer)
        out: dict[str, Any] = {"content": [], "calls": [], "finish": None, "finished": []}
        pushed = [recipe.InferenceChunk.ready()]
        pushed += [
            recipe.InferenceChunk.text(s) if isinstance(s, str) else recipe.InferenceChunk.tokens(s)
            for s in steps
        ]
        if finish:
            pushed.append(
                recipe.InferenceChunk.finish(getattr(recipe.InferenceFinishReason, finish))
            )
        for chunk in pushed:
            made = processor.push(chunk)
            out["finished"].append(processor.finished)
            _read(made, out)
        _read(processor.finish(), out)
        return out

    return run


def _read(made: list[Any], out: dict[str, Any]) -> None:
    for chunk in made:
        data = orjson.loads(chunk.to_json())
        (choice,) = data["choices"]
        delta = choice["delta"]
        if text := delta.get("content") or delta.get("reasoning_content"):
            out["content"].append(text)
        for call in delta.get("tool_calls", ()):
            out["calls"].append(
                (call["index"], call["function"].get("name"), call["function"]["arguments"])
            )
        out["finish"] = choice["finish_reason"] or out["finish"]
        out["usage"] = data.get("usage")


TOOLS = [function("f", {"a": "string"})]
QUIET = {"thinking": {"type": "disabled"}}
OPEN = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
ENDS = "</｜DSML｜parameter>\n</｜DSML｜invoke>\n"


def test_a_raw_parameter_carries_the_whole_inside_of_the_arguments(play: Any) -> None:
    """Text of a non-string parameter is spliced into the arguments as it stands, in every split."""
    inside = '"x </think> < </ <b>", "b c": [1, 2.50]'

    for size in (1, 3, 100):
        pieces = [inside[i : i + size] for i in range(0, len(inside), size)]
        steps = [OPEN + '<｜DSML｜parameter name="a" string="false">', *pieces, ENDS]
        got = play(steps, tools=TOOLS, **QUIET)

        assert '{"a": ' + inside + "}" == "".join(text for _, _, text in got["calls"])
        assert got["finish"] == "tool_calls"


def test_escapes_in_a_parameters_name_are_passed_on(play: Any) -> None:
    r"""A name written with \u escapes comes out as the JSON key it means; raw it would break."""
    name = r"a\u0020b\u0022c\u005cd\u000ae\u003ef"
    got = play(
        [f'{OPEN}<｜DSML｜parameter name="{name}" string="false">1{ENDS}'], tools=TOOLS, **QUIET
    )
    raw = play(
        [f'{OPEN}<｜DSML｜parameter name="a b" string="false">1{ENDS}'], tools=TOOLS, **QUIET
    )

    assert orjson.loads("".join(text for _, _, text in got["calls"])) == {'a b"c\\d\ne>f': 1}
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads("".join(text for _, _, text in raw["calls"]))


def test_no_tool_name_is_checked(play: Any) -> None:
    """An undeclared tool streams out as a normal call: the whitelist is ours."""
    got = play([OPEN.replace('"f"', '"rm_rf"') + "</｜DSML｜invoke>"], tools=TOOLS, **QUIET)

    assert got["calls"] == [(0, "rm_rf", ""), (0, None, "{}")]


def test_text_after_the_block_is_lost(play: Any) -> None:
    """Once the block is closed nothing more is written: we report what it loses."""
    got = play([OPEN, "</｜DSML｜invoke>\n</｜DSML｜tool_calls>", "after"], tools=TOOLS, **QUIET)

    assert got["content"] == []


def test_only_real_markers_count_in_tokens_and_any_in_text(play: Any, codec: Codec) -> None:
    """Markers spelled by ordinary tokens are text; pushed as text the same spelling is markup."""
    spelled = codec.vocabulary.spell(OPEN + "</｜DSML｜invoke>")

    assert play([spelled], tools=TOOLS, **QUIET)["calls"] == []
    assert play([OPEN + "</｜DSML｜invoke>"], tools=TOOLS, **QUIET)["calls"] != []


def test_tokens_and_text_share_a_stream(play: Any, codec: Codec) -> None:
    """A block that begins with the marker's token goes on as text, after tokens of an answer."""
    begin = codec.vocabulary.spell("<") + encode(codec, "｜DSML｜")
    steps = [encode(codec, "Hm\n\n"), begin, OPEN.removeprefix("<｜DSML｜") + "</｜DSML｜invoke>"]
    got = play(steps, tools=TOOLS, **QUIET)

    assert got["content"] == ["Hm"]  # the newlines before the block are swallowed
    assert got["calls"] == [(0, "f", ""), (0, None, "{}")]


def test_text_overtakes_half_a_character_and_a_special_token_does_not(
    play: Any, codec: Codec
) -> None:
    """Text pushed behind half a character comes out before it: so a block begins with a token."""
    half = codec.vocabulary.spell("é")[:1]

    assert play([half, "X", encode(codec, "a")], **QUIET)["content"] == ["X", "\ufffda"]
    end = encode(codec, "</think>")
    assert play([half, end, "X"], **QUIET)["content"] == ["\ufffd", "X"]


def test_a_push_that_ends_in_half_a_character_is_kept_whole(play: Any, codec: Codec) -> None:
    """All of such a push is dropped when the output ends there: halves are pushed apart."""
    word, half = encode(codec, "ab"), codec.vocabulary.spell("é")[:1]

    assert play([word + half], **QUIET)["content"] == []
    assert play([word, half], **QUIET)["content"] == ["ab"]


def test_a_second_end_of_thinking_is_removed(play: Any, codec: Codec) -> None:
    """An end-of-thinking token in the answer leaves no trace."""
    end = encode(codec, "</think>")

    assert play([encode(codec, "a"), end, encode(codec, "b")], **QUIET)["content"] == ["a", "b"]


def test_a_stop_sequence_ends_the_reply_at_once(play: Any, codec: Codec) -> None:
    """A matched stop sequence writes the last chunk; the finish chunk must not be pushed then."""
    got = play([encode(codec, "one END two")], finish=None, stop="END", **QUIET)

    assert (got["content"], got["finish"]) == (["one "], "stop")
    assert got["finished"][-1] is True


def test_without_a_finish_chunk_it_claims_stop_even_after_calls(play: Any) -> None:
    """The finish reason is lost without a finish chunk: it is always pushed."""
    got = play([OPEN + "</｜DSML｜invoke>"], finish=None, tools=TOOLS, **QUIET)

    assert got["finish"] == "stop"


def test_the_stop_token_is_text_to_it(play: Any, codec: Codec) -> None:
    """The codec never drops an EOS id: the exchange cuts it."""
    got = play([encode(codec, "a"), encode(codec, "<｜end▁of▁sentence｜>")], **QUIET)

    assert got["content"] == ["a", "<｜end▁of▁sentence｜>"]


def test_usage_and_the_model_end_the_json(play: Any, codec: Codec) -> None:
    """The last chunk is a JSON object that ends in usage: an extension can be appended to it."""
    wire = open_chat(codec, stream=True)._wire
    wire.ready(3, 1)
    last = wire.finish("stop")[-1]

    assert last.endswith("}}")
    assert '"completion_tokens":0,"total_tokens":3,' in last
