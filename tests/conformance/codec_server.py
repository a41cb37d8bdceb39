"""The bare official codec behind a minimal server: no gate, no rules of ours.

    python -m tests.conformance.codec_server --scripts FILE [--port N]

It plays a script (header x-bathyal-script) through deepseek-recipe for all three protocols, which
tests the cases' expectations by something this project did not write, and shows what the codec
alone leaves open. The tokens are single characters and special tokens, pushed one at a time.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from conformance.dialect import split_special
from conformance.protocols.render import PATHS

KINDS: dict[str, tuple[Any, Any]] = {
    "chat": (recipe.ChatCompletionRequest, recipe.ChatCompletionResponse),
    "responses": (recipe.ResponsesRequest, recipe.ResponsesResponse),
    "messages": (recipe.MessagesRequest, recipe.MessagesResponse),
}
FINISH = {
    "stop": recipe.InferenceFinishReason.Stop,
    "length": recipe.InferenceFinishReason.Length,
}
MODEL = "DeepSeek-V4.1-Flash"
VERSION = recipe.ModelVersion.DeepseekV41Flash
STOP_TOKEN = "<｜end▁of▁sentence｜>"


def error(protocol: str, status: int, body: str) -> Response:
    """The codec's error body, re-wrapped for Messages (it writes one shape for all)."""
    if protocol == "messages":
        inner = orjson.loads(body)["error"]
        shaped = {"type": "error", "error": {k: inner[k] for k in ("type", "message")}}
        body = orjson.dumps(shaped).decode()
    return Response(body, status, media_type="application/json")


def refusal(message: str) -> str:
    kind = "invalid_request_error"
    return orjson.dumps(
        {"error": {"message": message, "type": kind, "param": None, "code": kind}}
    ).decode()


def play(generator: Any, options: Any, prompt_tokens: int, script: dict[str, Any]) -> Iterator[Any]:
    """The codec's chunks for a script, without the ending where the script is a fault."""
    processor = recipe.StreamProcessor(generator, options)
    usage = recipe.PromptUsage(prompt_tokens=prompt_tokens)
    yield from processor.push(recipe.InferenceChunk.ready(prompt_usage=usage))
    text = script.get("output", script.get("raw_output", "")).removesuffix(STOP_TOKEN)
    for piece, special in split_special(text):
        for token in [piece] if special else piece:
            if not processor.finished:
                yield from processor.push(recipe.InferenceChunk.text(token, 1))
    if script.get("finish") == "error":
        processor.close()
        return
    if not processor.finished:
        reason = FINISH[script.get("finish", "stop")]
        yield from processor.push(recipe.InferenceChunk.finish(reason))
    yield from processor.finish()


def endpoint(protocol: str, scripts: dict[str, dict[str, Any]]) -> Any:
    request_class, response_class = KINDS[protocol]
    encoding = recipe.DeepseekV41Encoding()

    async def answer(request: Request) -> Response:
        raw = await request.body()
        script = scripts.get(request.headers.get("x-bathyal-script", ""), {"output": "ok"})
        try:
            parsed = request_class(raw)
            model = parsed.model
            converted = parsed.convert(recipe.ConversionOptions().with_model_alias("m", VERSION))
        except recipe.ConversionError as fault:
            return error(protocol, fault.status_code, fault.body)
        except (ValueError, TypeError, UnicodeEncodeError) as fault:
            return error(protocol, 400, refusal(str(fault)))
        prompt_tokens = len(encoding.render_conversation(converted.conversation).prompt)
        generator = request_class.chunk_generator(converted, "id1", model)
        chunks = play(generator, converted.parsing_options, prompt_tokens, script)
        if not converted.stream:
            if script.get("finish") == "error":
                return error(protocol, 502, refusal("the backend failed"))
            whole = response_class("id1", model, 1_700_000_000, prompt_tokens, 0)
            for chunk in chunks:
                whole.accumulate(chunk)
            return Response(whole.to_json(), media_type="application/json")

        async def frames() -> AsyncIterator[bytes]:
            for chunk in chunks:
                name = response_class.sse_event_name(chunk)
                head = f"event: {name}\n" if name else ""
                yield f"{head}data: {chunk.to_json()}\n\n".encode()
                if script.get("delay_ms"):
                    await asyncio.sleep(script["delay_ms"] / 1000)
            last = response_class.sse_done_data()
            if last is not None and script.get("finish") != "error":
                yield f"data: {last}\n\n".encode()

        headers = {"cache-control": "no-cache"}
        return StreamingResponse(frames(), media_type="text/event-stream", headers=headers)

    return answer


def application(scripts: dict[str, dict[str, Any]]) -> Starlette:
    async def models(_: Request) -> Response:
        page = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "codec"}]}
        return Response(orjson.dumps(page), media_type="application/json")

    routes = [
        Route(path, endpoint(protocol, scripts), methods=["POST"])
        for protocol, path in PATHS.items()
        if protocol in KINDS
    ]
    return Starlette(routes=[*routes, Route("/v1/models", models)])


def main() -> None:
    parser = argparse.ArgumentParser(description="the bare codec behind a minimal server")
    parser.add_argument("--scripts", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8009)
    arguments = parser.parse_args()
    lines = [orjson.loads(line) for line in arguments.scripts.read_bytes().split(b"\n") if line]
    scripts = {line["name"]: line for line in lines}
    uvicorn.run(application(scripts), host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
