"""What every protocol's request comes down to, and the checks they share.

Knows bodies and the served model; knows neither the codec nor tokens. The three readers
(``chat``, ``messages``, ``responses``) check a body, make the changes their protocol's rules ask
for, and return a ``Request``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parsers.body import (
    Body,
    describe,
    fail,
    integer,
    is_int,
    is_number,
    kind,
    number,
    require,
    written,
)
from parsers.detokenize import Vocabulary
from parsers.errors import ClientError
from parsers.schemas import check_size
from parsers.values import NO_MOVES, LogitMoves, PromptScoring, ReplyFormat, ServedModel, ToolChoice

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")

SAMPLING = {
    "temperature": number(0, 2),
    "top_p": ((lambda v: is_number(v) and 0 < v <= 1), "a number in (0, 1]"),
}
MOST_BIASES = 4096
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def _is_bias(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MOST_BIASES
        and all(_TOKEN_ID.fullmatch(key) for key in value)
        and all(is_number(number_) and -100 <= number_ <= 100 for number_ in value.values())
    )


MOVES = {
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": (
        _is_bias,
        f"an object of at most {MOST_BIASES} token ids with numbers in [-100, 100]",
    ),
}
"""Fields that move logits, in Chat and Completions; the other protocols have none."""
TOKEN_LIMIT = integer(1, 2**32 - 1)
FLAG = kind(bool, "true or false")

INPUT_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of a custom tool as a function: one free text."""

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class Stored:
    """What a Responses request asks of a store, and what a store has to keep of it.

    Args:
        wanted: the client did not send ``store: false``.
        background: the client wants to be answered before the reply is there.
        previous: id of the response this one continues.
        items: the input items after the history, as they were sent.
        history: the items of the responses before, as they were stored.
    """

    wanted: bool
    background: bool
    previous: str | None
    items: tuple[dict[str, Any], ...]
    history: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked body.

    Args:
        body: what the codec is to read, in the protocol's own form.
        model: the name the client used; replies carry it.
        tools: the declared tools, in the form of Chat Completions.
        tool_choice: which calls the reply may hold.
        parallel_calls: whether it may hold more than one.
        temperature: the client's value, None where it sent none.
        top_p: likewise.
        moves: penalties and biases.
        ignored: names of fields accepted without effect, sorted.
        continuous: every chunk of the stream is to tell the usage so far.
        n: how many choices.
        reply_format: the JSON the answer is to be, None for any text.
        customs: names of tools that take free text instead of arguments.
        effort: a numeric effort, 1-100; None for a named one.
        prefill: the last message is the beginning of the reply.
        searches: the request declares a tool search of the client (Responses).
        summary: the reasoning is wanted as a summary too (Responses).
        echo: fields of a Responses reply that repeat the request and the codec does not know.
        stored: see ``Stored``; None in other protocols.
        scoring: which prompt tokens are to be scored; None for none.
    """

    body: Body
    model: str
    tools: tuple[dict[str, Any], ...]
    tool_choice: ToolChoice
    parallel_calls: bool
    temperature: float | None
    top_p: float | None
    ignored: tuple[str, ...]
    moves: LogitMoves = NO_MOVES
    continuous: bool = False
    n: int = 1
    reply_format: ReplyFormat | None = None
    customs: frozenset[str] = frozenset()
    effort: int | None = None
    prefill: bool = False
    searches: bool = False
    summary: bool = False
    echo: dict[str, Any] = field(default_factory=dict)
    stored: Stored | None = None
    scoring: PromptScoring | None = None


def check_model(body: Body, served: ServedModel) -> str:
    """Return the requested model name.

    Raises:
        ClientError: it is missing, not a string, or not a name of the served model.
    """
    name = body.get("model")
    names = ", ".join((served.name, *served.aliases))
    if not isinstance(name, str):
        raise fail("model", f"one of {names}", name)
    if not name or not served.answers_to(name):
        raise ClientError(
            f"model: expected one of {names}, got {describe(name)}",
            code="model_not_found",
            param="model",
        )
    return name


def read_moves(body: Body) -> LogitMoves:
    """Return the penalties and biases of a body whose fields were checked by ``MOVES``."""
    bias = body.get("logit_bias", {})
    return LogitMoves(
        presence=body.get("presence_penalty", 0.0),
        frequency=body.get("frequency_penalty", 0.0),
        bias=tuple((int(token_id), value) for token_id, value in bias.items() if value),
    )


STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")


def read_stream_options(body: Body, ignored: list[str]) -> bool:
    """Check the options of a stream; returns whether every chunk is to tell the usage so far.

    Args:
        body: whose; its fields were checked one by one.
        ignored: takes the names of options that ask for something and have no effect.
    """
    options = body.get("stream_options")
    if options is None:
        return False
    if not body.get("stream"):
        raise ClientError("stream_options: only allowed with stream: true", param="stream_options")
    for name in STREAM_OPTIONS:
        value = options.get(name)
        ok = value is None or isinstance(value, bool)
        require(ok, f"stream_options.{name}", "true or false", value)
    ignored += (
        f"stream_options.{name}"
        for name, value in options.items()
        if name not in STREAM_OPTIONS and value
    )
    return bool(options.get("continuous_usage_stats"))


def has_token(value: Any, served: ServedModel, vocabulary: Vocabulary) -> bool:
    """Whether a JSON value is a token id of the model and of its tokenizer.

    The two need not agree: a model may have rows that no text leads to, a tokenizer further tokens.
    """
    if not is_int(value) or vocabulary.bytes_of(value) is None:
        return False
    return served.vocab_size is None or value < served.vocab_size


def no_token(value: Any, at: str, served: ServedModel, vocabulary: Vocabulary) -> ClientError:
    """Build the error for a value that is no such id: it says which of the two lacks it."""
    if not is_int(value):
        return fail(at, "a token id", value)
    if served.vocab_size is not None and not 0 <= value < served.vocab_size:
        return fail(at, f"a token id of the model, whose vocab_size is {served.vocab_size}", value)
    expected = f"a token id of the model's tokenizer, whose ids are below {vocabulary.size}"
    return fail(at, expected, value)


def check_bias(moves: LogitMoves, served: ServedModel, vocabulary: Vocabulary) -> None:
    """Raise unless the model and its tokenizer have every token that is biased.

    Raises:
        ClientError: one lacks it; ``param`` names it.
    """
    for token_id, _ in moves.bias:
        if not has_token(token_id, served, vocabulary):
            raise no_token(token_id, f"logit_bias.{token_id}", served, vocabulary)


def unheeded(body: Body, honoured: Iterable[str], neutral: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sorted names of fields that have no effect and ask for one.

    Args:
        body: the body without its nulls.
        honoured: names that have an effect.
        neutral: values that ask for nothing, by name.
    """
    known = frozenset(honoured)
    return tuple(
        sorted(
            name
            for name, value in body.items()
            if name not in known and (name not in neutral or value != neutral[name])
        )
    )


def function_tool(
    name: Any,
    description: Any,
    parameters: Any,
    at: str,
    seen: set[str],
    *,
    schema_name: str = "parameters",
    strict: bool = False,
) -> dict[str, Any]:
    """Check the parts of a function and return it as a tool of Chat Completions.

    Args:
        name: 1-128 characters of ``[a-zA-Z0-9_-]``, not in ``seen``.
        description: a string or None.
        parameters: a JSON Schema or None.
        at: path of the object that holds them.
        seen: names used before; the name is added.
        schema_name: what the protocol calls the parameters.
        strict: calls are held to the schema.

    Raises:
        ClientError: one of them is not as said; ``param`` is its path.
    """
    require(
        isinstance(name, str) and _TOOL_NAME.match(name) is not None,
        f"{at}.name",
        "1-128 of [a-zA-Z0-9_-]",
        name,
    )
    assert isinstance(name, str)
    if name in seen:
        raise ClientError(
            f"{at}.name: tool names must be unique, {name!r} is used before", param=f"{at}.name"
        )
    seen.add(name)
    require(
        description is None or isinstance(description, str),
        f"{at}.description",
        "a string",
        description,
    )
    function: dict[str, Any] = {"name": name}
    if strict:
        function["strict"] = True
    if description is not None:
        function["description"] = description
    if parameters is not None:
        check_size(parameters, f"{at}.{schema_name}")
        function["parameters"] = parameters
    return {"type": "function", "function": function}


_NESTED = ("function", "custom", "allowed_tools")


def nested(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a tool, or a choice of one, in the form of Chat Completions: beneath its type.

    Args:
        entry: in that form, or flat as in Responses (BerriAI/litellm#34029); others are left alone.
    """
    type_ = entry.get("type")
    if type_ not in _NESTED or type_ in entry or len(entry) < 2:
        return entry
    return {"type": type_, type_: {key: value for key, value in entry.items() if key != "type"}}


def flat(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a tool, or a choice of one, in the form of Responses; the reverse of ``nested``."""
    type_ = entry.get("type")
    inner = entry.get(type_) if type_ in _NESTED else None
    if not isinstance(inner, dict):
        return entry
    return {**{key: value for key, value in entry.items() if key != type_}, **inner, "type": type_}


def custom_parameters(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the description and parameters of a custom tool as a function.

    A grammar cannot be enforced here; it is told to the model in words.
    """
    description = tool.get("description")
    text = description if isinstance(description, str) else ""
    shape = tool.get("format")
    definition: Any = None
    if isinstance(shape, dict):
        grammar = shape.get("grammar")  # Chat nests what Responses has flat
        definition = (grammar if isinstance(grammar, dict) else shape).get("definition")
    if isinstance(definition, str):
        text = f"{text}\n\nThe input must match this grammar:\n{definition}".lstrip()
    return text, dict(INPUT_SCHEMA)


def read_arguments(value: Any, at: str) -> Any:
    """Return the arguments of a call in a history as the text they should be, where that is clear.

    Args:
        value: what a client sent; None, blank text and ``null`` are those of a call without any.
        at: its path.
    """
    if value is None or (isinstance(value, str) and value.strip() in ("", "null")):
        return "{}"
    return written(value, at) if isinstance(value, dict) else value


def check_effort(effort: Any, param: str, *, why: str = "") -> None:
    """Raise unless an effort is one of the named tiers; ``why`` says more of numbers."""
    if is_number(effort):
        raise ClientError(
            f"{param}: numeric effort is not supported {why or 'here'}; "
            f"expected one of {', '.join(EFFORTS)}, got {describe(effort)}",
            param=param,
        )
    require(effort in EFFORTS, param, f"one of {', '.join(EFFORTS)}", effort)


def check_image(where: str, served: ServedModel, url: Any) -> None:
    """Raise unless an image of a request can be shown to the model.

    The codec would put a visible placeholder into a V4 prompt and fetch nothing on V4.1: the model
    would answer as if it had seen the image. So issue 2 asks for a 400 that names the reason.

    Args:
        where: path of the part.
        served: the model.
        url: where it comes from; only data counts, since nothing is fetched here (a server does
            that before, see gateway.images).

    Raises:
        ClientError: the model has no eyes, or the image is no data.
    """
    if not served.has_vision or served.version != "v4.1":
        raise ClientError(
            f"{where}: model {served.name!r} cannot take images: it has no vision tower",
            code="image_not_supported",
            param=where,
        )
    if not isinstance(url, str) or not url.startswith("data:"):
        raise fail(where, "an image as data", url)
