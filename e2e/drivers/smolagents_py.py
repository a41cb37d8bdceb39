"""smolagents: a ToolCallingAgent, whose last step is a call of final_answer."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from tool import KEY, MODEL, PROMPT, STREAM, URL, lookup, say

model = OpenAIServerModel(model_id=MODEL, api_base=f"{URL}/v1", api_key=KEY)
agent = ToolCallingAgent(
    tools=[tool(lookup)], model=model, stream_outputs=STREAM, max_steps=3, verbosity_level=0
)
say(str(agent.run(PROMPT)))
