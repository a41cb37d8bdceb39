"""What the gate does with each fault of a model: one frozen value, one field per rule.

A rule that two profiles see differently is a field here, never a question about the profile.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class GatePolicy:
    """The rules for calls a model writes; the defaults are those of the profile ``agent``.

    Args:
        undeclared_tool: a name not in ``tools``: PASS (flagged), WITHHOLD or ERROR.
        broken_json: a value of a non-string parameter that is no strict JSON. REPAIR makes it a
            string where the schema admits one; where it does not, the call is withheld, or, with
            part of it sent already, goes on with the string that its tool will refuse. WITHHOLD
            makes a string in that last case only.
        json_body: a JSON object in place of parameters: REPAIR reads it as the arguments, WITHHOLD
            does not deliver the call.
        unclosed_call: a call that the output ends in, not cut by length: REPAIR closes what was
            sent and withholds what was not begun; ERROR ends the reply in an error.
        doubtful_block: a block in the reasoning or in a code fence.
        stray_marker: a marker that opens nothing: QUOTE or PASS.
        hold: how much is kept back.
        parallel_calls: whether more than one call may be delivered; a request's
            ``parallel_tool_calls: false`` turns it off.
    """

    undeclared_tool: Action = Action.WITHHOLD
    broken_json: Action = Action.REPAIR
    json_body: Action = Action.REPAIR
    unclosed_call: Action = Action.REPAIR
    doubtful_block: Doubt = Doubt.LAST
    stray_marker: Action = Action.QUOTE
    hold: Hold = Hold.PARAMETER
    parallel_calls: bool = True


BARE = GatePolicy(hold=Hold.NONE)
"""No gate: what the codec does, for comparison with it."""
