"""The one importer of deepseek-recipe, the official codec.

Turns a checked body into prompt ids and options, and gives an exchange its ``Wire``: tokens or
text in, the wire JSON of the protocol out, unparsed. Knows nothing of tools' rules or of
transport. Pinned to 0.2.*; ``tests/parsers/test_codec_facts.py`` holds what is relied on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import deepseek_recipe as recipe
import orjson

from parsers.body import parse_object
from parsers.chat import ChatRequest, read_chat
from parsers.detokenize import Vocabulary
from parsers.dialects import DIALECTS
from parsers.errors import BootError, ClientError, CodecError, Protocol
from parsers.exchange import Exchange
from parsers.invoke import Finish
from parsers.pipeline import Pipeline
from parsers.policy import GatePolicy, Hold
from parsers.toolset import ToolSet
from parsers.values import Constraint, Sampling, ServedModel

TokenLogprob = tuple[float, Sequence[tuple[int, float]]]
"""Natural-log probability of a token, and (id, logprob) of its rivals."""

_VERSIONS = {
    "v4": recipe.ModelVersion.DeepseekV4Pro,
    "v4.1": recipe.ModelVersion.DeepseekV41Flash,
}
_FINISH = {
    "stop": recipe.InferenceFinishReason.Stop,
    "length": recipe.InferenceFinishReason.Length,
}
_CREATED = re.compile(r'"created":(\d+)')
# The codec names a field in quotes, as "Invalid x value" or not at all.
_QUOTED_PATH = re.compile(r"'((?:messages|tools|stop|input)\[\d+\][^']*)'")
_INVALID_VALUE = re.compile(r"Invalid (\w+)(?: and \w+)? value")
_BAD_SCHEMA = re.compile(r"Invalid schema for function '([^']*)'")
_PARAM_BY_WORDS = (
    ("response_format", "response_format"),
    ("Invalid json schema", "response_format.json_schema.schema"),
    ("tool_choice", "tool_choice"),
    ("Stop string", "stop"),
    ("prefix", "messages"),
    ("max_tokens", "max_tokens"),
)
_BOOT_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
_BOOT_CALL = {
    "id": "call_00_probe",
    "type": "function",
    "function": {"name": "probe", "arguments": '{"x": 1}'},
}
_BOOT_MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [_BOOT_CALL]},
    {"role": "tool", "tool_call_id": "call_00_probe", "content": "t"},
]

_DEFAULT = GatePolicy()


class Wire:
    """One reply on its way through the codec: a stream processor and, for a whole reply, its sum.

    Args:
        processor: the codec's, fresh.
        response: the codec's response class for the protocol.
        vocabulary: of the model.
        request_id: id of the reply.
        model: name the reply carries.
        whole: accumulate a body instead of giving out JSON.
    """

    def __init__(
        self,
        processor: Any,
        response: Any,
        vocabulary: Vocabulary,
        *,
        request_id: str,
        model: str,
        whole: bool,
    ) -> None:
        self._processor = processor
        self._vocabulary = vocabulary
        self._response = response
        self._id = request_id
        self._model = model
        self._whole = whole
        self._sum: Any = None

    @property
    def finished(self) -> bool:
        """Whether the codec has written its last chunk (a stop sequence ends a reply early)."""
        return bool(self._processor.finished)

    def ready(self, prompt_tokens: int, cached_tokens: int) -> list[str]:
        """Open the reply; returns the JSON of its first chunk."""
        usage = recipe.PromptUsage(
            prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=cached_tokens
        )
        return self._push(recipe.InferenceChunk.ready(prompt_usage=usage))

    def tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None
    ) -> list[str]:
        """Push model tokens as they are; only real special tokens act as markers.

        The codec keeps all of a push that ends in half a character, and drops it all should the
        output end there. So the halves at the end are pushed one by one, after the rest.
        """
        end = len(token_ids)
        while end and self._vocabulary.text_of(token_ids[end - 1]) is None:
            end -= 1
        if end in (0, len(token_ids)) and len(token_ids) - end < 2:
            return self._push(recipe.InferenceChunk.tokens(token_ids, logprobs))
        out = self.tokens(token_ids[:end], logprobs and logprobs[:end]) if end else []
        for i in range(end, len(token_ids)):
            if not self.finished:
                out += self.tokens(token_ids[i : i + 1], logprobs and logprobs[i : i + 1])
        return out

    def text(self, text: str, count: int = 0) -> list[str]:
        """Push text, in which spelled markers act as markers; it counts as ``count`` tokens."""
        return self._push(recipe.InferenceChunk.text(text, count))

    def finish(self, finish: Finish) -> list[str]:
        """Push the finish reason and flush; returns the last chunks."""
        out = self._push(recipe.InferenceChunk.finish(_FINISH[finish]))
        return out + self._render(self._processor.finish())

    def abandon(self) -> None:
        """Release the codec's state without the claim of success that ``finish`` makes."""
        self._processor.close()

    def body(self) -> str:
        """Return the JSON of the whole reply."""
        return str(self._sum.to_json())

    def _push(self, chunk: Any) -> list[str]:
        try:
            chunks = self._processor.push(chunk)
        except RuntimeError as error:
            raise CodecError(f"the codec refused a {chunk.kind} chunk: {error}") from error
        return self._render(chunks) if chunks else []

    def _render(self, chunks: list[Any]) -> list[str]:
        if not self._whole:
            return [chunk.to_json() for chunk in chunks]
        for chunk in chunks:
            if self._sum is None:
                # The codec stamps chunks with its own clock and takes the sum's from the caller:
                # they have to agree. Usage is overwritten by the last chunk.
                stamp = _CREATED.search(chunk.to_json())
                created = int(stamp.group(1)) if stamp else 0
                self._sum = self._response(self._id, self._model, created, 0, 0)
            self._sum.accumulate(chunk)
        return []


class Codec:
    """The codec bound to one served model and its tokenizer.

    Attributes:
        model: what is served.
        policy: what the gate does with a model's faults.
        vocabulary: the tokenizer's ids as bytes, and the ids of its markers.
        warnings: what the tokenizer lacks though no ordinary prompt needs it, in words.
    """

    def __init__(
        self, model: ServedModel, tokenizer: Any, vocabulary: Vocabulary, policy: GatePolicy
    ) -> None:
        self.model = model
        self.policy = policy
        self.vocabulary = vocabulary
        self.warnings: tuple[str, ...] = ()
        self._tokenizer = tokenizer
        encoding = (
            recipe.DeepseekV4Encoding if model.version == "v4" else recipe.DeepseekV41Encoding
        )
        self._encoding = encoding().with_tokenizer(tokenizer)
        self._options = recipe.ConversionOptions().with_model_versions_by_name(
            {model.name: _VERSIONS[model.version]}
        )

    @classmethod
    def load(cls, model: ServedModel, policy: GatePolicy = _DEFAULT) -> Codec:
        """Load the tokenizer of a model and prove that it can carry the codec's prompts.

        A thinking prompt with tools and history and one without thinking are encoded; a reminder
        is tried and only reported in ``warnings``.

        Args:
            model: what is served.
            policy: what the gate does with a model's faults.

        Raises:
            BootError: the file cannot be read, is no byte-level tokenizer, or lacks a special
                token; the message names it.
        """
        try:
            with open(model.tokenizer_path, "rb") as file:
                raw = file.read()
            tokenizer = recipe.Tokenizer.from_str(raw.decode())
        except (OSError, ValueError, RuntimeError) as error:
            raise BootError(f"{model.tokenizer_path}: cannot be loaded: {error}") from error
        codec = cls(model, tokenizer, Vocabulary.from_json(raw, model.tokenizer_path), policy)
        codec._check_boot()
        return codec

    def open_exchange(self, protocol: Protocol, body: bytes, *, exchange_id: str) -> Exchange:
        """Open one request.

        Args:
            protocol: whose body it is.
            body: the request body as received.
            exchange_id: id of the reply, unique per request.

        Raises:
            ClientError: the request cannot be served; nothing was generated.
            CodecError: the codec failed on a request that had passed every check.
        """
        request = read_chat(parse_object(body), self.model)
        converted = self._convert(request.body)
        prompt_ids = tuple(self._encode(converted.conversation))
        sampling = self._sampling(request, converted, len(prompt_ids))
        gated = bool(request.tools) and self.policy.hold is not Hold.NONE
        parsing = converted.parsing_options
        forced = bool(parsing.starts_in_tool_calls)
        if gated:
            # The stitcher opens the block itself, for a first call that may be delivered. So prose
            # in place of a forced call is an answer, where the codec alone would lose it.
            parsing.starts_in_tool_calls = False
        wire = self._wire(converted, parsing, exchange_id, request.model)
        return Exchange(
            protocol=protocol,
            wire=wire,
            pipeline=self._pipeline(request, wire, parsing, forced=forced) if gated else None,
            prompt_ids=prompt_ids,
            sampling=sampling,
            constraint=_constraint(converted),
            stream=bool(converted.stream),
            model=request.model,
            ignored=request.ignored,
            eos_token_ids=self.model.eos_token_ids,
            stepwise=bool(parsing.stop_sequences) or not request.parallel_calls,
        )

    def _convert(self, body: dict[str, Any]) -> Any:
        try:
            request = recipe.ChatCompletionRequest(orjson.dumps(body))
        except orjson.JSONEncodeError:  # it writes fewer levels than it reads
            raise ClientError("request body: nesting is too deep") from None
        except ValueError as error:
            raise ClientError(str(error)) from None
        try:
            return request.convert(self._options)
        except recipe.ConversionError as error:
            message = orjson.loads(error.body)["error"]["message"]
            raise ClientError(
                message, status=error.status_code, param=_param(message, body)
            ) from None

    def _encode(self, conversation: Any) -> list[int]:
        try:
            return list(self._encoding.encode(conversation))
        except RuntimeError as error:
            raise CodecError(f"the prompt cannot be encoded: {error}") from error

    def _sampling(self, request: ChatRequest, converted: Any, prompt_tokens: int) -> Sampling:
        limit = self.model.max_model_len
        options = converted.inference_options
        if prompt_tokens >= limit:
            raise ClientError(
                f"the prompt has {prompt_tokens} tokens and the context of {self.model.name!r} "
                f"holds {limit}: no room for a reply",
                code="context_length_exceeded",
                param="messages",
            )
        try:
            max_tokens = converted.resolve_max_tokens(prompt_tokens, limit)
        except recipe.ConversionError as error:
            message = orjson.loads(error.body)["error"]["message"]
            raise ClientError(message, code="context_length_exceeded", param="max_tokens") from None
        # Issue 2: the client's value where it sent one; the codec forces 1.0 while thinking.
        # Its numbers are f32: rounded, so that 0.95 does not read 0.949999988079071.
        temperature, top_p = request.temperature, request.top_p
        return Sampling(
            max_tokens=max_tokens,
            temperature=round(options.temperature, 6) if temperature is None else temperature,
            top_p=round(options.top_p, 6) if top_p is None else top_p,
            seed=options.seed,
            top_logprobs=(options.top_logprobs or 0) if options.logprobs else None,
        )

    def _pipeline(
        self, request: ChatRequest, wire: Wire, parsing: Any, *, forced: bool
    ) -> Pipeline:
        stage = parsing.thinking_initial_stage
        policy = self.policy
        if not request.parallel_calls:
            policy = replace(policy, parallel_calls=False)
        return Pipeline(
            wire,
            vocabulary=self.vocabulary,
            dialect=DIALECTS[self.model.version],
            tools=ToolSet(request.tools),
            policy=policy,
            choice=request.tool_choice,
            reasoning=stage is not None and stage.starts_in_reasoning(),
            forced=forced,
        )

    def _wire(self, converted: Any, parsing: Any, exchange_id: str, model: str) -> Wire:
        generator = recipe.ChatCompletionRequest.chunk_generator(converted, exchange_id, model)
        processor = recipe.StreamProcessor(generator, parsing, self._tokenizer)
        return Wire(
            processor,
            recipe.ChatCompletionResponse,
            self.vocabulary,
            request_id=exchange_id,
            model=model,
            whole=not converted.stream,
        )

    def _check_boot(self) -> None:
        path, ids = self.model.tokenizer_path, self.model.eos_token_ids
        if not ids:
            raise BootError(f"{self.model.name}: eos_token_ids is empty, no turn could ever end")
        for id_ in ids:
            if self.vocabulary.bytes_of(id_) is None:
                raise BootError(f"{path}: has no token with the EOS id {id_}")
        thinking = {"messages": _BOOT_MESSAGES, "tools": [_BOOT_TOOL]}
        plain = {"messages": _BOOT_MESSAGES[:2], "thinking": {"type": "disabled"}}
        for body in (thinking, plain):
            self._boot_encode(body)
        try:
            self._boot_encode({"messages": [{"role": "latest_reminder", "content": "r"}]})
        except BootError as error:
            self.warnings = (f"latest_reminder messages cannot be served: {error}",)

    def _boot_encode(self, body: dict[str, Any]) -> None:
        converted = self._convert({"model": self.model.name, **body})
        try:
            self._encoding.encode(converted.conversation)
        except RuntimeError as error:
            raise BootError(f"{self.model.tokenizer_path}: {error}") from error


def _constraint(converted: Any) -> Constraint | None:
    constraint = converted.inference_options.output_constraint
    return None if constraint is None else Constraint(constraint.kind, constraint.schema)


def _param(message: str, body: dict[str, Any]) -> str | None:
    """Guess the field that a codec message speaks of; None where it names none."""
    if path := _QUOTED_PATH.search(message):
        return path.group(1)
    if value := _INVALID_VALUE.search(message):
        return value.group(1)
    if schema := _BAD_SCHEMA.search(message):
        names = [tool["function"]["name"] for tool in body.get("tools", [])]
        if schema.group(1) in names:
            return f"tools[{names.index(schema.group(1))}].function.parameters"
    for words, param in _PARAM_BY_WORDS:
        if words in message:
            return param
    return None
