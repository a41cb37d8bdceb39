"""Sans-IO protocol core: request bytes to prompt ids, token ids to wire bytes.

What a server calls, in the order in which it needs it::

    codec = Codec.load(ServedModel(...), PROFILES["agent"])     # once; BootError
    exchange = codec.open_exchange(                             # ClientError -> error_body
        "chat" | "responses" | "messages", body, exchange_id=...,
        reasoning=ReasoningCache(),                # one for the server; used where restored
        stateful=True, history=..., find_item=...,  # Responses with a store
    )
    for each of exchange.choices:                               # n; one but for Chat
        start -> receive ... -> continuation (may ask for a second generation) -> close | fail
    exchange.body()                                             # without a stream
    exchange.stored, exchange.record()                          # Responses: what to keep

    codec.prompt_ids("messages", body)      # exact count_tokens: its length
    codec.tokenize(text)                    # a text's ids
    error_body(protocol, error, flat=codec.profile.error_body == "flat", request_id=...)
    codec.open_completion(body, exchange_id=..., created=...)   # driven like an exchange
    parse_function_call(codec, text, tools)
    separate_reasoning(text).reply(blocks=...)

The reply's extension field ``bathyal`` (``Report.extension``) stands at the top of a Chat or
Messages body, in the last Chat chunk, in the ``message_delta`` event, and in the ``response``
object of Responses.
"""

from __future__ import annotations

from parsers.codec import Codec
from parsers.completions import Completion
from parsers.dsml import DsmlParser
from parsers.errors import BootError, ClientError, CodecError, Protocol, ReplyError, error_body
from parsers.exchange import LONG_REPLY, Continuation, Exchange
from parsers.native import (
    ParsedCall,
    ParsedCalls,
    Separated,
    parse_function_call,
    separate_reasoning,
)
from parsers.policy import BARE, Action, Doubt, GatePolicy, Hold
from parsers.prompt_note import NO_NOTE
from parsers.reasoning import ReasoningCache, ReasoningStore
from parsers.report import Repaired, Report, Withheld
from parsers.request import Stored
from parsers.rules import PROFILES, Profile
from parsers.toolset import ToolSet
from parsers.values import (
    Constraint,
    LogitMoves,
    PromptNote,
    PromptScoring,
    Sampling,
    ServedModel,
)
from parsers.wire import TokenLogprob

__all__ = [
    "BARE",
    "LONG_REPLY",
    "NO_NOTE",
    "PROFILES",
    "Action",
    "BootError",
    "ClientError",
    "Codec",
    "CodecError",
    "Completion",
    "Constraint",
    "Continuation",
    "Doubt",
    "DsmlParser",
    "Exchange",
    "GatePolicy",
    "Hold",
    "LogitMoves",
    "ParsedCall",
    "ParsedCalls",
    "Profile",
    "PromptNote",
    "PromptScoring",
    "Protocol",
    "ReasoningCache",
    "ReasoningStore",
    "Repaired",
    "ReplyError",
    "Report",
    "Sampling",
    "Separated",
    "ServedModel",
    "Stored",
    "TokenLogprob",
    "ToolSet",
    "Withheld",
    "error_body",
    "parse_function_call",
    "separate_reasoning",
]
