"""LangChain's three chat models under LangGraph's ready-made agent."""

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_deepseek import ChatDeepSeek
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from tool import KEY, MODEL, PROMPT, PROTOCOL, STREAM, URL, VARIANT, lookup, say

SHARED = {"model": MODEL, "api_key": KEY, "max_retries": 0, "streaming": STREAM}
MODELS = {
    "openai": lambda: ChatOpenAI(
        base_url=f"{URL}/v1", use_responses_api=PROTOCOL == "responses", **SHARED
    ),
    "deepseek": lambda: ChatDeepSeek(api_base=f"{URL}/v1", **SHARED),
    "anthropic": lambda: ChatAnthropic(base_url=URL, max_tokens=4096, **SHARED),
}
agent = create_react_agent(MODELS[VARIANT](), [tool(lookup)])
state = agent.invoke({"messages": [("user", PROMPT)]})
say(state["messages"][-1].text)
