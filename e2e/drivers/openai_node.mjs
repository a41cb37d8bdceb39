// The openai SDK: its runTools helper over Chat Completions, a loop by hand over Responses.
import OpenAI from "openai";
import { DESCRIPTION, KEY, MODEL, PROMPT, PROTOCOL, SCHEMA, STREAM, URL, lookup, say } from "./tool.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0 });

async function chat() {
  const runner = client.chat.completions.runTools({
    model: MODEL,
    stream: STREAM,
    messages: [{ role: "user", content: PROMPT }],
    tools: [
      {
        type: "function",
        function: {
          name: "lookup",
          description: DESCRIPTION,
          parameters: SCHEMA,
          parse: JSON.parse,
          function: lookup,
        },
      },
    ],
  });
  return await runner.finalContent();
}

async function responses() {
  const input = [{ role: "user", content: PROMPT }];
  for (;;) {
    const options = {
      model: MODEL,
      input,
      store: false,
      tools: [{ type: "function", name: "lookup", description: DESCRIPTION, parameters: SCHEMA, strict: true }],
    };
    const response = STREAM
      ? await client.responses.stream(options).finalResponse()
      : await client.responses.create(options);
    const calls = response.output.filter((item) => item.type === "function_call");
    if (calls.length === 0) return response.output_text;
    input.push(...response.output);
    for (const call of calls) {
      const output = lookup(JSON.parse(call.arguments));
      input.push({ type: "function_call_output", call_id: call.call_id, output });
    }
  }
}

say(await (PROTOCOL === "chat" ? chat() : responses()));
