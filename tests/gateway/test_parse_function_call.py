"""POST /parse_function_call: SGLang's request and reply."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from engine.api import ModelInfo
from gateway.backends.scripted import ScriptedBackend
from tests.gateway.support import call, run, running, text_line

PATH = "/parse_function_call"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
    for name in ("weather", "now")
]


def invoke(name: str, inner: str = "") -> str:
    return f'<｜DSML｜ invoke name="{name}">\n{inner}</｜DSML｜ invoke>\n'


def block(*invokes: str) -> str:
    return f"<｜DSML｜ calls>\n{''.join(invokes)}</｜DSML｜ calls>"


A = '<｜DSML｜ parameter name="a" string="true">x</｜DSML｜ parameter>\n'
N = '<｜DSML｜ parameter name="n" string="false">3</｜DSML｜ parameter>\n'


def parse(info: ModelInfo, body: Any) -> tuple[int, Any]:
    async def main() -> tuple[int, Any]:
        async with running(ScriptedBackend([text_line("a")], info)) as app:
            return await call(app, PATH, body)

    return run(main())


def test_calls_carry_the_position_of_their_tool(info: ModelInfo) -> None:
    """`tool_index` points into `tools`; a tool that is not listed is returned with -1."""
    text = "Sure.\n\n" + block(invoke("now", A + N), invoke("zzz", A), invoke("weather"))

    status, reply = parse(info, {"text": text, "tools": TOOLS, "tool_call_parser": "deepseekv41"})

    assert status == 200
    assert set(reply) == {"normal_text", "calls"}
    assert reply["normal_text"].strip() == "Sure."
    assert [
        (one["tool_index"], one["name"], orjson.loads(one["parameters"])) for one in reply["calls"]
    ] == [(1, "now", {"a": "x", "n": 3}), (-1, "zzz", {"a": "x"}), (0, "weather", {})]
    assert all(set(one) == {"tool_index", "name", "parameters"} for one in reply["calls"])


def test_the_older_spelling_is_read_too(info: ModelInfo) -> None:
    """V4's tags without the blank, as its model writes them."""
    text = block(invoke("weather", A)).replace("｜DSML｜ calls", "｜DSML｜tool_calls")
    text = text.replace("｜DSML｜ ", "｜DSML｜")

    _, reply = parse(info, {"text": text, "tools": TOOLS, "tool_call_parser": "deepseekv4"})

    assert [(one["name"], one["parameters"]) for one in reply["calls"]] == [
        ("weather", '{"a": "x"}')
    ]


@pytest.mark.parametrize(
    "parameters",
    [
        5,
        "x",
        {"type": 5},
        {"required": 5},
        {"properties": "x"},
        {"properties": {"a": {"type": 1.5}}},
        {"properties": {"a": {"pattern": 5}}},
        {"properties": {"a": {"anyOf": 5}}},
        {"properties": {"n": {"allOf": "abc"}}},
        {"properties": {"a": {"minLength": "x"}}},
        {"additionalProperties": {"allOf": 7}, "properties": {"n": {"type": "integer"}}},
    ],
)
def test_parameters_that_are_no_schema_are_no_fault_of_the_server(
    info: ModelInfo, parameters: Any
) -> None:
    """Nothing is asked of them in SGLang's request, so the calls are found all the same."""
    tools = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    status, reply = parse(info, {"text": block(invoke("now", A + N)), "tools": tools})

    assert status == 200
    assert [orjson.loads(one["parameters"]) for one in reply["calls"]] == [{"a": "x", "n": 3}]


def test_a_schema_beyond_all_bounds_is_refused_by_name(info: ModelInfo) -> None:
    """As in a request for a reply."""
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"not": deep}
    tools = [{"type": "function", "function": {"name": "now", "parameters": deep}}]
    status, reply = parse(info, {"text": "x", "tools": tools})

    assert (status, reply["error"]["param"]) == (400, "tools[0].function.parameters")


@pytest.mark.parametrize("tools", [[], None])
def test_without_tools_the_text_is_unchanged(info: ModelInfo, tools: Any) -> None:
    """Nothing is parsed where nothing was declared."""
    text = "Sure." + block(invoke("weather", A))

    assert parse(info, {"text": text, "tools": tools}) == (200, {"normal_text": text, "calls": []})
    assert parse(info, {"text": text}) == (200, {"normal_text": text, "calls": []})


def test_a_text_without_calls_is_normal_text(info: ModelInfo) -> None:
    """The usual case."""
    assert parse(info, {"text": "Hello.", "tools": TOOLS}) == (
        200,
        {"normal_text": "Hello.", "calls": []},
    )


@pytest.mark.parametrize("size", [10, 30_000])
def test_a_long_text_is_parsed_like_a_short_one(info: ModelInfo, size: int) -> None:
    """Beyond a size the work is done in a thread; the result is the same."""
    text = "x" * size + "\n\n" + block(invoke("weather", A))

    status, reply = parse(info, {"text": text, "tools": TOOLS})

    assert status == 200
    assert reply["normal_text"].strip() == "x" * size
    assert [one["name"] for one in reply["calls"]] == ["weather"]


@pytest.mark.parametrize(
    "name", ["deepseekv4", "deepseekv41", "deepseek_v4", "deepseek-v4.1", "DeepSeekV41"]
)
def test_our_family_is_known_by_its_spellings(info: ModelInfo, name: str) -> None:
    """SGLang's and smg's names of the same parsers."""
    body = {"text": "a", "tools": TOOLS, "tool_call_parser": name}

    assert parse(info, body)[0] == 200


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{", None, "request body: expected a JSON object: "),
        ([], None, "request body: expected a JSON object, got an empty array"),
        ({"tools": TOOLS}, "text", "expected a string, got null"),
        ({"text": 5}, "text", "expected a string, got the number 5"),
        ({"text": "a", "tools": {}}, "tools", "expected a list of tools, got an empty object"),
        ({"text": "a", "tools": TOOLS, "tool_call_parser": "qwen25"}, "tool_call_parser", "qwen25"),
        ({"text": "a", "tools": TOOLS, "tool_call_parser": "deepseekv3"}, "tool_call_parser", "v3"),
        ({"text": "a", "tools": TOOLS, "tool_call_parser": 4}, "tool_call_parser", "number 4"),
        ({"text": "a", "tools": [{"type": "function"}]}, "tools[0].function", "got null"),
    ],
)
def test_a_wrong_request_is_400(info: ModelInfo, body: Any, param: str | None, words: str) -> None:
    """The field is named, and what came in JSON's words; another family's parser is refused."""
    status, reply = parse(info, body)

    assert words in reply["error"]["message"]

    assert (status, reply["error"]["param"]) == (400, param)
    assert reply["error"]["type"] == "invalid_request_error"
