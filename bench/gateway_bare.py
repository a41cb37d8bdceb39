"""The least server there can be around the bare codec: what `bench.gateway` compares with.

    python -m bench.gateway_bare SCRIPT.jsonl

No checks, no gate, no limits, no disconnect handling; every step of the played tokens is pushed
through the official codec and sent as it comes.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import deepseek_recipe as recipe
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from engine import TINY_CHECKPOINT
from engine.api import ModelInfo
from gateway.backends.embedded import EmbeddedBackend
from gateway.backends.scripted import encoders, load_script

CHUNK = recipe.InferenceChunk


class Bare:
    """The server's one endpoint.

    Args:
        info: of the model it stands for.
        script: path of the played lines.
    """

    def __init__(self, info: ModelInfo, script: Path) -> None:
        self._name = info.name
        self._tokenizer = recipe.Tokenizer.from_str(Path(info.tokenizer_path).read_text())
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(self._tokenizer)
        versions = {info.name: recipe.ModelVersion.DeepseekV41Flash}
        self._options = recipe.ConversionOptions().with_model_versions_by_name(versions)
        encode = encoders(info.tokenizer_path)["output"].encode
        self._steps: dict[str, list[list[int]]] = {}
        for line in load_script(script):
            assert isinstance(line.output, str)
            ids = encode(line.output, add_special_tokens=False).ids
            size = line.tokens_per_step
            steps = [ids[i : i + size] for i in range(0, len(ids), size)]
            self._steps[str(line.name)] = steps

    async def chat(self, request: Request) -> Response:
        """Convert, encode, play."""
        native = recipe.ChatCompletionRequest(await request.body()).convert(self._options)
        prompt = self._encoding.encode(native.conversation)
        reply_id = str(uuid4())
        generator = recipe.ChatCompletionRequest.chunk_generator(native, reply_id, self._name)
        processor = recipe.StreamProcessor(generator, native.parsing_options, self._tokenizer)
        steps = self._steps[request.headers["x-bathyal-script"]]
        chunks = self._chunks(processor, len(prompt), steps)
        if native.stream:
            return StreamingResponse(_framed(chunks), media_type="text/event-stream")
        total: Any = None
        async for step in chunks:
            for chunk in step:
                if total is None:
                    total = recipe.ChatCompletionResponse(reply_id, self._name, 0, 0, 0)
                total.accumulate(chunk)
        return Response(total.to_json(), media_type="application/json")

    async def _chunks(
        self, processor: Any, prompt_tokens: int, steps: list[list[int]]
    ) -> AsyncIterator[list[Any]]:
        usage = recipe.PromptUsage(prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=0)
        yield processor.push(CHUNK.ready(prompt_usage=usage))
        for step in steps:
            await asyncio.sleep(0)
            yield processor.push(CHUNK.tokens(step, None))
        yield processor.push(CHUNK.finish(recipe.InferenceFinishReason.Stop))
        yield processor.finish()


async def _framed(chunks: AsyncIterator[list[Any]]) -> AsyncIterator[bytes]:
    async for step in chunks:
        if step:
            yield "".join(f"data: {chunk.to_json()}\n\n" for chunk in step).encode()
    yield b"data: [DONE]\n\n"


def main() -> None:
    """Serve until a signal."""
    bare = Bare(EmbeddedBackend(TINY_CHECKPOINT).info, Path(sys.argv[1]))
    app = Starlette(routes=[Route("/v1/chat/completions", bare.chat, methods=["POST"])])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)
        print(f"serves at http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(app, log_level="warning", access_log=False)
        asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


if __name__ == "__main__":
    main()
