"""vLLM's own HTTP front over scripted tokens, without an engine core, a model or a GPU.

    PYTHONPATH=. python tests/conformance/peers/vllm_front.py \
        --scripts FILE --tokenizer tokenizer.json --dialect v4.1 --port 30200

Run by the Python of an environment with vllm (0.33.0 tried) and its imports; docs/conformance.md
says how it was made. Routes, request models, renderer, AsyncLLM, detokenizer, stop texts and the
DeepSeek parsers are vLLM's as installed. What is ours is the object in the place of the engine core
behind AsyncLLM: it answers each request with the token ids of the script that the header
x-bathyal-script names, one at a time. `/parse_function_call` is ours as well (vLLM has no such
route): it asks vLLM's tool parser for a finished text.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import uvicorn
import vllm.platforms
from fastapi import Request
from vllm.platforms.cpu import CpuPlatform

# The wheel of PyPI is built for CUDA and finds no device here; nothing is computed on any.
vllm.platforms._current_platform = CpuPlatform()

from vllm import AsyncEngineArgs  # noqa: E402
from vllm.config import ReasoningConfig, VllmConfig  # noqa: E402
from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args  # noqa: E402
from vllm.entrypoints.launchers.api_server.app_state import init_app_state  # noqa: E402
from vllm.entrypoints.launchers.app import build_app  # noqa: E402
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.tool_parsers import ToolParserManager  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402
from vllm.v1.engine.core_client import EngineCoreClient  # noqa: E402

from conformance.vocabulary import Vocabulary  # noqa: E402

PARSERS = {"v4.1": "deepseek_v41", "v4": "deepseek_v4"}
EOS = "<｜end▁of▁sentence｜>"
# No model is loaded; the arguments want the shape of some model.
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "vocab_size": 200_000,
    "max_position_embeddings": 100_000,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "error": FinishReason.ERROR,
}
# The request in whose context AsyncLLM hands over to the core; headers do not travel that far.
SCRIPT: contextvars.ContextVar[str] = contextvars.ContextVar("script", default="")


class Core:
    """Stands where the client of the engine core stands."""

    def __init__(self, scripts: dict[str, Any], tokenizer: Path) -> None:
        self._scripts = scripts
        self._vocabulary = Vocabulary(tokenizer)
        self._eos = self._vocabulary.encode(EOS)[0]
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._playing: dict[str, asyncio.Task[None]] = {}
        self.resources = type("Resources", (), {"engine_dead": False})()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        script = self._scripts.get(SCRIPT.get(), {"output": "ok"})
        name = request.request_id
        self._playing[name] = asyncio.create_task(self._play(name, script))

    async def abort_requests_async(self, names: list[str]) -> None:
        for name in names:
            if name in self._playing:
                self._playing.pop(name).cancel()

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def _play(self, name: str, script: dict[str, Any]) -> None:
        finish = script.get("finish", "stop")
        ids = script.get("token_ids") or self._vocabulary.encode(
            script.get("output", script.get("raw_output", "")), special="output" in script
        )
        if self._eos in ids:  # the core ends there, whatever the script says behind it
            ids, finish = ids[: ids.index(self._eos)], "stop"
        ids = [*ids, self._eos] if finish == "stop" else ids
        if finish == "error" or not ids:
            ids = [*ids, -1]  # the fault comes behind the tokens
        for number, token in enumerate(ids, 1):
            end = FINISH[finish] if number == len(ids) else None
            new = [token] if token >= 0 else []
            output = EngineCoreOutput(request_id=name, new_token_ids=new, finish_reason=end)
            self._outputs.put_nowait(EngineCoreOutputs(outputs=[output]))
            await asyncio.sleep(script.get("delay_ms", 0) / 1000)
        self._playing.pop(name, None)

    def shutdown(self, *_: Any, **__: Any) -> None:
        for task in self._playing.values():
            task.cancel()


def by_header(app: Any) -> Any:
    """Notes each request's script before vLLM's application runs it."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            SCRIPT.set(headers.get(b"x-bathyal-script", b"").decode())
        await app(scope, receive, send)

    return answer


def folder_for(tokenizer: Path) -> Path:
    """A model folder without weights, as vLLM's arguments want one."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_bytes(orjson.dumps(SHAPE))
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<｜begin▁of▁sentence｜>",
        "eos_token": EOS,
    }
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(settings))
    return folder


def parse_endpoint(engine: Any, name: str) -> Callable[[Request], Awaitable[dict[str, Any]]]:
    """SGLang's native route, answered by vLLM's tool parser."""

    async def parse(request: Request) -> dict[str, Any]:
        body = orjson.loads(await request.body())
        asked = ChatCompletionRequest(
            model="scripted", messages=[{"role": "user", "content": "q"}], tools=body["tools"]
        )
        tool_parser = ToolParserManager.get_tool_parser(name)
        parser = tool_parser(engine.renderer.tokenizer, asked.tools)
        found = parser.extract_tool_calls(body["text"], asked)
        names = [tool["function"]["name"] for tool in body["tools"]]
        calls = [
            {
                "tool_index": names.index(call.function.name)
                if call.function.name in names
                else -1,
                "name": call.function.name,
                "parameters": call.function.arguments,
            }
            for call in found.tool_calls
        ]
        return {"normal_text": found.content or "", "calls": calls}

    return parse


async def serve(scripts: dict[str, Any], tokenizer: Path, dialect: str, port: int) -> None:
    """Serves until it is told to end."""
    name = PARSERS[dialect]
    command = make_arg_parser(FlexibleArgumentParser())
    arguments = command.parse_args(
        [
            *("--model", str(folder_for(tokenizer)), "--served-model-name", "scripted"),
            *("--tokenizer-mode", name, "--tool-call-parser", name, "--reasoning-parser", name),
            "--enable-auto-tool-choice",
            *("--max-model-len", "100000", "--disable-log-stats"),
        ]
    )
    validate_parsed_serve_args(arguments)
    engine_arguments = AsyncEngineArgs.from_cli_args(arguments)
    config = VllmConfig(
        model_config=engine_arguments.create_model_config(),
        structured_outputs_config=engine_arguments.create_structured_outputs_config(),
        reasoning_config=ReasoningConfig(reasoning_parser=name),
    )
    arguments.structured_outputs_config = config.structured_outputs_config
    core = Core(scripts, tokenizer)
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: core)
    engine = AsyncLLM(config, executor_class=object, log_stats=False, log_requests=False)
    app = build_app(arguments, ("generate",), config.model_config)
    app.post("/parse_function_call")(parse_endpoint(engine, name))
    await init_app_state(engine, app.state, arguments, ("generate",))
    settings = uvicorn.Config(
        by_header(app), host="127.0.0.1", port=port, log_level="warning", lifespan="off"
    )
    app.state.server = uvicorn.Server(settings)
    await app.state.server.serve()


def main() -> None:
    parser = argparse.ArgumentParser(description="vLLM's HTTP front over scripted tokens")
    parser.add_argument("--scripts", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--dialect", choices=tuple(PARSERS), default="v4.1")
    parser.add_argument("--port", type=int, default=30200)
    arguments = parser.parse_args()
    lines = [orjson.loads(line) for line in arguments.scripts.read_bytes().split(b"\n") if line]
    scripts = {line["name"]: line for line in lines}
    asyncio.run(serve(scripts, arguments.tokenizer, arguments.dialect, arguments.port))


if __name__ == "__main__":
    main()
