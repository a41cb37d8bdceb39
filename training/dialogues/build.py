"""One dialogue from one seed.

Training and evaluation draw from disjoint ranges of seeds, and held-out evaluation also from
disjoint words.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from training.dialogues import catalogue, chatter
from training.dialogues.lexicon import Lexicon, Rng, vocabulary_pieces
from training.dialogues.requests import Ask, Asker, dumps
from training.dialogues.results import Results, answer
from training.dialogues.tools import Json, Tool, ToolMaker
from training.dialogues.values import Values

MODEL = "DeepSeek-V4.1-Flash"
_EVALUATION = 1 << 60  # seeds of a split start at a multiple of this
_DEMO = Path(__file__).resolve().parent.parent / "demo_questions.jsonl"


class Split(enum.IntEnum):
    """Which seeds and words a dialogue is made from."""

    TRAIN = 0
    IN_DISTRIBUTION = 1  # unseen seeds, training words
    HELD_OUT = 2  # unseen seeds, names and values of held-out words only
    TEACHER = 3  # the small fixed set of the teacher-forced test


@dataclass(slots=True)
class Turn:
    """What one assistant message of a dialogue is.

    Args:
        index: its place in the messages.
        kind: `call`, `answer` (after a tool result), `chat` or `decline`.
        kinds: per call, the kind of value by argument name.
        forced: the turn can be asked for with `tool_choice: "required"`.
    """

    index: int
    kind: str
    kinds: list[dict[str, str]] = field(default_factory=list)
    forced: bool = False


@dataclass(slots=True)
class Dialogue:
    """A finished dialogue.

    Args:
        body: chat-completions body whose messages end with an assistant message.
        turns: one entry per assistant message.
        thinking: whether the assistant reasons.
        tags: facts for the breakdown of scores (`tools`, `style`).
    """

    body: Json
    turns: list[Turn]
    thinking: bool
    tags: dict[str, Any]


@cache
def _lexicon(held: bool, pieces: bool) -> Lexicon:
    return Lexicon(held, vocabulary_pieces() if pieces else ())


@cache
def demo_texts() -> frozenset[str]:
    """User messages of the demo questions: no dialogue may contain one of them."""
    if not _DEMO.exists():
        return frozenset()
    rows = (orjson.loads(line) for line in _DEMO.read_bytes().splitlines() if line)
    return frozenset(
        m["content"].lower() for row in rows for m in row["messages"] if m["role"] == "user"
    ) - {said for said, _ in chatter.SMALL_TALK}  # fmt: skip


def make(seed: int, split: Split = Split.TRAIN, pieces: bool = True) -> Dialogue:
    """The dialogue of a seed; the same seed and split always give the same one.

    Args:
        seed: from 0 to 2**60 - 1.
        split: TRAIN for training, any other for evaluation.
        pieces: invent words from the shipped tokenizer's tokens too; False while it is made.

    Raises:
        ValueError: the seed lies outside the split's range.
    """
    if not 0 <= seed < _EVALUATION:
        raise ValueError(f"seed {seed} is not within 0..{_EVALUATION - 1}")
    rng = Rng(int(split) * _EVALUATION + seed)
    while True:
        dialogue = _Builder(rng, _lexicon(split is Split.HELD_OUT, pieces)).dialogue()
        users = (m["content"].lower() for m in dialogue.body["messages"] if m["role"] == "user")
        if not any(u in demo_texts() for u in users):
            return dialogue


def _owned(key: str, tools: list[Tool]) -> bool:
    """Whether an invented tool already owns a word of the catalogue tool's name."""
    return any(t.words & set(key.split("_")) for t in tools)


class _Builder:
    def __init__(self, rng: Rng, lex: Lexicon) -> None:
        self.r, self.held = rng, lex.held
        self.values = Values(rng, lex)
        self.maker = ToolMaker(rng, lex, self.values)
        self.asker = Asker(rng, self.values, lex.held)
        self.results = Results(rng, lex, self.values)
        self.taken: set[str] = set()
        self.messages: list[Json] = []
        self.turns: list[Turn] = []
        self.long = rng.chance(0.03)
        self.thinking = rng.chance(0.8)
        self.calls = 0

    # ---- tools
    def _tools(self) -> list[Tool]:
        r = self.r
        if self.long:
            count = r.whole(3, 8)
        else:
            count = r.pick((0, *(1,) * 7, *(2,) * 7, *(3,) * 5, *(4,) * 3, 5, 5, 6, 7, 8))
        # which share of the tools are common real ones
        common = 0.0 if self.held else r.pick((0.0, 0.0, 0.5, 1.0, 1.0))
        tools: list[Tool] = []
        for _ in range(count):
            if r.chance(common):
                declared = [t.key for t in tools if t.key]
                key = r.pick(catalogue.weighted_keys())
                if not catalogue.clash(key, declared) and not _owned(key, tools):
                    tools.append(catalogue.tool(r, self.values, key, self.taken))
                    continue
            like = r.pick(tools) if tools and r.chance(0.3) else None
            tools.append(self.maker.tool(self.taken, like, few=count > 3))
        r.shuffle(tools)
        return tools

    # ---- assistant messages
    def _assistant(self, kind: str, reasoning: str, content: str, **more: Any) -> None:
        message: Json = {"role": "assistant", "content": content}
        if self.thinking:
            message["reasoning_content"] = reasoning
        message.update(more.pop("extra", {}))
        self.turns.append(Turn(len(self.messages), kind, **more))
        self.messages.append(message)

    def _user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def _call(self, asks: list[Ask]) -> None:
        """The call, its results and the final answer."""
        reasoning = " ".join(
            f"I should call {a.tool.name} with {', '.join(a.args)}."
            if a.args
            else f"I should call {a.tool.name}."
            for a in asks
        )
        calls = []
        for a in asks:
            self.calls += 1
            function = {"name": a.tool.name, "arguments": dumps(a.args)}
            calls.append({"id": f"call_{self.calls}", "type": "function", "function": function})
        self._assistant(
            "call", reasoning, "", kinds=[a.kinds for a in asks], forced=not self.thinking,
            extra={"tool_calls": calls},
        )  # fmt: skip
        results = [self.results.result(a.tool, self.long and self.r.chance(0.5)) for a in asks]
        for call, result in zip(calls, results, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        answers = " ".join(answer(result) for result in results)
        self._assistant("answer", "I have the result.", answers)

    # ---- turns
    def _turn(self, tools: list[Tool]) -> Ask | None:
        """One user message and what follows; the ask of a single call, for a follow-up."""
        r, x = self.r, self.r.random()
        if not tools:
            x *= 0.125  # small talk and echoes take the place of calls
        if x < 0.045:
            said, reply = chatter.small_talk(r)
            self._user(said)
            self._assistant("chat", chatter.THINK_CHAT, reply)
            return None
        if x < 0.06:
            said, reply = chatter.echo(r, self.values)
            self._user(said)
            self._assistant("chat", chatter.THINK_CHAT, reply)
            return None
        if x < 0.125:
            self._user(self._unfitting(tools))
            self._assistant("decline", chatter.THINK_NO_TOOL, chatter.NO_TOOL)
            return None
        if x < 0.14 and self._ask_back(tools):
            return None
        count = 1 if x < 0.88 else 2 if x < 0.98 else 3
        asks = self._asks(tools, count)
        self._user(self._joined(asks))
        self._call(asks)
        return asks[0] if len(asks) == 1 else None

    def _ask_back(self, tools: list[Tool]) -> bool:
        """A wish for a common tool without the values that it needs; whether there is such a tool."""
        vague = [t for t in tools if t.entry.get("bare") and any(p.required for p in t.params)]
        if not vague:
            return False
        tool = self.r.pick(vague)
        missing = " and the ".join(p.cue for p in tool.params if p.required)
        self._user(self.asker.finish(Ask(tool, {}, self.r.pick(tool.entry["bare"]))))
        reasoning = chatter.THINK_ASK_BACK.format(missing)
        self._assistant("chat", reasoning, chatter.ASK_BACK.format(missing))
        return True

    def _unfitting(self, tools: list[Tool]) -> str:
        """A request that no declared tool serves, at times one that nearly does."""
        r = self.r
        declared = [t.key for t in tools if t.key]
        keys = [] if self.held else [
            k for k in (r.pick(catalogue.weighted_keys()) for _ in range(3))
            if catalogue.foreign(k, declared) and not _owned(k, tools)
        ]  # fmt: skip
        if keys and r.chance(0.5):
            asked = catalogue.tool(r, self.values, keys[0], set(self.taken))
            return self.asker.finish(self.asker.ask(asked, by_name=False))
        groups = {catalogue.GROUP_OF[d] for d in declared}
        if r.chance(0.3) and not groups & {"web", "fun", "files", "kitchen"}:
            return chatter.unserved(r, self.values)
        like = r.pick(tools) if tools and r.chance(0.4) else None
        asked = self.maker.tool(set(self.taken), None)
        if like and not like.key:  # the near miss: a declared verb, an undeclared noun
            asked.verb = like.verb
        asked.key, asked.opaque = "", False
        ask = self.asker.ask(asked)
        return self.asker.finish(ask)

    def _asks(self, tools: list[Tool], count: int) -> list[Ask]:
        tool = self.r.pick(tools)
        if count > 1 and self.r.chance(0.5):
            same = self.asker.several(tool, count)
            if same:
                return same
        if count == 2:
            pair = self.asker.same_place(tool, self.r.pick(tools))
            if pair:
                return pair
        asks = [self.asker.ask(tool)]
        while len(asks) < count:
            asks.append(self.asker.ask(self.r.pick(tools)))
        return asks

    def _joined(self, asks: list[Ask]) -> str:
        r = self.r
        if len(asks) == 1 or not asks[1].text:
            return self.asker.finish(asks[0])
        text = asks[0].text
        for before, ask in pairwise(asks):
            clear = before.open_end or before.literal_end
            glue = r.pick(
                ("\n", "\nand ", "\nAlso ", "; ") if clear
                else (". Also ", ", then ", " and also ", ". Then ", "\n", "; ", " and then ", ", and ", " and ")
            )  # fmt: skip
            text += glue + ask.text
        whole = Ask(
            asks[0].tool, {}, text, asks[-1].open_end, asks[-1].literal_end, asks[0].raw_start
        )
        return self.asker.finish(whole)

    def dialogue(self) -> Dialogue:
        """Build it."""
        r = self.r
        tools = self._tools()
        if r.chance(0.85 if self.long else 0.42):
            text = chatter.system_text(r, self.values, self.long or r.chance(0.15))
            self.messages.append({"role": "system", "content": text})
        turns = r.whole(1, 4) if self.long else r.pick((1,) * 10 + (2,) * 6 + (3,) * 3 + (4,))
        last: Ask | None = None
        for _ in range(turns):
            again = self.asker.follow_up(last) if last and r.chance(0.5) else None
            if again:
                self._user(self.asker.finish(again))
                self._call([again])
                last = again
            else:
                last = self._turn(tools)
        body: Json = {"model": MODEL, "messages": self.messages}
        if tools:
            body["tools"] = [t.declaration for t in tools]
        if not self.thinking:
            body["thinking"] = {"type": "disabled"}
        elif r.chance(0.25):
            body["reasoning_effort"] = r.pick(("low", "minimal", "high", "max"))
        tags = {"tools": len(tools), "long": self.long, "opaque": any(t.opaque for t in tools)}
        return Dialogue(body, self.turns, self.thinking, tags)
