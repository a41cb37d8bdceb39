r"""Reads DSML in any split: ``feed`` gives events, ``close`` flushes what was held.

Knows the grammar and its usual faults; knows no tool, no policy and no token. It never raises.

    OUTSIDE ──<M calls>──► BLOCK ──<M invoke ..>──► INVOKE ──<M parameter ..>──► VALUE
       ▲   └─<M invoke ..>─(a block without its opener)─►┘  ▲                     │
       └────────</M calls>─────┘ ▲──────</M invoke>─────┘   └────</M any>─────────┘

M is the marker, a real special token. A closer of an outer element closes the inner ones; an
invoke inside an invoke closes the first. In a value only a closer counts: an opening tag is text
and so is ``</think>``. Between the tags of a block everything else is noise. Outside, a marker
that opens nothing is a stray, and so is one spelled by ordinary tokens: those never open a call,
for a model copying hostile text would spell it so.

What is held back: outside, the beginning of a marker; in a value, ``<`` or ``</``; in a tag, the
tag. Everything else comes out at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from parsers.dialects import MARK, MARK_BEGUN, THINK_END
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
from parsers.tags import Reading, read_closer, read_opener

_TRIGGER = re.compile(f"[{MARK}{THINK_END}]|[|｜]DSML[|｜]")
_TICKS = re.compile("`+")
_ANGLE_BEGUN = re.compile(r"</?｜?\Z")


class DsmlParser:
    """A parser of one model output.

    Args:
        reasoning: the output starts inside the reasoning.
        forced: the prompt has opened the block of calls already.
    """

    def __init__(self, *, reasoning: bool = False, forced: bool = False) -> None:
        self.reasoning = reasoning
        self._forced = forced
        self._buffer = ""
        self._out: list[Event] = []
        self._state: Callable[[bool], bool] = self._outside
        self._tried = 0  # how much of the buffer the last try at an unfinished tag has seen
        self._ticks = 0
        self._fenced = False
        self._before = ""  # the end of the text before a tag

    @property
    def idle(self) -> bool:
        """Whether it stands outside of markup and holds nothing back."""
        return not self._buffer and self.outside

    @property
    def outside(self) -> bool:
        """Whether it stands outside of markup."""
        return self._state == self._outside

    @property
    def in_tag(self) -> bool:
        """Whether it holds a tag that has not ended."""
        return MARK in self._buffer

    @property
    def in_value(self) -> bool:
        """Whether it stands in the value of a parameter and holds nothing back."""
        return not self._buffer and self._state == self._value

    def skip(self) -> None:
        """Note that ordinary text went by unseen: it ends a run of backticks, and begins no marker."""
        self._ticks, self._before = 0, ""

    def feed(self, text: str) -> list[Event]:
        """Take text in the alphabet of ``parsers.dialects`` and return what it completes."""
        self._buffer += text
        return self._run(final=False)

    def close(self) -> list[Event]:
        """End the output; report what was left open."""
        self._run(final=True)
        if self._state != self._outside:
            if self._state != self._block:
                self._out.append(InvokeClosed("", complete=False))
            self._out.append(BlockClosed("", complete=False))
            self._state = self._outside
        return self._taken()

    def _run(self, *, final: bool) -> list[Event]:
        while self._buffer and self._state(final):
            pass
        return [] if final else self._taken()

    def _taken(self) -> list[Event]:
        out, self._out = self._out, []
        return out

    def _take(self, end: int) -> str:
        raw, self._buffer = self._buffer[:end], self._buffer[end:]
        self._tried = 0
        return raw

    @property
    def _closing(self) -> bool:
        """Whether the tag at the head of the buffer is a closing one."""
        return self._buffer.startswith("</")

    def _read_tag(self, size: int, final: bool) -> Reading:
        """Read the tag at the head of the buffer, after its ``<M`` or ``</M``."""
        if self._closing:
            return read_closer(self._buffer, size, final=final)
        tag = read_opener(self._buffer, size, final=final, tried=self._tried)
        self._tried = len(self._buffer) if tag == "more" else 0
        return tag

    # Each state handler returns whether it got on; False waits for more text.

    def _outside(self, final: bool) -> bool:
        found = _TRIGGER.search(self._buffer)
        if found is None:
            held = None if final else MARK_BEGUN.search(self._buffer, max(0, len(self._buffer) - 8))
            self._text(len(self._buffer) if held is None else held.start())
            return False
        at = found.start()
        if found[0] == THINK_END:
            self._text(at)
            joins = self._joins() and not self.reasoning
            self._out.append(ThinkEnd(self._take(1), joins))
            self.reasoning, self._fenced, self._ticks = False, False, 0
            return True
        before = _angle(self._buffer, at)
        self._text(before)
        size = found.end() - before
        if found[0] != MARK or size == 1:
            self._stray(size)
            return True
        return self._tag_outside(size, final)

    def _tag_outside(self, size: int, final: bool) -> bool:
        closing = self._closing
        tag = self._read_tag(size, final)
        if tag == "more":
            return False
        if tag == "none":
            if final and read_opener(self._buffer, size, final=False) == "more":
                self._open_block(len(self._buffer))  # cut inside its opener
            else:
                self._stray(size)
        elif closing:
            if tag.kind == "block" and self._forced:
                self._forced = False
                self._out.append(BlockOpened("", doubtful=False))
                self._out.append(BlockClosed(self._take(tag.end), complete=True))
            else:
                self._stray(tag.end)
        elif tag.kind == "parameter":
            self._stray(tag.end)
        else:
            self._open_block(tag.end if tag.kind == "block" else 0)
        return True

    def _open_block(self, end: int) -> None:
        doubtful = self.reasoning or self._fenced
        self._out.append(BlockOpened(self._take(end), doubtful, self._joins()))
        self._state = self._block

    def _block(self, final: bool) -> bool:
        size = self._noise_before_mark(final)
        if size == 0:
            return False
        closing = self._closing
        tag = self._read_tag(size, final)
        if tag == "more":
            return False
        if tag == "none":
            self._out.append(Noise(self._take(size)))
        elif closing and tag.kind == "block":
            self._out.append(BlockClosed(self._take(tag.end), complete=True))
            self._forced = False
            self._state = self._outside
        elif not closing and tag.kind == "invoke":
            self._out.append(InvokeOpened(self._take(tag.end), tag.name))
            self._state = self._invoke
        else:
            self._out.append(Noise(self._take(tag.end)))
        return True

    def _invoke(self, final: bool) -> bool:
        size = self._noise_before_mark(final)
        if size == 0:
            return False
        closing = self._closing
        tag = self._read_tag(size, final)
        if tag == "more":
            return False
        if tag == "none":
            self._out.append(Noise(self._take(size)))
        elif closing and tag.kind == "invoke":
            self._out.append(InvokeClosed(self._take(tag.end), complete=True))
            self._state = self._block
        elif not closing and tag.kind == "parameter":
            self._out.append(ParamOpened(self._take(tag.end), tag.name, tag.string))
            if tag.empty:
                self._out.append(ParamClosed(""))
            else:
                self._state = self._value
        elif tag.kind in ("invoke", "block"):  # the block's handler reads it again
            self._out.append(InvokeClosed("", complete=True))
            self._state = self._block
        else:
            self._out.append(Noise(self._take(tag.end)))
        return True

    def _value(self, final: bool) -> bool:
        at = self._buffer.find(MARK)
        if at < 0:
            end = len(self._buffer)
            if not final:
                end -= _angle_held(self._buffer)
            if end:
                self._out.append(ParamText(self._take(end)))
            return False
        before = _angle(self._buffer, at)
        if not self._buffer.startswith("</", before):
            self._out.append(ParamText(self._take(at + 1)))
            return True
        if before:
            self._out.append(ParamText(self._take(before)))
        tag = read_closer(self._buffer, at + 1 - before, final=final)
        if not isinstance(tag, tuple):
            return False
        if tag.kind in ("invoke", "block"):
            self._out.append(ParamClosed(""))
        else:
            self._out.append(ParamClosed(self._take(tag.end)))
        self._state = self._invoke
        return True

    def _noise_before_mark(self, final: bool) -> int:
        """Consume noise up to the next tag; return the size of its ``<M`` or ``</M``, or 0."""
        at = self._buffer.find(MARK)
        while at >= 0 and _angle(self._buffer, at) == at:  # a bare marker
            at = self._buffer.find(MARK, at + 1)
        if at >= 0:
            before = _angle(self._buffer, at)
        else:
            before = len(self._buffer) - (0 if final else _angle_held(self._buffer))
        if before:
            self._out.append(Noise(self._take(before)))
        return at + 1 - before if at >= 0 else 0

    def _text(self, end: int) -> None:
        if end <= 0:
            return
        raw = self._take(end)
        self._count_ticks(raw)
        self._before = (self._before + raw)[-8:]
        self._out.append(Text(raw))

    def _joins(self) -> bool:
        """Whether the text so far may end with the beginning of a marker; it is read once."""
        before, self._before = self._before, ""
        return MARK_BEGUN.search(before) is not None

    def _stray(self, end: int) -> None:
        self._ticks, self._before = 0, ""
        self._out.append(Stray(self._take(end)))

    def _count_ticks(self, raw: str) -> None:
        """Follow code fences: a run of three backticks or more opens or closes one."""
        if "`" not in raw:
            self._ticks = 0
            return
        end = 0
        for run in _TICKS.finditer(raw):
            before = self._ticks if run.start() == 0 else 0
            self._ticks = before + len(run[0])
            if before < 3 <= self._ticks:
                self._fenced = not self._fenced
            end = run.end()
        if end < len(raw):
            self._ticks = 0


def _angle(text: str, at: int) -> int:
    """Return where the ``<`` or ``</`` before a marker at ``at`` begins; ``at`` where there is none.

    A bar may stand between: models double the marker's bars now and then.
    """
    end = at - 1 if at and text[at - 1] == "｜" else at
    if text.startswith("</", end - 2) and end >= 2:
        return end - 2
    return end - 1 if end >= 1 and text[end - 1] == "<" else at


def _angle_held(text: str) -> int:
    """Return how much of the end may be the beginning of a tag."""
    found = _ANGLE_BEGUN.search(text, max(0, len(text) - 3))
    return 0 if found is None else len(found[0])
