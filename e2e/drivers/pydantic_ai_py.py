"""pydantic-ai: an Agent with a plain tool, through four of its models."""

import asyncio

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.deepseek import DeepSeekProvider
from pydantic_ai.providers.openai import OpenAIProvider
from tool import KEY, MODEL, PROMPT, PROTOCOL, STREAM, URL, VARIANT, lookup, say

if VARIANT == "anthropic":
    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
elif VARIANT == "deepseek":
    import openai

    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
    model = OpenAIChatModel(MODEL, provider=DeepSeekProvider(openai_client=client))
else:
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
    kind = OpenAIChatModel if PROTOCOL == "chat" else OpenAIResponsesModel
    model = kind(MODEL, provider=provider)
agent = Agent(model, tools=[lookup])


async def main() -> None:
    """Run it."""
    if STREAM:
        async with agent.run_stream(PROMPT) as result:
            say(await result.get_output())
    else:
        say((await agent.run(PROMPT)).output)


asyncio.run(main())
