"""Token counts of a reply: the engine's, and no more reasoning than output."""

from __future__ import annotations

import orjson
import pytest

from parsers.frames import ChatFrames, ResponsesFrames

CHAT = (
    b'{"usage":{"prompt_tokens":3,"completion_tokens":40,"total_tokens":43,'
    b'"prompt_tokens_details":{"cached_tokens":0},'
    b'"completion_tokens_details":{"reasoning_tokens":34}}}'
)
RESPONSES = (
    b'{"usage":{"input_tokens":3,"input_tokens_details":{"cached_tokens":0},"output_tokens":40,'
    b'"output_tokens_details":{"reasoning_tokens":34},"total_tokens":43}}'
)


@pytest.mark.parametrize(("count", "reasoning"), [(27, 27), (34, 34), (50, 34)])
def test_reasoning_tokens_never_exceed_the_output(count: int, reasoning: int) -> None:
    """Re-spelled thinking may take more tokens than the model wrote; the sum must still add up."""
    chat = orjson.loads(ChatFrames().seal_body(CHAT.decode(), count, None))["usage"]
    response = orjson.loads(ResponsesFrames().seal_body(RESPONSES.decode(), count, None))["usage"]

    assert (count, 3 + count) == (chat["completion_tokens"], chat["total_tokens"])
    assert reasoning == chat["completion_tokens_details"]["reasoning_tokens"]
    assert (count, 3 + count) == (response["output_tokens"], response["total_tokens"])
    assert reasoning == response["output_tokens_details"]["reasoning_tokens"]
