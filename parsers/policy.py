"""What the gate does with each fault of a model: one frozen value, one field per rule.

A rule that two profiles see differently is a field here, never a question about the profile.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Action(enum.StrEnum):
    """What is done with a call or a text that breaks a rule."""

    PASS = "pass"  # delivered as it is
    REPAIR = "repair"  # delivered mended, and reported
    QUOTE = "quote"  # shown as text, markers made harmless, and counted
    WITHHOLD = "withhold"  # not delivered, and reported
    ERROR = "error"  # the reply ends in an error


class Doubt(enum.StrEnum):
    """What a block in the reasoning or in a code fence is."""

    CALL = "call"  # a call like any other, at once, as the codec takes it
    LAST = "last"  # a call if it ends the output, else a quotation: decided when that is known
    QUOTE = "quote"  # never a call


class Hold(enum.StrEnum):
    """How much of a call is kept back until it is known to be good."""

    NONE = "none"  # the bare codec: no gate at all
    PARAMETER = "parameter"  # strings stream; any other parameter comes whole and checked
    CALL = "call"  # a call comes when it is whole and good


def means(text: str) -> dict[str, str]:
    """Return the metadata of a field that is a rule: what it decides, for the table."""
    return {"meaning": text}


@dataclass(frozen=True, slots=True)
class GatePolicy:
    """The rules for calls a model writes; the defaults are those of the profile ``agent``."""

    undeclared_tool: Action = field(
        default=Action.WITHHOLD,
        metadata=means("a call of a name not in `tools`: pass (flagged), withhold or error"),
    )
    broken_json: Action = field(
        default=Action.REPAIR,
        metadata=means(
            "a value of a non-string parameter that is no strict JSON. repair: a string where the"
            " schema admits one; where it does not, the call is withheld, or, with part of it sent"
            " already, goes on with the string that its tool will refuse. withhold: a string in that"
            " last case only"
        ),
    )
    json_body: Action = field(
        default=Action.REPAIR,
        metadata=means(
            "a JSON object in place of parameters: repair reads it as the arguments, withhold does"
            " not deliver the call"
        ),
    )
    unclosed_call: Action = field(
        default=Action.REPAIR,
        metadata=means(
            "a call that the output ends in, not cut by length: repair closes what was sent and"
            " withholds what was not begun; error ends the reply in an error"
        ),
    )
    schema_violation: Action = field(
        default=Action.PASS,
        metadata=means(
            "arguments that break the schema of a tool not declared strict: pass (reported) or error;"
            " with `hold: call` they are withheld"
        ),
    )
    strict_violation: Action = field(
        default=Action.ERROR,
        metadata=means("arguments that break the schema of a tool declared `strict`: as above"),
    )
    doubtful_block: Doubt = field(
        default=Doubt.LAST,
        metadata=means(
            "a block in the reasoning or in a code fence: a call, a call if it ends the output, or a"
            " quotation"
        ),
    )
    stray_marker: Action = field(
        default=Action.QUOTE, metadata=means("a marker that opens nothing: quote or pass")
    )
    hold: Hold = field(
        default=Hold.PARAMETER,
        metadata=means(
            "how much of a call is kept back: none (no gate), parameter (strings stream, any other"
            " parameter comes whole and checked), call (a call comes when it is whole and good)"
        ),
    )
    parallel_calls: bool = field(
        default=True,
        metadata=means(
            "more than one call may be delivered; a request's `parallel_tool_calls: false` turns it"
            " off"
        ),
    )


BARE = GatePolicy(hold=Hold.NONE)
"""No gate: what the codec does, for comparison with it."""
