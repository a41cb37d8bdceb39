"""Decides what of a reply is delivered, before anything of it is sent.

Knows the parser's events, the declared tools and the policy; tells a ``Sink`` what to write and a
``Report`` what it did. Knows neither tokens nor the codec. What happens inside one call is
``parsers.invoke``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parsers.answer import JsonAnswer
from parsers.dialects import MARK, quote, spell
from parsers.errors import ReplyError
from parsers.events import (
    BlockClosed,
    BlockOpened,
    Event,
    InvokeClosed,
    InvokeOpened,
    Noise,
    ParamClosed,
    ParamOpened,
    ParamText,
    Stray,
    Text,
    ThinkEnd,
)
from parsers.invoke import Finish, Invoke
from parsers.policy import Action, Doubt, GatePolicy
from parsers.report import LONGEST_RAW, Report, Withheld
from parsers.sink import Sink
from parsers.toolset import ToolSet
from parsers.values import ReplyFormat, ToolChoice

LONG_CALL = 8192
"""Characters from which on the judgement of a call counts as long: some milliseconds."""
_WHY = {
    "undeclared_tool": "the tool is not declared",
    "not_chosen": "tool_choice names another tool",
    "tool_choice_none": "tool_choice is none",
    "parallel_tool_calls": "parallel_tool_calls is false",
    "broken_json": "its arguments are not valid",
    "malformed_call": "it cannot be read",
    "unclosed_call": "it was not finished",
    "schema_violation": "its arguments break the schema of the tool",
}


class ToolGate:
    """The gate of one reply.

    Args:
        tools: the declared tools.
        policy: what is done with each fault.
        sink: where decisions go.
        reasoning: the output starts inside the reasoning.
        choice: which calls the request asks for.
        wanted: the JSON that an answer without calls is to be.

    Attributes:
        report: what was done.
        error: set when a policy says that the reply is an error.
        satisfied: no further output is wanted: the one call that is allowed was delivered.
        spoke: whether the answer holds anything but blanks.
        reasoning: whether the text that comes now is reasoning.
        opened: the next call is opened by us, not by the model.
        last_try: a forced call that does not come now either is an error.
    """

    def __init__(
        self,
        tools: ToolSet,
        policy: GatePolicy,
        sink: Sink,
        *,
        reasoning: bool,
        choice: ToolChoice,
        wanted: ReplyFormat | None = None,
    ) -> None:
        self.report = Report()
        self.error: ReplyError | None = None
        self.satisfied = False
        self.spoke = False
        self.reasoning = reasoning
        self.opened = False
        self.last_try = False
        self._tools = tools
        self._policy = policy
        self._sink = sink
        self._choice = choice
        self._answer = None if wanted is None else JsonAnswer(wanted, policy, sink, self.report)
        self._call: Invoke | None = None
        self._noise: list[str] = []  # of the block, between its calls
        self._invoked = False  # the block holds a call
        self._doubted: list[Event] | None = None
        self._parted = False  # a block was left out behind what may be the beginning of a marker
        self._finish: Finish = "stop"
        self._handlers: dict[type, Callable[[Any], None]] = {
            Text: self._on_text,
            ThinkEnd: self._on_think_end,
            Stray: self._on_stray,
            BlockOpened: self._on_block_opened,
            InvokeOpened: self._on_invoke_opened,
            ParamOpened: self._on_param_opened,
            ParamText: self._on_param_text,
            ParamClosed: self._on_param_closed,
            InvokeClosed: self._on_invoke_closed,
            BlockClosed: self._on_block_closed,
            Noise: self._on_noise,
        }

    @property
    def open(self) -> bool:
        """Whether ordinary text passes as it is: nothing in doubt, no call delivered yet."""
        filtered = self._answer is not None and not self.reasoning
        return not filtered and not self.called and not self._parted

    @property
    def called(self) -> bool:
        """Whether a call was delivered or may still turn out to have been made."""
        return self._doubted is not None or self.report.calls > 0

    @property
    def heavy(self) -> bool:
        """Whether a call that ends now takes long to be judged."""
        return self._tools.slow or (self._call is not None and self._call.size > LONG_CALL)

    @property
    def flow(self) -> Callable[[str], str] | None:
        """What takes the text of a string that streams, past the parser; None where none does."""
        call = self._call
        if call is None or self._doubted is not None or not call.flowing:
            return None
        return call.flow

    def handle(self, event: Event) -> None:
        """Decide one event."""
        if self._answer is not None and not isinstance(event, Text):
            self._answer.release()
        if self._doubted is None:
            self._handlers[type(event)](event)
        else:
            self._on_doubted(event)

    def settle(self, events: list[Event], finish: Finish) -> None:
        """Decide the last events of a generation, knowing why it ended."""
        self._finish = finish
        for event in events:
            self.handle(event)
        if self._doubted is not None:
            self._believe()

    def close(self, events: list[Event], finish: Finish) -> None:
        """End the reply with these events."""
        self.settle(events, finish)
        report = self.report
        if self._answer is not None and self.error is None:
            self.error = self._answer.close(finish, judged=not report.calls)
        if self._choice.forced and not report.calls:
            report.unmet = "tool_choice"
            if self.last_try and finish == "stop" and not self.spoke:
                self._fail(self._owed(), "forced_call_missing")
        if report.withheld and not report.calls and not self.spoke and self.error is None:
            # Never an empty reply: an agent would take it for the end of its task.
            if self.reasoning:
                self._sink.end_reasoning()
            self._sink.say(_note(report.withheld[0], len(report.withheld)))

    # Outside of calls

    def _on_text(self, event: Text) -> None:
        if self.report.calls:
            self._lose(event.raw)
            return
        if self._answer is not None and not self.reasoning:
            self._answer.feed(event.raw)
        else:
            self._keep_apart()
            self._sink.verbatim(len(event.raw))
        if not self.spoke and not self.reasoning:
            self.spoke = not event.raw.isspace()

    def _on_think_end(self, event: ThinkEnd) -> None:
        self.reasoning = False
        if event.joins and not self.report.calls:
            # The codec leaves it out, and the text around it would read as one marker.
            self._sink.drop(len(event.raw))
            self._sink.say(" ")
        elif self.report.calls:
            self._sink.drop(len(event.raw))
        else:
            self._sink.verbatim(len(event.raw))

    def _on_stray(self, event: Stray) -> None:
        if self._policy.stray_marker is Action.PASS and not self.report.calls:
            self._sink.verbatim(len(event.raw))
            self.spoke = self.spoke or not self.reasoning
        else:
            self._show(event.raw)

    def _show(self, raw: str) -> None:
        """Show markup as text, its markers made harmless."""
        if self.report.calls:
            self._lose(raw)
            return
        self._keep_apart()
        self._sink.drop(len(raw))
        self._sink.say(quote(raw))
        self.report.quoted_markers += quote(raw) != spell(raw)
        self.spoke = self.spoke or not self.reasoning

    def _leave_out(self, event: BlockOpened) -> None:
        self._sink.drop(len(event.raw))
        self._parted = event.joins

    def _keep_apart(self) -> None:
        """Put a blank where text around a block that was left out would read as one marker."""
        if self._parted:
            self._sink.say(" ")
        self._parted = False

    def _lose(self, raw: str) -> None:
        """Leave out text that the codec has no place for: it writes none after a call."""
        self._sink.drop(len(raw))
        self.report.lose(quote(raw))

    # Blocks, and those that may be quotations

    def _on_block_opened(self, event: BlockOpened) -> None:
        if event.doubtful and self._policy.doubtful_block is not Doubt.CALL:
            self._doubted = [event]
        else:
            self._leave_out(event)

    def _on_doubted(self, event: Event) -> None:
        assert self._doubted is not None
        if self._policy.doubtful_block is Doubt.QUOTE:
            self._doubted.append(event)
            if isinstance(event, BlockClosed):
                self._disbelieve()
        elif isinstance(event, Stray | ThinkEnd) or (
            isinstance(event, Text) and not event.raw.isspace()
        ):
            self._disbelieve()
            self.handle(event)
        else:
            self._doubted.append(event)

    def _disbelieve(self) -> None:
        """Show the doubted block as the quotation it is: the output goes on after it."""
        events, self._doubted = self._doubted or [], None
        markup = ""
        for event in events:
            if not isinstance(event, Text):
                markup += event.raw
                continue
            if markup:
                self._show(markup)
                markup = ""
            self._on_text(event)
        if markup:
            self._show(markup)

    def _believe(self) -> None:
        """Take the doubted block for calls: it ended the output."""
        if self._policy.doubtful_block is Doubt.QUOTE:
            self._disbelieve()
            return
        events, self._doubted = self._doubted or [], None
        for event in events:
            if isinstance(event, BlockOpened):
                self._leave_out(event)
            else:
                self.handle(event)

    def _on_noise(self, event: Noise) -> None:
        if self._call is not None:
            self._current(event.raw).add_noise(event.raw)
        else:
            self._sink.drop(len(event.raw))
            self._noise.append(event.raw)

    def _on_block_closed(self, event: BlockClosed) -> None:
        self._sink.drop(len(event.raw))
        noise = "".join(self._noise)
        self._noise.clear()
        invoked, self._invoked = self._invoked, False
        if not event.complete and MARK in noise:  # cut inside an opening tag
            if self._finish == "stop":
                self._withhold(None, "unclosed_call", noise)
        elif noise.strip() and not (invoked or self._choice.forced) and self._finish == "stop":
            self._withhold(None, "malformed_call", noise)  # something was to be called
        elif noise.strip():
            self.report.lose(quote(noise))
        cut = not event.complete and self._finish == "length" and self._choice.mode != "none"
        if cut and not (self.report.calls or self.report.withheld):
            self._sink.open_block()  # for the codec, which leaves out the newlines before a block

    # Calls

    def _on_invoke_opened(self, event: InvokeOpened) -> None:
        name = event.name
        if name is not None and quote(name) != name:
            name = None  # no tool is called like a marker
        tool = -1 if name is None else self._tools.index(name)
        self._invoked = True
        self._call = Invoke(
            name or "",
            tool,
            self._refusal(name, tool),
            tools=self._tools,
            policy=self._policy,
            sink=self._sink,
        )
        self._current(event.raw)
        if self._call.reason == "undeclared_tool" and (
            self._policy.undeclared_tool is Action.ERROR
        ):
            self._fail(
                f"the model called the tool {quote(self._call.name)!r}, which is not declared",
                "undeclared_tool",
            )

    def _refusal(self, name: str | None, tool: int) -> str | None:
        lenient = self._policy.undeclared_tool is Action.PASS
        if name is None:
            return "malformed_call"
        if self._choice.mode == "none":
            return "tool_choice_none"
        if tool < 0 and not lenient:
            return "undeclared_tool"
        if self._choice.names is not None and name not in self._choice.names and not lenient:
            return "not_chosen"
        if self.report.calls and not self._policy.parallel_calls:
            return "parallel_tool_calls"
        return None

    def _on_param_opened(self, event: ParamOpened) -> None:
        self._current(event.raw).open_parameter(event)

    def _on_param_text(self, event: ParamText) -> None:
        self._current(event.raw).add(event.raw)

    def _on_param_closed(self, event: ParamClosed) -> None:
        self._current(event.raw).close_parameter()

    def _on_invoke_closed(self, event: InvokeClosed) -> None:
        call = self._current(event.raw)
        self._call = None
        opened, self.opened = self.opened, False
        if opened and event.complete and not event.raw and call.reason is None and call.empty:
            call.reason = "malformed_call"  # the model began another in place of the opened one
        elif event.complete:
            call.finish()
        else:
            unclosed = call.reason is None and self._finish == "stop"
            if unclosed and self._policy.unclosed_call is Action.ERROR:
                self._fail(f"the output ended inside a call of {call.name!r}", "unclosed_call")
            call.cut(self._finish)
        if call.violation is not None:
            strict = self._tools.is_strict(call.tool)
            policy = self._policy
            action = policy.strict_violation if strict else policy.schema_violation
            if action is Action.ERROR:
                self._fail(
                    f"the arguments of a call of {call.name!r} break its schema: "
                    f"{quote(call.violation)}",
                    "schema_violation",
                )
        if call.reason is not None:
            self._withhold(call.name or None, call.reason, call.raw)
            return
        if call.violation is not None:
            self.report.violations.append((call.name, quote(call.violation)))
        self.report.calls += 1
        self.report.repaired += call.mends
        if call.tool < 0:
            self.report.flagged.append(call.name)
        noise = call.noise
        if noise.strip() and not any(mend.rule == "json_body" for mend in call.mends):
            self.report.lose(quote(noise))
        self.satisfied = not self._policy.parallel_calls

    def _withhold(self, name: str | None, reason: str, raw: str) -> None:
        self.report.withheld.append(Withheld(name, reason, quote(raw).strip()[:LONGEST_RAW]))

    def _owed(self) -> str:
        """Say that a forced call did not come, and what came."""
        names = self._choice.names
        wanted = "a call" if names is None else f"a call of {' or '.join(sorted(names))}"
        message = f"tool_choice asks for {wanted}, and the model made none in two tries"
        if not self.report.withheld:
            return message
        last = self.report.withheld[-1]
        which = "a call" if last.name is None else f"a call of {quote(last.name)[:64]!r}"
        return f"{message}; it wrote {which} that was not delivered: {_WHY[last.reason]}"

    def _fail(self, message: str, code: str) -> None:
        if self.error is None:
            self.error = ReplyError(message, code=code)

    def _current(self, raw: str) -> Invoke:
        """Return the open call; its markup is swallowed: what is delivered is re-spelled."""
        assert self._call is not None
        self._sink.drop(len(raw))
        self._call.keep(raw)
        return self._call


def _note(withheld: Withheld, count: int) -> str:
    """Say in the answer that it lost its calls; for an agent and its user to read."""
    name = quote(withheld.name or "").strip()
    which = f'A call of the tool "{name[:64]}"' if name else "A tool call"
    more = f", like {count - 1} more," if count > 1 else ""
    return f"[{which}{more} was not delivered: {_WHY[withheld.reason]}.]"
