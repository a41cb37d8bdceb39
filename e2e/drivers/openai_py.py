"""The openai SDK: a loop by hand over Chat Completions or Responses."""

import json  # noqa: TID251  clients' environments need not have orjson

import openai
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

FUNCTION = {"name": "lookup", "description": DESCRIPTION, "parameters": SCHEMA, "strict": True}
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


def chat() -> str:
    """Append messages until one has no call."""
    messages = [{"role": "user", "content": PROMPT}]
    options = {
        "model": MODEL,
        "messages": messages,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    while True:
        if STREAM:
            with client.chat.completions.stream(**options) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**options).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            result = lookup(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses() -> str:
    """Append items until a response has no call; or leave the history to the server."""
    kept = VARIANT == "previous_response_id"
    items = [{"role": "user", "content": PROMPT}]
    options = {"model": MODEL, "tools": [{"type": "function", **FUNCTION}], "store": kept}
    while True:
        if STREAM:
            with client.responses.stream(input=items, **options) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(input=items, **options)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        if kept:
            items = []
            options["previous_response_id"] = response.id
        else:
            items += response.output
        for call in calls:
            result = lookup(**json.loads(call.arguments))
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )


say(chat() if PROTOCOL == "chat" else responses())
