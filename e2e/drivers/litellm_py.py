"""litellm: completion() through three of its providers, and responses()."""

import json  # noqa: TID251  clients' environments need not have orjson

import litellm
from tool import (
    DESCRIPTION,
    KEY,
    MODEL,
    PROMPT,
    PROTOCOL,
    SCHEMA,
    STREAM,
    URL,
    VARIANT,
    lookup,
    say,
)

litellm.telemetry = False
FUNCTION = {"name": "lookup", "description": DESCRIPTION, "parameters": SCHEMA}
BASES = {"openai": f"{URL}/v1", "deepseek": f"{URL}/beta", "anthropic": URL}
WHERE = {"model": f"{VARIANT}/{MODEL}", "api_base": BASES[VARIANT], "api_key": KEY}


def completion() -> str:
    """Append messages until one has no call."""
    messages = [{"role": "user", "content": PROMPT}]
    while True:
        reply = litellm.completion(
            messages=messages,
            tools=[{"type": "function", "function": FUNCTION}],
            stream=STREAM,
            num_retries=0,
            **WHERE,
        )
        if STREAM:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump())
        for call in message.tool_calls:
            result = lookup(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses() -> str:
    """Append items until a response has no call."""
    items = [{"role": "user", "content": PROMPT}]
    while True:
        reply = litellm.responses(
            input=items, tools=[{"type": "function", **FUNCTION}], store=False, **WHERE
        )
        output = [item.model_dump(exclude_none=True) for item in reply.output]
        calls = [item for item in output if item["type"] == "function_call"]
        if not calls:
            return reply.output_text
        items += output
        for call in calls:
            result = lookup(**json.loads(call["arguments"]))
            items.append(
                {"type": "function_call_output", "call_id": call["call_id"], "output": result}
            )


say(responses() if PROTOCOL == "responses" else completion())
