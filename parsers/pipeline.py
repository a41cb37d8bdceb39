"""From token ids to wire chunks past the gate: detokenize, parse, judge, stitch.

Knows the order of the four; each knows its own part. Where nothing is held and no id can begin a
marker there are two short cuts: ordinary text goes to the codec as the ids it is, and the text of a
string that streams goes there escaped, both past the parser and the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from parsers.detokenize import Detokenizer, Vocabulary
from parsers.dialects import MARK_TEXT
from parsers.dsml import DsmlParser
from parsers.errors import ReplyError
from parsers.gate import ToolGate
from parsers.invoke import Finish
from parsers.policy import GatePolicy
from parsers.report import Report
from parsers.stitch import Stitch
from parsers.toolset import ToolSet
from parsers.values import ReplyFormat, ToolChoice

if TYPE_CHECKING:
    from parsers.wire import TokenLogprob, Wire


class Pipeline:
    """The gated way of one reply.

    Args:
        wire: the codec's side of the reply.
        stitch: the sink, over the same wire.
        vocabulary: of the model.
        tools: the declared tools.
        policy: what the gate does with each fault.
        choice: which calls the request asks for.
        reasoning: the output starts inside the reasoning.
        forced: the prompt has opened the block of calls.
        wanted: the JSON that an answer without calls is to be.

    Attributes:
        error: the error that the reply has to end in.
        satisfied: whether no further output is wanted.
        mark: id of the marker without which no call begins or ends.
        in_tag: whether a marker has come whose tag has not ended.
        waiting: the tokens that wait for a decision.
    """

    def __init__(
        self,
        wire: Wire,
        stitch: Stitch,
        *,
        vocabulary: Vocabulary,
        tools: ToolSet,
        policy: GatePolicy,
        choice: ToolChoice,
        reasoning: bool,
        forced: bool,
        wanted: ReplyFormat | None,
    ) -> None:
        self.error: ReplyError | None = None
        self.satisfied = False
        self._wire = wire
        self._vocabulary = vocabulary
        self.mark = vocabulary.special(MARK_TEXT)
        self._detokenizer = Detokenizer(vocabulary)
        self._parser = DsmlParser(reasoning=reasoning, forced=forced)
        self._stitch = stitch
        self.waiting = stitch.waiting
        self.gate = ToolGate(
            tools, policy, self._stitch, reasoning=reasoning, choice=choice, wanted=wanted
        )
        self._watched = vocabulary.watched
        self._flow: Callable[[str], str] | None = None
        self._idle = False
        self.in_tag = False
        self._look()

    @property
    def report(self) -> Report:
        """What the gate did."""
        return self.gate.report

    @property
    def called(self) -> bool:
        """Whether the model has called, or may have."""
        return self.gate.called or not self._parser.outside

    def receive(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> list[str]:
        """Take generated ids (no stop token among them); return the chunks' JSON."""
        gate = self.gate
        if (self._flow is not None or self._idle) and self._watched.isdisjoint(token_ids):
            if self._flow is not None:
                text = self._flow(self._vocabulary.text(token_ids))
                return self._wire.text(text) if text else []
            self._parser.skip()
            if not gate.spoke and not gate.reasoning:
                gate.spoke = not self._vocabulary.blank.issuperset(token_ids)
            return self._wire.tokens(token_ids, logprobs)
        parser, stitch = self._parser, self._stitch
        text = ""
        for token_id, logprob in zip(token_ids, logprobs or repeat(None), strict=False):
            piece = self._detokenizer.push(token_id)
            stitch.hold(token_id, logprob, piece)
            text += piece
        for event in parser.feed(text):
            gate.handle(event)
        self.error, self.satisfied = gate.error, gate.satisfied
        chunks = stitch.flush()
        self._look()
        return chunks

    def _look(self) -> None:
        """See which short cut is open: it stays so until an id is watched."""
        empty = self._stitch.empty
        self._flow = self.gate.flow if empty and self._parser.in_value else None
        self._idle = empty and self._parser.idle and self.gate.open
        self.in_tag = self._parser.in_tag

    def settle(self) -> list[str]:
        """Decide all that came as if the output ended here; more may follow."""
        self.gate.settle(self._parser.close(), "stop")
        self.error, self.satisfied = self.gate.error, self.gate.satisfied
        chunks = self._stitch.flush()
        self._look()
        return chunks

    def close(self, finish: Finish) -> list[str]:
        """End the output; return the chunks of what was held.

        Half a character at the end stays in the queue: the codec would drop it as well.
        """
        self.gate.close(self._parser.close(), finish)
        self.error, self.satisfied = self.gate.error, self.gate.satisfied
        return self._stitch.flush()
