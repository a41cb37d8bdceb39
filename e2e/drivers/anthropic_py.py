"""The anthropic SDK: a loop by hand, or its own tool runner."""

import anthropic
from tool import DESCRIPTION, KEY, MODEL, PROMPT, SCHEMA, STREAM, URL, VARIANT, lookup, say

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)


def by_hand() -> str:
    """Append messages until one has no call."""
    messages = [{"role": "user", "content": PROMPT}]
    options = {
        "model": MODEL,
        "max_tokens": 4096,
        "messages": messages,
        "tools": [{"name": "lookup", "description": DESCRIPTION, "input_schema": SCHEMA}],
        "thinking": {"type": "enabled", "budget_tokens": 2048},
    }
    while True:
        if STREAM:
            with client.messages.stream(**options) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**options)
        if message.stop_reason != "tool_use":
            return "".join(part.text for part in message.content if part.type == "text")
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": part.id, "content": lookup(**part.input)}
            for part in message.content
            if part.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


def by_runner() -> str:
    """Let the SDK run the tool."""
    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=4096,
        messages=[{"role": "user", "content": PROMPT}],
        tools=[anthropic.beta_tool(lookup)],
    )
    message = runner.until_done()
    return "".join(part.text for part in message.content if part.type == "text")


say(by_runner() if VARIANT == "tool_runner" else by_hand())
