"""Stop strings of a raw completion: a text ends where the first of them is complete.

The work is bounded by the text that has come, however long the stops are: how far each is met is
followed by Knuth's, Morris' and Pratt's automaton, whose table is made only as far as it is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Stops:
    """Cuts a text at the stop string that is complete first; holds what may begin one.

    Args:
        stops: none of them empty. Of two that end at the same place the one named first counts.

    Attributes:
        met: whether one was complete; `feed` is not to be called any more then.
        count: how many there are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.met = False
        self.count = len(stops)
        self._seekers = [_Seeker(stop) for stop in stops]
        self._held: deque[str] = deque()
        self._size = 0  # characters that are held
        self._offset = 0  # of the first piece, those that were let go

    def feed(self, text: str) -> str:
        """Take a piece of the text; returns what may be shown of all that came."""
        if not self._seekers or not text:
            return text
        self._held.append(text)
        self._size += len(text)
        found = [
            (end, i) for i, seeker in enumerate(self._seekers) if (end := seeker.feed(text)) > 0
        ]
        if found:
            end, i = min(found)
            self.met = True
            return self._let_go(self._size - (len(text) - end) - len(self._seekers[i].stop))
        return self._let_go(self._size - max(seeker.met for seeker in self._seekers))

    def close(self) -> str:
        """End the text; returns what was held for a stop that did not come."""
        return "" if self.met else self._let_go(self._size)

    def _let_go(self, size: int) -> str:
        out = []
        self._size -= size
        while size:
            piece, begin = self._held[0], self._offset
            if len(piece) - begin > size:
                self._offset += size
                out.append(piece[begin : self._offset])
                break
            out.append(piece[begin:])
            size -= len(piece) - begin
            self._held.popleft()
            self._offset = 0
        return "".join(out)


class _Seeker:
    """Follows one stop string through a text.

    Args:
        stop: not empty.

    Attributes:
        stop: the same.
        met: characters of its longest beginning that the text ends in.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.met = 0
        # By characters met: how many are left where the next one is not the stop's next; -1 for none,
        # that one included. One that would fail at the same character again is passed over, so that
        # a character costs a few steps at most, not as many as there are characters met.
        self._left = [-1]
        # Of so many characters of the stop as the table has rows: how many at their end, not all of
        # them, are a beginning of the stop too.
        self._border = 0

    def feed(self, text: str) -> int:
        """Take a piece of the text; returns where in it the stop is complete first, 0 for nowhere."""
        stop, met, left = self.stop, self.met, self._left
        at, end = 0, len(text)
        while at < end:
            if not met:
                at = text.find(stop[0], at)
                if at < 0:
                    break
            char = text[at]
            while met >= 0 and stop[met] != char:
                met = left[met]
            met += 1
            at += 1
            if met == len(stop):
                return at
            if met == len(left):
                self._lengthen()
        self.met = met
        return 0

    def _lengthen(self) -> None:
        """Make the table's next row."""
        stop, left, border = self.stop, self._left, self._border
        next_ = stop[len(left)]
        left.append(left[border] if stop[border] == next_ else border)
        while border >= 0 and stop[border] != next_:
            border = left[border]
        self._border = border + 1
