// Vercel's AI SDK: generateText and streamText with a tool, through four of its providers.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createDeepSeek } from "@ai-sdk/deepseek";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { DESCRIPTION, KEY, MODEL, PROMPT, PROTOCOL, SCHEMA, STREAM, URL, VARIANT, lookup, say } from "./tool.mjs";

const settings = { name: "bathyal", baseURL: `${URL}/v1`, apiKey: KEY };
const providers = {
  openai: () => {
    const openai = createOpenAI(settings);
    return PROTOCOL === "chat" ? openai.chat(MODEL) : openai.responses(MODEL);
  },
  "openai-compatible": () => createOpenAICompatible(settings)(MODEL),
  deepseek: () => createDeepSeek(settings)(MODEL),
  anthropic: () => createAnthropic(settings)(MODEL),
};
const options = {
  model: providers[VARIANT](),
  prompt: PROMPT,
  maxRetries: 0,
  stopWhen: stepCountIs(3),
  tools: {
    lookup: tool({
      description: DESCRIPTION,
      inputSchema: jsonSchema(SCHEMA),
      execute: async (input) => lookup(input),
    }),
  },
};
if (STREAM) {
  const result = streamText(options);
  await result.consumeStream();
  say(await result.text);
} else {
  say((await generateText(options)).text);
}
