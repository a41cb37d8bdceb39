"""Reads one call and writes what may be delivered of it.

Knows the events inside one invoke, the tool's schema types and the policy; knows nothing of other
calls or of the text around.

A call is announced late: not at its name, but when its first parameter is known to be good (a
string from its first character, any other when it is whole), so that a call can still be withheld
for what its first parameter holds. From then on it cannot be recalled: what follows is mended.
What was sent is at every moment the beginning of valid JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from parsers.dialects import quote, spell
from parsers.events import ParamOpened
from parsers.jsontext import (
    escape,
    escape_token,
    held_bar,
    hide_bars,
    is_strict,
    members,
    mend_strings,
    mend_surrogates,
)
from parsers.policy import Action, GatePolicy, Hold
from parsers.report import LONGEST_RAW, Repaired
from parsers.sink import Sink
from parsers.toolset import ToolSet, fits

Finish = Literal["stop", "length"]
LONGEST_TOKEN = 16
"""Characters up to which a text is likely one token's, so that it will come again."""

_LITERALS = {"True": "true", "False": "false", "None": "null"}


class Invoke:
    """The call being read.

    Args:
        name: the tool it names; empty where the tag has no name.
        tool: the tool's position, -1 for one that is not declared.
        reason: why the call is withheld, None to deliver it.
        tools: the declared tools.
        policy: what is done with each fault.
        sink: where it is written.

    Attributes:
        reason: as above; faults of the call can set it as long as nothing was written.
        raw: what the model wrote, about ``LONGEST_RAW`` characters of it.
        mends: what was repaired.
        announced: whether the call was begun on the wire.
        size: characters of its values so far, and between its tags.
        violation: how the whole arguments break the tool's schema.
    """

    def __init__(
        self,
        name: str,
        tool: int,
        reason: str | None,
        *,
        tools: ToolSet,
        policy: GatePolicy,
        sink: Sink,
    ) -> None:
        self.name = name
        self.tool = tool
        self.reason = reason
        self.raw = ""
        self.mends: list[Repaired] = []
        self.announced = False
        self.size = 0
        self.violation: str | None = None
        self._tools = tools
        self._policy = policy
        self._sink = sink
        self._holding = policy.hold is Hold.CALL
        self._noise: list[str] = []
        self._kept: list[Callable[[], None]] = []  # what was decided while the call is held back
        self._names: set[str] = set()
        self._checked: list[str] | None = [] if tools.has_schema(tool) else None
        self._written = 0  # members begun
        # The parameter being read: its name, how it is treated, and the pieces of its value.
        self._param = ""
        self._string: bool | None = None
        self._mode: Literal["stream", "hold", "skip"] = "skip"
        self._pieces: list[str] = []
        self._tail = ""  # of a string: what may begin a marker

    def keep(self, raw: str) -> None:
        """Remember source text for the report."""
        if len(self.raw) < LONGEST_RAW:
            self.raw += raw

    def open_parameter(self, event: ParamOpened) -> None:
        """Begin a parameter."""
        self._mode, self._pieces = "skip", []
        if self.reason is not None:
            return
        if event.name is None or event.name in self._names:
            # The first of two was perhaps sent, so it is the one that counts.
            rule = "unreadable_parameter" if event.name is None else "duplicate_parameter"
            self._mend(rule, event.name)
            return
        self._names.add(event.name)
        self._param, self._string = event.name, event.string
        streams = event.string
        if event.string is None:
            self._mend("missing_string_attribute", event.name)
            streams = self._tools.admits(self.tool, event.name) == {"string"}
        self._mode = "stream" if streams else "hold"
        if streams:
            self._begin(event.name)
            self._write('"')

    def add(self, raw: str) -> None:
        """Continue the parameter's value."""
        self.size += len(raw)
        if self._mode == "stream":
            text = self._tail + spell(raw)
            end = len(text) - held_bar(text)
            self._tail = text[end:]
            self._write(escape(text[:end]))
        elif self._mode == "hold":
            self._pieces.append(raw)

    def add_noise(self, raw: str) -> None:
        """Take text between the tags."""
        self.size += len(raw)
        self._noise.append(raw)

    @property
    def noise(self) -> str:
        """The text between the tags; it may be the arguments."""
        return "".join(self._noise)

    @property
    def empty(self) -> bool:
        """Whether nothing of its inside came yet."""
        return not (self._names or self.mends or self.noise.strip())

    @property
    def flowing(self) -> bool:
        """Whether a string streams and nothing of it is held back: `flow` may take what comes."""
        return self._mode == "stream" and not self._tail and not self._holding

    def flow(self, raw: str) -> str:
        """Continue a string with text that holds no beginning of a marker: `add`, without the sink.

        Returns:
            What is to be written.
        """
        self.keep(raw)
        self.size += len(raw)
        text = escape_token(raw) if len(raw) <= LONGEST_TOKEN else escape(raw)
        if self._checked is not None:
            self._checked.append(text)
        return text

    def close_parameter(self) -> None:
        """End the parameter."""
        if self._mode == "stream":
            self._end_string()
        elif self._mode == "hold":
            self._judge(spell("".join(self._pieces)))
        self._mode = "skip"

    def _end_string(self) -> None:
        self._write(escape(self._tail) + '"')
        self._tail = ""

    def _judge(self, text: str) -> None:
        """Decide the value of a parameter that is not, or perhaps not, a string."""
        name, literal = self._param, _LITERALS.get(text.strip())
        admitted = self._tools.admits(self.tool, name)
        if is_strict(text) and (self._string is False or fits(text, admitted)):
            value = hide_bars(text)
        elif (halved := mend_surrogates(text)) != text and is_strict(halved):
            value = hide_bars(halved)
            self._mend("lone_surrogate", name)
        elif (
            (whole := mend_strings(halved)) != halved and is_strict(whole) and fits(whole, admitted)
        ):
            value = hide_bars(whole)
            self._mend("unescaped_string", name)
        elif literal is not None and fits(literal, admitted):
            value = literal
            self._mend("python_literal", name)
        else:
            if self._string is False:
                repairs = self._policy.broken_json is Action.REPAIR and "string" in admitted
                if not repairs and (self._holding or not self.announced):
                    self.reason = "broken_json"
                    return
                self._mend("broken_json", name)
            value = f'"{escape(text)}"'
        self._begin(name)
        self._write(value)

    def finish(self) -> None:
        """End a call whose end was written."""
        if self.reason is not None:
            return
        body = self.noise.strip()
        if body and not self._names:
            found = None
            if self._policy.json_body is Action.REPAIR:
                found = members(spell(body)) or members(mend_strings(spell(body)))
            if found is None:
                self.reason = "malformed_call"
                return
            self._mend("json_body", None)
            for name, text in found:
                self._begin(name)
                self._write(hide_bars(text))
        self._end()

    def cut(self, finish: Finish) -> None:
        """End a call that the output ended in."""
        if self.reason is not None:
            return
        if finish == "length":
            # As the codec: what there is of it is delivered, and the finish reason tells.
            if self._holding:
                self.reason = "unclosed_call"
            else:
                self._announce()
        elif self._holding or not self.announced:
            self.reason = "unclosed_call"
        else:
            self._mend("unclosed_call", None)
            if self._mode == "stream":
                self._end_string()
            self._end()

    # Writing, at once or when the call is whole

    def _announce(self) -> None:
        if not self.announced:
            self.announced = True
            self._do(lambda: self._sink.open_call(self.name))

    def _begin(self, key: str) -> None:
        self._announce()
        first, self._written = self._written == 0, self._written + 1
        if self._checked is not None:
            self._checked.append(f'{"{" if first else ", "}"{escape(key)}": ')
        self._do(lambda: self._sink.key(key, first=first))

    def _write(self, text: str) -> None:
        if self._checked is not None:
            self._checked.append(text)
        if self._holding:
            self._kept.append(lambda: self._sink.value(text))
        elif text:
            self._sink.value(text)

    def _do(self, op: Callable[[], None]) -> None:
        if self._holding:
            self._kept.append(op)
        else:
            op()

    def _end(self) -> None:
        if self._checked is not None:
            whole = "".join(self._checked) + "}" if self._checked else "{}"
            self.violation = self._tools.violation(self.tool, whole)
        if self.violation is not None and self._holding:
            self.reason = "schema_violation"
            return
        self._announce()
        for op in self._kept:
            op()
        self._sink.close_call(empty=self._written == 0)

    def _mend(self, rule: str, parameter: str | None) -> None:
        self.mends.append(Repaired(self.name, rule, parameter and quote(parameter)))
