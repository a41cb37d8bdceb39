"""The three sets of rules a server can be run under, as one table.

A rule that differs between them is a named field, asked for where the rule is applied; nothing in
the flow asks for a profile's name. ``parsers.profiles`` writes the table for people.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from parsers.policy import Action, GatePolicy, means


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One set of rules; every field says what it decides, and the table shows it.

    ``official`` is the hosted API's behaviour, ``sglang`` that of SGLang 0.5.23's chat path,
    ``agent`` what lets every real client finish its loop (issue 3, section Profiles).
    """

    name: str = field(metadata=means("what the server is started with"))
    default_thinking: bool = field(
        metadata=means("whether a request that does not say so is thought about")
    )
    body_thinking: bool = field(
        metadata=means(
            "the body's `thinking` decides (no: it is accepted without effect, and reported)"
        )
    )
    template_kwargs: bool = field(
        metadata=means(
            "`chat_template_kwargs` `thinking`, `enable_thinking` and `reasoning_effort` are heeded"
        )
    )
    numeric_effort: bool = field(
        metadata=means(
            "V4.1 takes a number as effort: 0..0.99 as `reasoning_effort`, 1..100 in"
            " `chat_template_kwargs`; V4 never does"
        )
    )
    missing_reasoning: Literal["reject", "fill", "restore"] = field(
        metadata=means(
            "a turn with calls that comes back without its reasoning: 400, filled empty, or restored"
            " by call id from a bounded cache and else filled empty"
        )
    )
    forced_while_thinking: Literal["reject", "serve"] = field(
        metadata=means(
            "a required or named tool choice while thinking: 400, or the model thinks and then the"
            " block of calls is opened for it"
        )
    )
    unmet_choice: Literal["report", "retry"] = field(
        metadata=means(
            "a required or named tool choice, and the reply ends without a call: reported, or the"
            " call is opened once more, and where nothing can be delivered then either the reply is"
            " an error (502, `forced_call_missing`)"
        )
    )
    sampling: Literal["client", "codec"] = field(
        metadata=means(
            "whose temperature and top_p count where the client sent them; codec: penalties and"
            " logit_bias have no effect either"
        )
    )
    max_n: int = field(metadata=means("the most choices of one request"))
    trailing_assistant: Literal["turn", "user"] = field(
        metadata=means(
            "an assistant message at the end of a chat request, not marked as a prefix: a finished"
            " turn, or sent again as a user turn"
        )
    )
    prefill: bool = field(
        metadata=means(
            "an assistant message at the end of a Messages request is continued"
            " (no: it is a finished turn)"
        )
    )
    pairs: Literal["reject", "mend"] = field(
        metadata=means(
            "calls without a result and results without a call: 400, or a result that says so is put"
            " in, and the orphan is shown as a user's text; a result that does not stand right behind"
            " its call is moved there, and a call whose id occurs again gets an id of its own"
        )
    )
    lenient_messages: bool = field(
        metadata=means(
            "a history may hold null content in any role, thoughts and Responses' texts among a chat's"
            " parts, call arguments as an object, as text or none, and items of Responses that are"
            " unknown and hold nothing for the model; tools, and choices of them, may have the form of"
            " another protocol"
        )
    )
    hosted_tools: Literal["refuse", "drop"] = field(
        metadata=means(
            "tools that the server itself would have to run: 400 with the name, or left out and named"
            " in x-bathyal-ignored"
        )
    )
    strip_billing_line: bool = field(
        metadata=means(
            "a leading line `x-anthropic-billing-header: ...` of a Messages system text, which"
            " changes from turn to turn, is kept out of the prompt, and nothing else (the codec"
            " drops a whole block that begins so, but leaves the line in a plain string)"
        )
    )
    mark_tool_errors: bool = field(
        metadata=means("a tool result with `is_error` says so in the prompt")
    )
    error_body: Literal["nested", "flat"] = field(
        metadata=means('chat errors: `{"error": {...}}`, or SGLang\'s flat object')
    )
    gate: GatePolicy = field(metadata=means("what is done with each fault of the model's calls"))


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name="official",
            default_thinking=True,
            body_thinking=True,
            template_kwargs=False,
            numeric_effort=False,
            missing_reasoning="reject",
            forced_while_thinking="reject",
            unmet_choice="report",
            sampling="codec",
            max_n=1,
            trailing_assistant="turn",
            prefill=False,
            pairs="reject",
            lenient_messages=False,
            hosted_tools="refuse",
            strip_billing_line=False,
            mark_tool_errors=False,
            error_body="nested",
            gate=GatePolicy(undeclared_tool=Action.PASS),
        ),
        Profile(
            name="sglang",
            default_thinking=False,
            body_thinking=False,
            template_kwargs=True,
            numeric_effort=True,
            missing_reasoning="fill",
            forced_while_thinking="serve",
            unmet_choice="report",
            sampling="client",
            max_n=8,
            trailing_assistant="user",
            prefill=True,
            pairs="reject",
            lenient_messages=True,
            hosted_tools="drop",
            strip_billing_line=False,
            mark_tool_errors=False,
            error_body="flat",
            gate=GatePolicy(undeclared_tool=Action.PASS),
        ),
        Profile(
            name="agent",
            default_thinking=True,
            body_thinking=True,
            template_kwargs=True,
            numeric_effort=True,
            missing_reasoning="restore",
            forced_while_thinking="serve",
            unmet_choice="retry",
            sampling="client",
            max_n=8,
            trailing_assistant="turn",
            prefill=True,
            pairs="mend",
            lenient_messages=True,
            hosted_tools="drop",
            strip_billing_line=True,
            mark_tool_errors=True,
            error_body="nested",
            gate=GatePolicy(),
        ),
    )
}
"""The profiles by name."""
