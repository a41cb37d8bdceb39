"""The one importer of deepseek-recipe, the official codec.

Turns a checked body into prompt ids and options, and gives an exchange its ``Wire``: tokens or
text in, the wire JSON of the protocol out, unparsed. Knows nothing of tools' rules or of
transport. Pinned to 0.2.*; ``tests/parsers/test_codec_facts.py`` holds what is relied on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe
import orjson

from parsers.body import parse_object
from parsers.completions import Completion, open_completion
from parsers.culprit import culprit, function_of, named
from parsers.detokenize import Vocabulary
from parsers.dialects import DIALECTS, MARK_TEXT
from parsers.edits import Edits
from parsers.errors import (
    BootError,
    ClientError,
    CodecError,
    Protocol,
    prompt_error,
    room_error,
)
from parsers.exchange import Exchange
from parsers.opening import READERS, open_choices
from parsers.policy import Hold
from parsers.prompt_note import check_scoring
from parsers.reasoning import ReasoningStore
from parsers.request import Request, check_bias
from parsers.rules import PROFILES, Profile
from parsers.values import Constraint, Sampling, ServedModel
from parsers.wire import Chunks, Wire

_VERSIONS = {
    "v4": recipe.ModelVersion.DeepseekV4Pro,
    "v4.1": recipe.ModelVersion.DeepseekV41Flash,
}
_CHUNKS = Chunks(
    chunk=recipe.InferenceChunk,
    usage=recipe.PromptUsage,
    finish={
        "stop": recipe.InferenceFinishReason.Stop,
        "length": recipe.InferenceFinishReason.Length,
    },
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

_REQUESTS: dict[Protocol, Any] = {
    "chat": recipe.ChatCompletionRequest,
    "responses": recipe.ResponsesRequest,
    "messages": recipe.MessagesRequest,
}
_REPLIES = {
    "chat": recipe.ChatCompletionResponse,
    "responses": recipe.ResponsesResponse,
    "messages": recipe.MessagesResponse,
}
_IMAGE = "<｜image｜>"
_EFFORT_LINE = "Reasoning Effort: "
_TIER = 75  # what the codec writes into that line for the effort "high"


@dataclass(frozen=True, slots=True)
class Converted:
    """A request after the codec's conversion.

    Attributes:
        native: the codec's own object.
        parsing: how its stream processor is to read the output; ours to change.
        prompt_ids: the encoded prompt.
        thinking: whether the model thinks first.
        forced_later: a forced call has to be opened after the reasoning.
    """

    native: Any
    parsing: Any
    prompt_ids: tuple[int, ...]
    thinking: bool
    forced_later: bool

    @property
    def stream(self) -> bool:
        """Whether a stream is asked for."""
        return bool(self.native.stream)

    @property
    def constraint(self) -> Constraint | None:
        """What constrained decoding would enforce."""
        constraint = self.native.inference_options.output_constraint
        return None if constraint is None else Constraint(constraint.kind, constraint.schema)

    @property
    def images(self) -> tuple[str, ...]:
        """The images of the prompt as data URLs, in the order of their placeholders."""
        return tuple(
            source.data_url
            for message in self.native.conversation.messages
            for source in getattr(message, "image_sources", None) or ()
        )

    @property
    def late_tools(self) -> list[dict[str, Any]]:
        """All tools the prompt declares, in the form of Chat Completions.

        Among them those with names only the codec knows (namespaces) and those that a message of
        the history adds.
        """
        conversation = self.native.conversation
        tools = list(conversation.tools)
        for message in conversation.messages:
            tools += getattr(message, "tools", None) or []
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "parameters": tool.parameters,
                    "strict": tool.strict,
                },
            }
            for tool in tools
        ]


class Codec:
    """The codec bound to one served model, its tokenizer and a set of rules.

    Attributes:
        model: what is served.
        profile: the rules.
        vocabulary: the tokenizer's ids as bytes, and the ids of its markers.
        warnings: what the tokenizer lacks though no ordinary prompt needs it, in words.
    """

    def __init__(
        self, model: ServedModel, tokenizer: Any, vocabulary: Vocabulary, profile: Profile
    ) -> None:
        self.model = model
        self.profile = profile
        self.vocabulary = vocabulary
        self.warnings: tuple[str, ...] = ()
        self._tokenizer = tokenizer
        if model.version == "plain":
            return  # without a chat format there is nothing to convert: see check_chat
        encoding = (
            recipe.DeepseekV4Encoding if model.version == "v4" else recipe.DeepseekV41Encoding
        )
        self._encoding = encoding().with_tokenizer(tokenizer)
        missing = recipe.ReasoningContentBehavior
        self._options = (
            recipe.ConversionOptions()
            .with_model_versions_by_name({model.name: _VERSIONS[model.version]})
            .with_default_thinking_mode(profile.default_thinking)
            .with_reasoning_content_behavior(
                missing.Reject if profile.missing_reasoning == "reject" else missing.FillEmpty
            )
        )

    @classmethod
    def load(cls, model: ServedModel, profile: Profile = PROFILES["agent"]) -> Codec:
        """Load the tokenizer of a model and prove that it can carry the codec's prompts.

        A thinking prompt with tools and history and one without thinking are encoded; a reminder
        is tried and only reported in ``warnings``.

        Args:
            model: what is served.
            profile: the rules.

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
        codec = cls(model, tokenizer, Vocabulary.from_json(raw, model.tokenizer_path), profile)
        if model.version != "plain":
            codec._check_boot()
        return codec

    def check_chat(self) -> None:
        """Refuse chats to a model that has no chat format.

        Raises:
            ClientError: it has none.
        """
        if self.model.version == "plain":
            raise ClientError(
                f"{self.model.name!r} has no chat format here; expected a prompt as text or token"
                " ids on /v1/completions",
                code="chat_not_supported",
                param="model",
            )

    def open_exchange(
        self,
        protocol: Protocol,
        body: bytes,
        *,
        exchange_id: str,
        reasoning: ReasoningStore | None = None,
        stateful: bool = False,
        history: bytes | None = None,
        find_item: Callable[[str], bytes | None] | None = None,
    ) -> Exchange:
        """Open one request.

        Args:
            protocol: whose body it is.
            body: the request body as received.
            exchange_id: id of the reply, unique per request.
            reasoning: where missing reasoning is looked for and new reasoning is left; used only
                where the profile restores.
            stateful: the caller keeps a store of responses, so Responses bodies may ask for it.
            history: what the store holds of ``previous_response_id``: what ``Exchange.record``
                gave, or a JSON array of items.
            find_item: looks a stored output item up by its id; its JSON, or None.

        Returns:
            The exchange; of ``n`` choices the first, see ``Exchange.choices``.

        Raises:
            ClientError: the request cannot be served; nothing was generated.
            CodecError: the codec failed on a request that had passed every check.
        """
        self.check_chat()
        if self.profile.missing_reasoning != "restore":
            reasoning = None
        request = READERS[protocol](
            parse_object(body),
            self.model,
            self.profile,
            reasoning,
            stateful=stateful,
            history=history,
            find_item=find_item,
        )
        return open_choices(self, protocol, request, exchange_id, reasoning)

    def open_completion(self, body: bytes, *, exchange_id: str, created: int) -> Completion:
        """Open a body of ``/v1/completions``: a prompt as text or token ids, nothing parsed.

        Args:
            body: the request body as received.
            exchange_id: id of the reply.
            created: seconds since 1970, for the reply.

        Raises:
            ClientError: the request cannot be served.
        """
        return open_completion(
            body,
            self.model,
            self.vocabulary,
            self.tokenize,
            exchange_id=exchange_id,
            created=created,
        )

    def prompt_ids(self, protocol: Protocol, body: bytes) -> tuple[int, ...]:
        """Return the prompt of a request without opening it: for counting, exactly.

        Args:
            protocol: whose body it is; fields that only generation needs may be missing.
            body: the request body as received.

        Raises:
            ClientError: the request cannot be served.
        """
        self.check_chat()
        request = READERS[protocol](parse_object(body), self.model, self.profile, None)
        return self.convert(protocol, request).prompt_ids

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text in which spelled special tokens are special tokens."""
        return list(self._tokenizer.encode(text))

    def convert(self, protocol: Protocol, request: Request) -> Converted:
        """Convert and encode a checked request.

        Raises:
            ClientError: the codec refuses it, or a forced call cannot be served.
            CodecError: the prompt cannot be encoded.
        """
        native, later = self._settle_choice(protocol, request)
        conversation, parsing = native.conversation, native.parsing_options
        thinking = bool(conversation.thinking_mode)
        if self.profile.gate.hold is not Hold.NONE:
            parsing.parse_json_output = False  # see parsers.answer
        if protocol == "messages":
            conversation = self._completed(conversation, request)
            if request.prefill:
                stage = recipe.ThinkingInitialStage.ContentContinuation
                parsing.thinking_initial_stage = stage if thinking else None
        prompt_ids = self._encode(conversation)
        if request.effort is not None and thinking:
            prompt_ids = self._with_effort(prompt_ids, request.effort)
        choice = request.tool_choice
        if protocol == "messages" and choice.forced and choice.only is None and not thinking:
            # The codec takes "any" for "auto" (protocol.md 1.14): open the block as for "tool".
            prompt_ids += self.opener(None)
            parsing.starts_in_tool_calls = True
        return Converted(native, parsing, tuple(prompt_ids), thinking, later)

    def opener(self, tool: str | None, *, blank: str = "\n\n", bare: bool = False) -> list[int]:
        """Return the ids that open the block of calls after the reasoning, and a call of a tool.

        The ids of a call are those that begin it in a history: where the tokenizer has one token for
        the end of its tag and the beginning of the next, the last id is that token. Other ids of the
        same text would lead the model to a place that it was never trained at.

        Args:
            tool: whose call is opened; None for the block alone.
            blank: what stands before the block.
            bare: the tool takes nothing, so that the end of the call follows.
        """
        dialect = DIALECTS[self.model.version]
        if tool is None:
            return self.tokenize(f"{blank}{dialect.opening()}")
        opened = f"{blank}{dialect.opening()}{dialect.invoke(tool)}"
        following = f"{dialect.bare}</" if bare else "<"
        ids = self.tokenize(f"{opened}{following}{MARK_TEXT}")
        end, left = 0, len(opened.encode())
        while left > 0:
            left -= len(self.vocabulary.bytes_of(ids[end]) or b"")
            end += 1
        return ids[:end]

    def _settle_choice(self, protocol: Protocol, request: Request) -> tuple[Any, bool]:
        """Convert a request; a forced choice while thinking first of all as a free one."""
        body = request.body
        if not request.tool_choice.forced:
            return self._convert(body, protocol), False
        auto = {"type": "auto"} if protocol == "messages" else "auto"
        free = self._convert({**body, "tool_choice": auto}, protocol)
        if not free.conversation.thinking_mode:
            return self._convert(body, protocol), False
        if self.profile.forced_while_thinking == "reject":
            raise ClientError(
                "tool_choice: Thinking mode does not support this tool_choice; expected 'auto' or "
                "'none', or thinking to be disabled in the request",
                param="tool_choice",
            )
        return free, True

    def _completed(self, conversation: Any, request: Request) -> Any:
        """Add what the codec's Messages form cannot say: a prefill, a schema for the answer."""
        if not request.prefill and request.reply_format is None:
            return conversation
        messages = list(conversation.messages)
        if request.prefill:
            last = messages[-1]
            messages[-1] = recipe.AssistantMessage(
                last.content, last.reasoning_content, last.tool_calls, True
            )
        wanted = request.reply_format
        try:
            return recipe.Conversation(
                messages,
                thinking_mode=conversation.thinking_mode,
                tools=conversation.tools,
                tool_choice=conversation.tool_choice,
                reasoning_effort=conversation.reasoning_effort,
                response_schema=None if wanted is None else wanted.schema,
            )
        except ValueError as error:
            raise ClientError(str(error), param="output_config.format") from None

    def _with_effort(self, prompt_ids: list[int], effort: int) -> list[int]:
        """Put a number into the line that tells V4.1 how much to think."""
        codecs = self.tokenize(f"{_EFFORT_LINE}{_TIER}")
        at = 2  # after the ids of the beginning and of the system turn
        if prompt_ids[at : at + len(codecs)] != codecs:
            raise CodecError(f"the prompt does not begin with {_EFFORT_LINE!r}")
        ours = self.tokenize(f"{_EFFORT_LINE}{effort}")
        return [*prompt_ids[:at], *ours, *prompt_ids[at + len(codecs) :]]

    def _convert(self, body: Mapping[str, Any], protocol: Protocol = "chat") -> Any:
        request = self._parse(protocol, body)
        try:
            return request.convert(self._options)
        except recipe.ConversionError as error:
            message = orjson.loads(error.body)["error"]["message"]
            param = named(message, body)
            if param is None and (
                param := self._strict_tool(protocol, body) or self._culprit(protocol, body)
            ):
                message = f"{param}: {message}"
            raise ClientError(message, status=error.status_code, param=param) from None

    def _strict_tool(self, protocol: Protocol, body: Mapping[str, Any]) -> str | None:
        """Name the tool whose strict schema the codec refuses; it does not say which."""
        asked = {"model": self.model.name, "messages": [{"role": "user", "content": "q"}]}
        if protocol == "responses":
            asked = {"model": self.model.name, "input": "q"}
        for i, tool in enumerate(body.get("tools", ())):
            if function_of(tool).get("strict") is True:
                try:
                    self._parse(protocol, {**asked, "tools": [tool]}).convert(self._options)
                except recipe.ConversionError:
                    return f"tools[{i}]"
        return None

    def _parse(self, protocol: Protocol, body: Mapping[str, Any]) -> Any:
        try:
            return _REQUESTS[protocol](orjson.dumps(body))
        except orjson.JSONEncodeError:  # it writes fewer levels than it reads
            raise ClientError("request body: nesting is too deep") from None
        except ValueError as error:
            param = self._culprit(protocol, body)
            message = f"{param}: {error}" if param else str(error)
            raise ClientError(message, param=param) from None

    def _culprit(self, protocol: Protocol, body: Mapping[str, Any]) -> str | None:
        """Find the part of a body that the codec refuses without naming it."""

        def reads(smaller: Any) -> bool:
            try:
                _REQUESTS[protocol](orjson.dumps(smaller)).convert(self._options)
            except (recipe.ConversionError, ValueError):
                return False
            return True

        return culprit(body, len(orjson.dumps(body)), reads)

    def _encode(self, conversation: Any) -> list[int]:
        try:
            return list(self._encoding.encode(conversation))
        except RuntimeError as error:
            raise CodecError(f"the prompt cannot be encoded: {error}") from error

    def sampling(self, protocol: Protocol, request: Request, converted: Converted) -> Sampling:
        """Settle how to generate.

        Raises:
            ClientError: prompt and reply do not fit the context, or a token is biased that the
                model does not have.
        """
        check_bias(request.moves, self.model, self.vocabulary)
        check_scoring(request.scoring, len(converted.prompt_ids))
        limit, prompt_tokens = self.model.max_model_len, len(converted.prompt_ids)
        options = converted.native.inference_options
        if prompt_tokens >= limit:
            raise prompt_error(protocol, prompt_tokens, limit)
        try:
            max_tokens = converted.native.resolve_max_tokens(prompt_tokens, limit)
        except recipe.ConversionError as error:
            message = orjson.loads(error.body)["error"]["message"]
            asked = request.body.get("max_tokens", 0)
            raise room_error(protocol, prompt_tokens, limit, asked, message) from None
        # The codec's numbers are f32: rounded, so that 0.95 does not read 0.949999988079071.
        temperature, top_p = round(options.temperature, 6), round(options.top_p, 6)
        if self.profile.sampling == "client":  # the codec forces 1.0 while thinking
            temperature = temperature if request.temperature is None else request.temperature
            top_p = top_p if request.top_p is None else request.top_p
        return Sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=options.seed,
            top_logprobs=(options.top_logprobs or 0) if options.logprobs else None,
            moves=request.moves,
            scoring=request.scoring,
        )

    def wire(
        self,
        protocol: Protocol,
        request: Request,
        converted: Converted,
        exchange_id: str,
        *,
        edits: Edits | None,
        keep_reasoning: bool,
    ) -> Wire:
        """Give a reply its way through the codec."""
        native = converted.native
        if edits is not None and edits.stand_ins:
            # Which calls are custom or searches, the codec decides by the declared tools; the
            # prompt declares them as functions, so the writer gets declarations of its own.
            declared = {**request.body, "tools": edits.stand_ins, "tool_choice": "auto"}
            native = self._convert(declared, protocol)
        generator = _REQUESTS[protocol].chunk_generator(native, exchange_id, request.model)
        if protocol == "responses":
            body = self._parse(protocol, request.body)
            names, echo = body.namespace_tool_map(self._options), body.echo()
            generator = generator.with_echo(echo).with_namespace_tool_map(names)
        elif protocol == "messages" and request.prefill:
            # The reply goes on with the answer: no block of thinking, not even an empty one.
            generator = recipe.MessagesChunkGenerator(exchange_id, request.model, False)
        processor = recipe.StreamProcessor(generator, converted.parsing, self._tokenizer)
        return Wire(
            processor,
            _CHUNKS,
            _REPLIES[protocol],
            self.vocabulary,
            request_id=exchange_id,
            model=request.model,
            whole=not converted.stream,
            edits=edits,
            thinking=keep_reasoning,
            inputs=protocol == "messages" and bool(request.tools),
        )

    def _check_boot(self) -> None:
        path, ids = self.model.tokenizer_path, self.model.eos_token_ids
        if not ids:
            raise BootError(f"{self.model.name}: eos_token_ids is empty, no turn could ever end")
        for id_ in ids:
            if self.vocabulary.bytes_of(id_) is None:
                raise BootError(f"{path}: has no token with the EOS id {id_}")
        if self.model.has_vision and _IMAGE not in self.vocabulary.added:
            raise BootError(f"{path}: has no token {_IMAGE}, which an image stands for in a prompt")
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
