"""Tool results and the final answers that report them.

The answer is a function of the result alone: up to five members of an object by name, a sentence
as it stands, anything else after `The result is`. So its exact text can be checked.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from training.dialogues.lexicon import Lexicon, Rng
from training.dialogues.requests import dumps, dumps_bare
from training.dialogues.tools import Json, Tool, spoken
from training.dialogues.values import Values

_SHOWN = 5
_SENTENCE = re.compile(r"[^.?!\n]*[.?!](?=\s|$)")
_KINDS = (
    "integer integer number number word word code person place title phrase status bool date time "
    "email path url money percent version exotic pieces pieces pieces tangle"
).split()


class Results:
    """Draws the tool results of one dialogue."""

    def __init__(self, rng: Rng, lex: Lexicon, values: Values) -> None:
        self.r, self.lex, self.values = rng, lex, values

    def result(self, tool: Tool, long: bool = False) -> str:
        """Text of a tool message.

        Args:
            tool: whose result it is; a catalogue tool mostly returns its own shapes.
            long: hundreds of tokens, of which the answer reports the beginning.
        """
        r, v = self.r, self.values
        if r.chance(0.05):
            what = r.pick(("not found", "timeout", "permission denied", f"unknown {v.word()}",
                           f"invalid {v.word()}", v.phrase(), f"no such {v.word()}"))  # fmt: skip
            return r.pick((f"error: {what}", f"Error: {what}", self.written({"error": what})))
        if long:
            if r.chance(0.5):
                return self.written(self.members(r.whole(6, 18)))
            return " ".join(v.sentence() for _ in range(r.whole(8, 20)))
        if tool.key and r.chance(0.7):
            return self.shaped(r.pick(tool.entry["results"]))
        x = r.random()
        if x < 0.6:
            return self.written(self.members(r.pick((1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5))))
        if x < 0.66:
            row = [self.members(r.whole(1, 2)) for _ in range(r.whole(1, 3))]
            return self.written(row)
        if x < 0.7:
            return self.written([v.word() for _ in range(r.whole(1, 4))])
        if x < 0.74:
            return self.written({self.key(): self.members(r.whole(1, 2))})
        if x < 0.78:
            return self.written({self.key(): [v.word() for _ in range(r.whole(1, 3))]})
        if x < 0.84:
            return v.sentence() if r.chance(0.6) else f"{v.sentence()} {v.sentence()}"
        if x < 0.86:
            return r.pick(("ok", "done", "success", "null", "true", "OK", "[]", "{}"))
        if x < 0.88:
            return "\n".join(v.phrase() for _ in range(r.whole(2, 3)))
        kind = r.pick(
            ("integer", "number", "place", "phrase", "code", "exotic", "date", "path", "pieces")
        )
        return str(getattr(v, kind)())

    def key(self) -> str:
        """A member name of a result object."""
        r, x = self.r, self.r.random()
        if x < 0.45:
            return r.pick(self.lex.params)
        if x < 0.6:
            return r.pick(("status", "result", "value", "name", "id", "message", "count", "total"))
        if x < 0.75:
            return r.pick(self.lex.nouns)
        return self.lex.word(r) if x < 0.9 else f"{self.lex.word(r)}_{self.lex.word(r)}"

    def members(self, count: int) -> Json:
        """An object of `count` members."""
        out: Json = {}
        while len(out) < count:
            out[self.key()] = getattr(self.values, self.r.pick(_KINDS))()
        return out

    def shaped(self, shape: str) -> str:
        """A result of a catalogue shape (see catalogue.toml)."""
        if shape.startswith("= "):
            parts = re.split(r"\{(\w+)\}", shape[2:])
            for i in range(1, len(parts), 2):
                made = self.values.make(_RENAMED.get(parts[i], parts[i]))[0]
                parts[i] = dumps_bare(made)
            return "".join(parts)
        out: Json = {}
        for member in shape.split(" "):
            key, _, kind = member.partition(":")
            out[key] = self.values.make(_RENAMED.get(kind, kind))[0]
        return self.written(out)

    def written(self, value: Any) -> str:
        """JSON as client programs write it: with blanks, compact, or indented."""
        x = self.r.random()
        if x < 0.7:
            return dumps(value)
        if x < 0.9:
            return orjson.dumps(value).decode()
        return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


_RENAMED = {
    "num": "number", "int": "integer", "sent": "status", "created": "status", "done": "status",
    "playing": "status", "time": "clock", "top": "title",
}  # fmt: skip


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_plain(v) for v in value) if value else "empty"
    if isinstance(value, dict):
        return ", ".join(f"{spoken(k)} {_plain(v)}" for k, v in value.items()) if value else "empty"
    return dumps_bare(value)


def _members(value: Json) -> str:
    shown = [f"the {spoken(k)} is {_plain(v)}" for k, v in list(value.items())[:_SHOWN]]
    if len(shown) > 1:
        shown[-2:] = [f"{shown[-2]} and {shown[-1]}"]
    return ", ".join(shown)


def answer(result: str) -> str:
    """The final answer for a tool result; deterministic."""
    text = result.strip()
    value: Any = text
    if text[:1] in "{[":
        try:
            value = orjson.loads(text)
        except ValueError:
            value = text
    if isinstance(value, dict) and value:
        first = next(iter(value))
        if first == "error":
            return f"The call failed: {_plain(value[first])}."
        out = _members(value)
    elif isinstance(value, list) and value and isinstance(value[0], dict) and value[0]:
        return f"The first result: {_members(value[0])}."
    elif isinstance(value, (dict, list)):
        out = f"the result is {_plain(value)}"
    else:
        head, _, what = text.partition(": ")
        if head in ("error", "Error") and what:
            return f"The call failed: {what}."
        sentence = _SENTENCE.match(text)
        if sentence and text[:1].isupper():
            return sentence.group()
        out = f"the result is {text.partition(chr(10))[0]}"
    return f"T{out[1:]}" + ("" if out[-1] in ".?!" else ".")
