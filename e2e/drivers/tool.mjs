// What every driver in JavaScript shares; see tool.py.
import { readFileSync, writeFileSync } from "node:fs";

export const URL = process.env.E2E_URL;
export const KEY = process.env.E2E_KEY;
export const MODEL = process.env.E2E_MODEL;
export const PROMPT = process.env.E2E_PROMPT;
export const PROTOCOL = process.env.E2E_PROTOCOL;
export const VARIANT = process.env.E2E_VARIANT;
export const STREAM = Boolean(process.env.E2E_STREAM);

export const DESCRIPTION = "Look up the weather of a city for some days.";
export const SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
  additionalProperties: false,
};

export function lookup({ city, days }) {
  writeFileSync("mark.txt", JSON.stringify({ city, days }));
  return readFileSync("result.txt", "utf8");
}

export function say(text) {
  process.stdout.write(`${text}\n`);
}
