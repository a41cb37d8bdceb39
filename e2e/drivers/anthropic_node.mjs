// The Anthropic SDK: a loop by hand.
import Anthropic from "@anthropic-ai/sdk";
import { DESCRIPTION, KEY, MODEL, PROMPT, SCHEMA, STREAM, URL, lookup, say } from "./tool.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: PROMPT }];
for (;;) {
  const options = {
    model: MODEL,
    max_tokens: 4096,
    messages,
    tools: [{ name: "lookup", description: DESCRIPTION, input_schema: SCHEMA }],
    thinking: { type: "enabled", budget_tokens: 2048 },
  };
  const message = STREAM
    ? await client.messages.stream(options).finalMessage()
    : await client.messages.create(options);
  if (message.stop_reason !== "tool_use") {
    say(message.content.filter((part) => part.type === "text").map((part) => part.text).join(""));
    break;
  }
  messages.push({ role: "assistant", content: message.content });
  const calls = message.content.filter((part) => part.type === "tool_use");
  messages.push({
    role: "user",
    content: calls.map((part) => ({
      type: "tool_result",
      tool_use_id: part.id,
      content: lookup(part.input),
    })),
  });
}
