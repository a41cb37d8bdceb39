"""Puts the gate's decisions into the codec's input: the model's own tokens, or text of ours.

Knows the queue of tokens not yet decided and the codec's ``Wire``; knows no rule. Text and
reasoning go on as the very tokens they came in, so their logprobs survive and only real special
tokens are markers. Calls are re-spelled as text: the codec gives tool markup no logprobs anyway,
and its parser splices a non-string parameter into the arguments as it stands. So one parameter
with the first member's name carries the whole inside of the arguments, in JSON that was checked:

    <M invoke name="f">
    <M parameter name="city" string="false">"Oslo", "days": 3</M parameter>
    </M invoke>                                     =>  {"city": "Oslo", "days": 3}
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from parsers.detokenize import Vocabulary
from parsers.dialects import MARK_TEXT, THINK_END_TEXT, Dialect, spell
from parsers.jsontext import key_text

if TYPE_CHECKING:
    from parsers.wire import TokenLogprob, Wire

_Held = tuple[int, "TokenLogprob | None", str]


class Stitch:
    """The gate's sink on the way to the wire.

    Args:
        wire: where chunks come from.
        vocabulary: of the model.
        dialect: how calls are spelled for the codec.
        aliases: names that calls are written under, where not their own.
        names: takes the real names of the calls, in order.

    Attributes:
        waiting: the tokens that wait for a decision.
    """

    def __init__(
        self,
        wire: Wire,
        vocabulary: Vocabulary,
        dialect: Dialect,
        *,
        aliases: Mapping[str, str] | None = None,
        names: list[str] | None = None,
    ) -> None:
        self._wire = wire
        self._vocabulary = vocabulary
        self._dialect = dialect
        self._aliases = aliases or {}
        self._names = names
        self.waiting: deque[_Held] = deque()
        self._offset = 0  # characters of the first token that are decided
        self._passed = 0  # characters after those that may pass, the token not being whole yet
        self._halves = 0  # tokens before the first that has text: half characters, unknown ids
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._markup: list[str] = []
        self._chunks: list[str] = []
        self._block_open = False

    @property
    def empty(self) -> bool:
        """Whether no token waits for a decision."""
        return not self.waiting

    def hold(self, token_id: int, logprob: TokenLogprob | None, text: str) -> None:
        """Take a token into the queue; ``text`` is what it added to the parser's text."""
        self.waiting.append((token_id, logprob, text))

    def flush(self) -> list[str]:
        """Push what was decided and return the chunks that came of it."""
        self._push_ids()
        self._push_markup()
        chunks, self._chunks = self._chunks, []
        return chunks

    # Sink

    def verbatim(self, size: int) -> None:
        """See ``parsers.sink``."""
        self._passed += size
        queue = self.waiting
        while head := self._head():
            left = len(head) - self._offset
            if left > self._passed:
                return
            if self._offset:
                self._respell(left)
            else:
                self._passed -= left
                for _ in range(self._halves + 1):
                    token_id, logprob, _text = queue.popleft()
                    self._emit(token_id, logprob)

    def drop(self, size: int) -> None:
        """See ``parsers.sink``."""
        if not size:
            return
        if self._passed:
            self._respell(self._passed)
        while size and (head := self._head()):
            step = min(size, len(head) - self._offset)
            self._advance(step)
            size -= step

    def say(self, text: str) -> None:
        """See ``parsers.sink``."""
        for token_id in self._vocabulary.spell(text):
            self._emit(token_id, None)

    def end_reasoning(self) -> None:
        """See ``parsers.sink``."""
        self._emit(self._vocabulary.special(THINK_END_TEXT), None)

    def open_block(self) -> None:
        """See ``parsers.sink``."""
        if not self._block_open:
            # The marker as a token: the codec lets text overtake half a character it holds.
            self._block_open = True
            for token_id in self._vocabulary.spell("<"):
                self._emit(token_id, None)
            self._emit(self._vocabulary.special(MARK_TEXT), None)
            self._mark(self._dialect.opening().removeprefix(f"<{MARK_TEXT}"))

    def open_call(self, name: str) -> None:
        """See ``parsers.sink``."""
        self.open_block()
        if self._names is not None:
            self._names.append(name)
        self._mark(self._dialect.invoke(self._aliases.get(name, name)))

    def key(self, name: str, *, first: bool) -> None:
        """See ``parsers.sink``."""
        key = key_text(name)
        self._mark(self._dialect.parameter(key) if first else f', "{key}": ')

    def value(self, text: str) -> None:
        """See ``parsers.sink``."""
        self._mark(text)

    def close_call(self, *, empty: bool) -> None:
        """See ``parsers.sink``."""
        if not empty:
            self._mark(self._dialect.end("parameter"))
        self._mark(self._dialect.end("invoke"))

    # Output, in order

    def _head(self) -> str:
        """Return the text of the first token that has some, and count the halves before it."""
        for i, (_id, _logprob, text) in enumerate(self.waiting):
            if text:
                self._halves = i
                return text
        return ""

    def _respell(self, size: int) -> None:
        """Write the passed part of a token whose other part does not pass with it."""
        text = self._head()
        self.say(spell(text[self._offset : self._offset + size]))
        self._passed -= size
        self._advance(size)

    def _advance(self, size: int) -> None:
        """Go on by some characters of the first token; drop it when it is used up."""
        self._offset += size
        if self._offset == len(self._head()):
            for _ in range(self._halves + 1):
                self.waiting.popleft()
            self._offset = 0

    def _emit(self, token_id: int, logprob: TokenLogprob | None) -> None:
        if self._markup:
            self._push_markup()
        if self._ids and (logprob is None) != (not self._logprobs):
            self._push_ids()
        self._ids.append(token_id)
        if logprob is not None:
            self._logprobs.append(logprob)

    def _mark(self, text: str) -> None:
        if self._ids:
            self._push_ids()
        self._markup.append(text)

    def _push_ids(self) -> None:
        if self._ids:
            if not self._wire.finished:
                self._chunks += self._wire.tokens(self._ids, self._logprobs or None)
            self._ids, self._logprobs = [], []

    def _push_markup(self) -> None:
        if self._markup:
            if not self._wire.finished:
                self._chunks += self._wire.text("".join(self._markup))
            self._markup = []
