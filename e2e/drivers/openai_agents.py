"""openai-agents: an Agent with a function tool."""

import asyncio

import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from tool import KEY, MODEL, PROMPT, PROTOCOL, STREAM, URL, lookup, say

set_tracing_disabled(True)
kind = OpenAIChatCompletionsModel if PROTOCOL == "chat" else OpenAIResponsesModel
client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
agent = Agent(
    name="e2e",
    instructions="Use the tool.",
    model=kind(MODEL, client),
    tools=[function_tool(lookup)],
)


async def main() -> None:
    """Run it."""
    if STREAM:
        result = Runner.run_streamed(agent, PROMPT)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, PROMPT)
    say(str(result.final_output))


asyncio.run(main())
