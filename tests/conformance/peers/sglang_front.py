"""SGLang's own HTTP front over scripted tokens, without a scheduler, a model or a GPU.

    PYTHONPATH=. python tests/conformance/peers/sglang_front.py \
        --scripts FILE --tokenizer tokenizer.json --dialect v4.1 --port 30100

Run by the Python of an environment with sglang (0.5.23 tried) and its imports; docs/conformance.md
says how it was made. Routes, request models, chat and Messages handlers, deepseek-recipe glue and
parsers are SGLang's as installed. What is ours is the object in the place of its TokenizerManager:
it yields the token ids of the script that the header x-bathyal-script names, one at a time, in the
form in which that class yields them (cumulative text and ids, `meta_info`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import uvicorn
from fastapi import BackgroundTasks, HTTPException
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.runtime_context import get_context, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from transformers import PreTrainedTokenizerFast

from conformance.vocabulary import Vocabulary

PARSERS = {"v4.1": ("deepseekv41", "deepseek-v41"), "v4": ("deepseekv4", "deepseek-v4")}
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 1_000_000,
}
ARCHITECTURES = {
    "v4.1": ("DeepseekV41ForCausalLM", "deepseek_v41"),
    "v4": ("DeepseekV4ForCausalLM", "deepseek_v4"),
}


class Manager:
    """Stands where the TokenizerManager stands: requests in, cumulative outputs out."""

    def __init__(self, scripts: dict[str, Any], tokenizer: Path, dialect: str, args: Any) -> None:
        architecture, kind = ARCHITECTURES[dialect]
        self._scripts = scripts
        self._vocabulary = Vocabulary(tokenizer)
        self._numbers = itertools.count(1)
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(tokenizer), eos_token="<｜end▁of▁sentence｜>"
        )
        self.server_args = args
        self.served_model_name = self.model_path = "scripted"
        self.rid_to_state: dict[str, Any] = {}
        self.request_logger = SimpleNamespace(log_requests=False, log_requests_level=0)
        self.model_config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=[architecture], model_type=kind),
            is_multimodal=False,
            is_generation=True,
            context_len=1_000_000,
            get_default_sampling_params=dict,
        )

    def config_value(self, name: str) -> Any:
        return get_context().config_leaf(name)

    def create_abort_task(self, _: Any) -> BackgroundTasks:
        return BackgroundTasks()

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """Yields one dict per token where a stream is asked for, else the last one only.

        Raises:
            ValueError: from SGLang's own checks of a request; its handlers make a 400 of it.
            HTTPException: for a script that is a fault, where no stream is asked for.
        """
        obj.normalize_batch_and_arguments()
        asked = dict(obj.sampling_params if obj.is_single else obj.sampling_params[0])
        asked.pop("n", None)
        sampling = SamplingParams(**asked)
        sampling.normalize(self.tokenizer)
        sampling.verify(len(self.tokenizer))
        name = request.headers.get("x-bathyal-script", "") if request is not None else ""
        script = self._scripts.get(name, {"output": "ok"})
        count = 1 if obj.is_single else obj.parallel_sample_num
        prompt = obj.input_ids if obj.is_single else obj.input_ids[0]
        wholes = []
        for index in range(count):
            for output in self._outputs(script, sampling, len(prompt or ()), index):
                if obj.stream:
                    yield output
                    await asyncio.sleep(script.get("delay_ms", 0) / 1000)
            wholes.append(output)
            reason = output["meta_info"]["finish_reason"]
            if not obj.stream and reason["type"] == "abort":
                raise HTTPException(status_code=reason["status_code"], detail=reason["message"])
        if not obj.stream:
            yield wholes[0] if obj.is_single else wholes

    def _outputs(
        self, script: dict[str, Any], sampling: Any, prompt_tokens: int, index: int
    ) -> Iterator[dict[str, Any]]:
        """What the class yields for one choice: the stop token and stop texts as its scheduler."""
        ids = script.get("token_ids") or self._vocabulary.encode(
            script.get("output", script.get("raw_output", "")), special="output" in script
        )
        finish = script.get("finish", "stop")
        eos = self.tokenizer.eos_token_id
        if eos in ids:  # the scheduler ends there, whatever the script says behind it
            ids, finish = ids[: ids.index(eos)], "stop"
        ends: dict[str, dict[str, Any]] = {
            "stop": {"type": "stop", "matched": eos},
            "length": {"type": "length", "length": len(ids)},
            "error": {
                "type": "abort",
                "message": "the scripted engine failed",
                "status_code": HTTPStatus.INTERNAL_SERVER_ERROR,
            },
        }
        rid = f"rid-{next(self._numbers)}"
        total = len(ids) + (finish == "stop")
        for number in range(1, max(total, 1) + 1):
            text = self.tokenizer.decode(ids[:number], skip_special_tokens=False)
            matched = next((stop for stop in sampling.stop_strs if stop in text), None)
            end = {"type": "stop", "matched": matched} if matched else None
            if end is not None:
                text = text[: text.find(str(matched))]
            elif number >= total:
                end = ends[finish]
            meta = {
                "id": rid,
                "prompt_tokens": prompt_tokens,
                "completion_tokens": min(number, total),
                "cached_tokens": 0,
                "reasoning_tokens": 0,
                "weight_version": "default",
                "finish_reason": end,
            }
            shown = ids[:number] if number <= len(ids) else [*ids, eos]
            yield {"text": text, "output_ids": shown, "meta_info": meta, "index": index}
            if end is not None:
                return


def application(scripts: dict[str, Any], tokenizer: Path, dialect: str) -> Any:
    """SGLang's FastAPI application with its handlers made as its own lifespan makes them."""
    tool_parser, reasoning_parser = PARSERS[dialect]
    # No model is loaded; the arguments want the shape of some model, and the parsers' names alone
    # choose the encoding.
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_bytes(orjson.dumps(SHAPE))
    arguments = ServerArgs(
        model_path=str(folder),
        served_model_name="scripted",
        tool_call_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        device="cpu",
        skip_server_warmup=True,
    )
    publish(arguments, role="tokenizer")
    manager: Any = Manager(scripts, tokenizer, dialect, arguments)
    templates = TemplateManager()
    http_server.set_global_state(http_server._GlobalState(manager, templates, {}))
    app = http_server.app
    chat = OpenAIServingChat(manager, templates)
    app.state.openai_serving_chat = chat
    app.state.anthropic_serving = AnthropicServing(chat)
    app.state.openai_serving_responses = OpenAIServingResponses(
        manager, templates, enable_prompt_tokens_details=True
    )
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="SGLang's HTTP front over scripted tokens")
    parser.add_argument("--scripts", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--dialect", choices=tuple(PARSERS), default="v4.1")
    parser.add_argument("--port", type=int, default=30100)
    arguments = parser.parse_args()
    lines = [orjson.loads(line) for line in arguments.scripts.read_bytes().split(b"\n") if line]
    scripts = {line["name"]: line for line in lines}
    app = application(scripts, arguments.tokenizer, arguments.dialect)
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning", lifespan="off")


if __name__ == "__main__":
    main()
