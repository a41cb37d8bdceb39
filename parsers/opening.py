"""Opens an exchange for a checked request: reader, gate and wire are put together here.

Knows which part needs which; each knows its own work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from parsers.answer import AnswerPipeline
from parsers.body import Body
from parsers.chat import read_chat
from parsers.dialects import DIALECTS, THINK_END_TEXT
from parsers.edits import SEARCH, ChatEdits, Edits, ResponsesEdits
from parsers.errors import Protocol
from parsers.exchange import Exchange, Forced
from parsers.frames import Tally, frames_for
from parsers.messages import read_messages_request
from parsers.pipeline import Pipeline
from parsers.policy import Hold
from parsers.reasoning import ReasoningStore
from parsers.request import Request
from parsers.responses import read_responses
from parsers.rules import Profile
from parsers.stitch import Stitch
from parsers.toolset import ToolSet
from parsers.values import ServedModel

if TYPE_CHECKING:
    from parsers.codec import Codec, Converted
    from parsers.wire import Wire


def _read_chat(
    raw: Body, served: ServedModel, profile: Profile, store: ReasoningStore | None, **_state: Any
) -> Request:
    return read_chat(raw, served, profile, store)


def _read_messages(
    raw: Body, served: ServedModel, profile: Profile, store: ReasoningStore | None, **_state: Any
) -> Request:
    return read_messages_request(raw, served, profile, store)


READERS: Mapping[Protocol, Callable[..., Request]] = {
    "chat": _read_chat,
    "messages": _read_messages,
    "responses": read_responses,
}
"""The reader of each protocol; only that of Responses asks for a store."""


def open_choices(
    codec: Codec,
    protocol: Protocol,
    request: Request,
    exchange_id: str,
    reasoning: ReasoningStore | None,
) -> Exchange:
    """Open the exchanges of a request, one per choice, over one prompt.

    Args:
        codec: bound to the served model.
        protocol: whose request it is.
        request: checked.
        exchange_id: id of the reply.
        reasoning: where new reasoning is left.

    Returns:
        The first of them; it knows the others.
    """
    converted = codec.convert(protocol, request)
    known = {tool["function"]["name"] for tool in request.tools}
    late = [t for t in converted.late_tools if t["function"]["name"] not in known]
    opening = _Opening(codec, protocol, request, exchange_id, converted)
    tools = ToolSet([*request.tools, *late])
    tally = Tally(request.n) if request.n > 1 and converted.stream else None
    choices = tuple(opening.exchange(tools, i, tally, reasoning) for i in range(request.n))
    for choice in choices:
        choice.choices = choices
    return choices[0]


class _Opening:
    def __init__(
        self,
        codec: Codec,
        protocol: Protocol,
        request: Request,
        exchange_id: str,
        converted: Converted,
    ) -> None:
        self.codec = codec
        self.protocol = protocol
        self.request = request
        self.exchange_id = exchange_id
        self.converted = converted
        self.sampling = codec.sampling(protocol, request, converted)
        self.opened = bool(converted.parsing.starts_in_tool_calls)

    def exchange(
        self, tools: ToolSet, index: int, tally: Tally | None, reasoning: ReasoningStore | None
    ) -> Exchange:
        codec, request, parsing = self.codec, self.request, self.converted.parsing
        gated = codec.profile.gate.hold is not Hold.NONE
        if gated and tools:
            # The stitcher opens the block itself, for a first call that may be delivered. So prose
            # in place of a forced call is an answer, where the codec alone would lose it.
            parsing.starts_in_tool_calls = False
        edits = _edits(self.protocol, request)
        keep = reasoning is not None and self.converted.thinking and bool(tools)
        wire = codec.wire(
            self.protocol,
            request,
            self.converted,
            self.exchange_id,
            edits=edits,
            keep_reasoning=keep,
        )
        return Exchange(
            protocol=self.protocol,
            wire=wire,
            frames=frames_for(
                self.protocol,
                self.exchange_id,
                index=index,
                tally=tally,
                flat=codec.profile.error_body == "flat",
                continuous=request.continuous,
            ),
            continuous=request.continuous,
            pipeline=self._pipeline(wire, tools, edits) if gated else None,
            prompt_ids=self.converted.prompt_ids,
            sampling=self.sampling,
            vocabulary=codec.vocabulary,
            constraint=self.converted.constraint,
            stream=self.converted.stream,
            model=request.model,
            ignored=request.ignored,
            images=self.converted.images,
            eos_token_ids=codec.model.eos_token_ids,
            stepwise=bool(parsing.stop_sequences) or not request.parallel_calls,
            forced=self._forced(),
            stored=request.stored,
            reasoning=reasoning if keep else None,
        )

    def _pipeline(
        self, wire: Wire, tools: ToolSet, edits: Edits | None
    ) -> Pipeline | AnswerPipeline | None:
        codec, request = self.codec, self.request
        if not tools and request.reply_format is None:
            return None
        policy = codec.profile.gate
        if not request.parallel_calls:
            policy = replace(policy, parallel_calls=False)
        stage = self.converted.parsing.thinking_initial_stage
        reasoning = stage is not None and stage.starts_in_reasoning()
        aliases = None if edits is None else edits.aliases
        names = None if edits is None else edits.names
        stitch = Stitch(
            wire, codec.vocabulary, DIALECTS[codec.model.version], aliases=aliases, names=names
        )
        if not tools:
            assert request.reply_format is not None
            return AnswerPipeline(
                codec.vocabulary, request.reply_format, policy, stitch, reasoning=reasoning
            )
        return Pipeline(
            wire,
            stitch,
            vocabulary=codec.vocabulary,
            tools=tools,
            policy=policy,
            choice=request.tool_choice,
            reasoning=reasoning,
            forced=self.opened,
            wanted=request.reply_format,
        )

    def _forced(self) -> Forced | None:
        gated = self.codec.profile.gate.hold is not Hold.NONE
        later, retries = self.converted.forced_later, self.codec.profile.unmet_choice == "retry"
        if not gated or not (later or (retries and self.opened)):
            return None
        prompt_ids, only = self.converted.prompt_ids, self.request.tool_choice.only
        if not later:
            prompt_ids = prompt_ids[: -len(self.codec.opener(None))]
        functions = (tool["function"] for tool in self.request.tools)
        bare = any(f["name"] == only and _takes_nothing(f.get("parameters")) for f in functions)
        return Forced(
            think_end=self.codec.vocabulary.special(THINK_END_TEXT),
            opener=tuple(self.codec.opener(only, bare=bare)),
            shown=tuple(self.codec.opener(only, blank="", bare=bare)),
            named=only is not None,
            later=later,
            prompt_ids=prompt_ids,
            retries=retries,
        )


_PLAIN_WORDS = frozenset(
    {"$schema", "additionalProperties", "description", "properties", "required", "title", "type"}
)
"""Words of a schema beside which `properties` alone says what there is."""


def _takes_nothing(parameters: Any) -> bool:
    """Whether a function says that it has no parameter, as far as its schema's own words tell.

    It does by having no schema, or one whose `properties` are none and that neither asks for any
    nor speaks of further ones.
    """
    if not isinstance(parameters, dict):
        return parameters is None
    further = parameters.get("additionalProperties", False) is not False
    has_any = parameters.get("properties") != {} or bool(parameters.get("required"))
    return not further and not has_any and parameters.keys() <= _PLAIN_WORDS


def _edits(protocol: Protocol, request: Request) -> Edits | None:
    if protocol == "chat" and request.customs:
        return ChatEdits(request.customs)
    if protocol != "responses":
        return None
    names = [tool["function"]["name"] for tool in request.tools]
    searches = request.searches
    if not (request.customs or searches or request.summary or request.echo):
        return None
    return ResponsesEdits(
        request.customs,
        names,
        searches=searches and SEARCH in names,
        summary=request.summary,
        echo=request.echo,
    )
