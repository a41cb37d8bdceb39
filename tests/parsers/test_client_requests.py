"""Bodies of the shapes that real clients send: accepted and answered under profile agent."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson
import pytest

from parsers import ClientError, Codec, Exchange
from tests.parsers import streams
from tests.parsers.support import drive, each, encode

LINES = (Path(__file__).parents[1] / "data/requests/clients.jsonl").read_bytes().splitlines()
REQUESTS = [orjson.loads(line) for line in LINES]
# Refused by a rule: (code, param).
BY_RULE = {
    # the SDK reads the details and sends the whole history instead
    "anthropic-py.runner#0": ("invalid_request_error", "thread"),
    # a model without a vision tower refuses images
    "claude-code-image#1": ("image_not_supported", "messages[3].content[0].content[0]"),
    "codex-image#0": ("image_not_supported", "input[7].output[0]"),
}
KEPT = b'{"type": "message", "role": "assistant", "content": "kept"}'


def open_(codec: Codec, request: dict[str, Any], **fields: Any) -> Exchange:
    return codec.open_exchange(
        request["protocol"],
        orjson.dumps({**request["body"], **fields}),
        exchange_id="ID",
        stateful=True,
        history=b"[]",
        find_item=lambda _id: KEPT,
    )


def is_forced(choice: Any) -> bool:
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return kind in ("required", "any", "tool", "function")


def wants_json(body: dict[str, Any]) -> bool:
    shapes = (
        body.get("response_format"),
        body.get("text", {}).get("format"),
        body.get("output_config", {}).get("format"),
    )
    return any(shape is not None for shape in shapes)


@pytest.mark.parametrize("request_", REQUESTS, ids=itemgetter("client"))
@pytest.mark.parametrize("stream", [True, False])
def test_a_clients_request_is_answered(
    codec: Codec, request_: dict[str, Any], stream: bool
) -> None:
    """Opened, generated, closed: the reply has the text, as a stream and whole."""
    if request_["client"] in BY_RULE:
        with pytest.raises(ClientError) as caught:
            open_(codec, request_)
        assert (caught.value.code, caught.value.param) == BY_RULE[request_["client"]]
        return
    if request_["protocol"] == "count_tokens":
        assert codec.prompt_ids("messages", orjson.dumps(request_["body"]))
        return
    body = {"stream": stream}
    if not stream and "stream_options" in request_["body"]:
        body["stream_options"] = None  # type: ignore[assignment]
    exchange = open_(codec, request_, **body)
    if is_forced(request_["body"].get("tool_choice")):
        assert exchange.continuation() is not None  # tests/parsers/test_forced.py goes on
        return
    text = '{"ok": true}' if wants_json(request_["body"]) else "Hello."
    frames = drive(exchange, each(encode(codec, f"R</think>{text}"), 3), completion_tokens=9)
    protocol = exchange.protocol
    got = streams.message(protocol, frames) if stream else streams.whole(protocol, exchange.body())

    assert (got["content"], got["reasoning"]) == (text, "R")
    assert got["bathyal"] is None
    assert exchange.model == "gpt"


def test_counting_needs_no_limit_and_is_exact(codec: Codec) -> None:
    """The prompt that is counted is the prompt that is generated from."""
    body = orjson.dumps(
        {
            "model": "gpt",
            "system": "Be brief.",
            "tools": [{"name": "bash", "input_schema": {"type": "object", "properties": {}}}],
            "messages": [{"role": "user", "content": "hi"}],
        }
    )
    exchange = codec.open_exchange("messages", body, exchange_id="ID")

    assert codec.prompt_ids("messages", body) == exchange.prompt_ids
    assert len(exchange.prompt_ids) > 200


def test_the_list_of_refusals_is_not_stale() -> None:
    """Every request that may be refused is there."""
    assert set(BY_RULE) <= {request["client"] for request in REQUESTS}
