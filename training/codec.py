"""Dialogues to token ids and model output back to messages, by DeepSeek's own codec.

The codec writes every prompt and reads every output, so the model learns exactly what a server
that uses the same codec will show it.
"""

from __future__ import annotations

from typing import Any

import deepseek_recipe as recipe
import orjson

from training.dialogues import Dialogue
from training.dialogues.build import MODEL

Json = dict[str, Any]
BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, THINK, END_THINK, DSML = range(9)
_OPTIONS = recipe.ConversionOptions()
_TOOL = {"type": "function", "function": {"name": "t"}}


def _converted(body: Json) -> Any:
    return recipe.ChatCompletionRequest(orjson.dumps(body)).convert(_OPTIONS)


def text_segments(body: Json) -> list[str]:
    """Plain text of the rendered conversation between its special tokens."""
    rendered = recipe.DeepseekV41Encoding().render_conversation(_converted(body).conversation)
    out, at = [], 0
    for start, end in rendered.special_ranges:
        out.append(rendered.prompt[at:start])
        at = end
    return [text for text in [*out, rendered.prompt[at:]] if text]


class Codec:
    """The V4.1 codec over one tokenizer file.

    Args:
        tokenizer: path of tokenizer.json.
    """

    def __init__(self, tokenizer: str) -> None:
        self.tokenizer = recipe.Tokenizer.from_file(tokenizer)
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(self.tokenizer)

    def prompt_ids(self, body: Json) -> list[int]:
        """Ids of the prompt of a request body."""
        ids: list[int] = self._encoding.encode(_converted(body).conversation)
        return ids

    def dialogue_ids(self, dialogue: Dialogue) -> list[int]:
        """Ids of a whole dialogue up to the EOS of its last assistant message.

        Without tools the codec drops the reasoning of every given assistant turn, so there the
        last turn is written by hand after its own prompt.
        """
        body = dialogue.body
        if "tools" in body:
            ids = self.prompt_ids(body)  # ends with the opening of a further assistant turn
            last = len(ids) - 1
            while ids[last] != EOS:
                last -= 1
            return ids[: last + 1]
        message = body["messages"][-1]
        ids = self.prompt_ids({**body, "messages": body["messages"][:-1]})
        if ids[-1] == THINK:
            ids += [*self.tokenizer.encode(message["reasoning_content"]), END_THINK]
        return [*ids, *self.tokenizer.encode(message["content"]), EOS]

    def parse(self, ids: list[int], thinking: bool, tools: bool, forced: bool = False) -> Json:
        """Model output (without EOS) as an assistant message plus `finish_reason`.

        The codec's reader knows neither names nor schemas (it splices what was written), so one
        request per kind of prompt stands for all.

        Args:
            ids: generated ids, EOS cut off.
            thinking: the prompt ended with <think>.
            tools: tools were declared.
            forced: `tool_choice` was "required": the prompt opened the calls.
        """
        body: Json = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        if tools:
            body["tools"] = [_TOOL]
        if not thinking:
            body["thinking"] = {"type": "disabled"}
        if forced:
            body["tool_choice"] = "required"
        converted = _converted(body)
        generator = recipe.ChatCompletionRequest.chunk_generator(converted, "id", MODEL)
        stream = recipe.StreamProcessor(generator, converted.parsing_options, self.tokenizer)
        response: Any = recipe.ChatCompletionResponse("id", MODEL, 0, 1, 0)
        usage = recipe.PromptUsage(prompt_tokens=1, prompt_cache_hit_tokens=0)
        inputs = [recipe.InferenceChunk.ready(prompt_usage=usage, system_fingerprint="x")]
        if ids:
            inputs.append(recipe.InferenceChunk.tokens(ids, None))
        inputs.append(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
        for chunk in inputs:
            if stream.finished:
                break
            for out in stream.push(chunk):
                response.accumulate(out)
        for out in stream.finish():
            response.accumulate(out)
        choice = orjson.loads(response.to_json())["choices"][0]
        message: Json = choice["message"]
        message["finish_reason"] = choice["finish_reason"]
        return message


def calls_of(message: Json) -> list[tuple[str, Any]]:
    """(name, arguments) of a message's calls; arguments that are no JSON stay text."""
    out: list[tuple[str, Any]] = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        try:
            args = orjson.loads(function["arguments"])
        except ValueError:
            args = function["arguments"]
        out.append((function["name"], args))
    return out


def assistant_spans(ids: list[int]) -> list[tuple[int, int, bool]]:
    """(start, end, thinking) of each assistant turn: ids[start:end] is what the model writes.

    `end` is the place of the turn's EOS, which the model writes too.
    """
    spans: list[tuple[int, int, bool]] = []
    at = 0
    while True:
        try:
            start = ids.index(ASSISTANT, at)
            end = ids.index(EOS, start)
        except ValueError:
            return spans
        spans.append((start + 2, end, ids[start + 1] == THINK))
        at = end + 1


class RoundTripError(Exception):
    """A dialogue's ids do not read back as what was meant; the message says what differs."""


def check(codec: Codec, dialogue: Dialogue, ids: list[int], prompts: bool = False) -> None:
    """Read every assistant turn of a dialogue back and compare it with what was meant.

    Args:
        codec: the codec that made the ids.
        dialogue: what was meant.
        ids: `codec.dialogue_ids(dialogue)`.
        prompts: also check that the prompt of each turn is a prefix of the ids, including the
            prompt that `tool_choice: "required"` opens.

    Raises:
        RoundTripError: something differs.
    """
    body, messages = dialogue.body, dialogue.body["messages"]
    tools = "tools" in body
    spans = assistant_spans(ids)
    if len(spans) != len(dialogue.turns):
        raise RoundTripError(f"{len(spans)} assistant turns, expected {len(dialogue.turns)}")
    for turn, (start, end, think) in zip(dialogue.turns, spans, strict=True):
        meant = messages[turn.index]
        reasons = dialogue.thinking and (tools or turn is dialogue.turns[-1])
        if think != reasons:
            raise RoundTripError(f"message {turn.index}: think mark {think}, expected {reasons}")
        got = codec.parse(ids[start:end], think, tools)
        pairs = [
            (got.get("content") or "", meant["content"]),
            (calls_of(got), calls_of(meant)),
            (got["finish_reason"], "tool_calls" if turn.kind == "call" else "stop"),
        ]
        if think:
            pairs.append((got.get("reasoning_content") or "", meant["reasoning_content"]))
        for was, expected in pairs:
            if was != expected or orjson.dumps(was) != orjson.dumps(expected):
                raise RoundTripError(f"message {turn.index}: {was!r}, expected {expected!r}")
        if prompts and think == dialogue.thinking:
            so_far = {**body, "messages": messages[: turn.index]}
            if codec.prompt_ids(so_far) != ids[:start]:
                raise RoundTripError(f"message {turn.index}: its prompt is no prefix of the ids")
            if turn.forced:
                opened = codec.prompt_ids({**so_far, "tool_choice": "required"})
                if opened != ids[: len(opened)] or len(opened) <= start:
                    raise RoundTripError(f"message {turn.index}: forced prompt is no prefix")
                rest = codec.parse(ids[len(opened) : end], False, True, forced=True)
                if calls_of(rest) != calls_of(meant):
                    raise RoundTripError(f"message {turn.index}: forced call reads {rest!r}")
