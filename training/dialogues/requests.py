"""What a user says to have a tool called, and the arguments that are meant.

Arguments are always in schema order, so the right call is a function of the prompt. A value can be
told from its surroundings: it is quoted, or nothing in it looks like what follows it.
"""

from __future__ import annotations

import json  # noqa: TID251 - client programs write tool results with json's blanks; orjson cannot
import re
from dataclasses import dataclass, field
from typing import Any

import orjson

from training.dialogues import pools
from training.dialogues.lexicon import Rng
from training.dialogues.tools import Json, Param, Tool, capital
from training.dialogues.values import Said, Values

# Kinds whose unquoted value has no visible end but the end of the sentence.
OPEN_KINDS = frozenset(
    "phrase title text query task topic quoted_short quoted_text command pycode sql scene "
    "plural expression sentence pieces".split()
)
_LITERAL = frozenset("command pycode sql".split())
_QUOTE_CHANCE = {
    "quoted_short": 0.6, "quoted_text": 0.6, "command": 0.5, "pycode": 0.55, "sql": 0.5,
    "query": 0.25, "title": 0.4, "task": 0.15, "topic": 0.12, "scene": 0.15, "path": 0.1,
    "dirpath": 0.06, "url": 0.04, "place": 0.02, "identifier": 0.4, "word": 0.2, "text": 0.5,
    "phrase": 0.4, "exotic": 0.3, "pieces": 0.4, "tangle": 1.0,
}  # fmt: skip
_QUESTION = re.compile(
    r"(?i)(what|how|is|are|where|can|could|do|does|which|who|when|will|would|has|any|am|did)\b"
)
_SYNONYMS = {
    "get": ("show me", "fetch", "give me", "look up", "find", "tell me"),
    "fetch": ("get", "retrieve", "load"), "find": ("search for", "look for", "locate"),
    "search": ("find", "look for", "look up"), "list": ("show me", "give me", "enumerate"),
    "create": ("make", "add", "set up", "start a new"), "add": ("create", "insert", "put in"),
    "delete": ("remove", "erase", "get rid of"), "remove": ("delete", "drop", "take out"),
    "update": ("change", "modify", "edit"), "set": ("change", "put", "adjust"),
    "send": ("deliver", "mail", "submit"), "book": ("reserve", "arrange"),
    "cancel": ("call off", "drop"), "check": ("verify", "look at", "inspect"),
    "convert": ("change", "turn"), "compute": ("calculate", "work out"),
    "calculate": ("compute", "work out", "determine"), "start": ("begin", "launch", "run"),
    "stop": ("end", "halt"), "buy": ("purchase", "order"), "show": ("display", "give me"),
    "download": ("fetch", "get"), "measure": ("determine",), "repair": ("fix", "mend"),
}  # fmt: skip
_INTENTS = (
    "{v} the {n}", "{v} the {n}", "please {v} the {n}", "can you {v} the {n}", "{v} {n}",
    "I want to {v} the {n}", "I want to {v} {n}", "I need to {v} a {n}", "could you {v} {n}",
    "could you please {v} the {n}", "help me {v} the {n}", "{v} a {n}", "{v} my {n}",
    "I'd like you to {v} the {n}", "I would like to {v} a {n}", "the {n}, please {v} it",
    "I have a {n}, {v} it", "please {v} a {n} for me", "{v} this {n}", "go and {v} the {n}",
    "would you {v} the {n}", "it is time to {v} the {n}", "we have to {v} the {n}",
)  # fmt: skip
_BY_NAME = (
    "use {N}", "call {N}", "please run {N}", "{N}", "invoke the {N} tool", "use the tool {N}",
    "call the {N} function", "run {N}", "execute {N}", "use the {N} tool", "please call {N}",
)  # fmt: skip
_PAIRS = (
    "{p} {v}", "{p} {v}", "{p} {v}", "{p} {v}", "{p}: {v}", "{p}: {v}", "{p} = {v}", "{p}={v}",
    "{p} is {v}", "with {p} {v}", "with {p} {v}", "set {p} to {v}", "using {p} {v}",
    "the {p} is {v}", "the {p} should be {v}", "{p} should be {v}", "use {p} {v}", "for {p} {v}",
)  # fmt: skip
_VALUE_FIRST = ("use {v} as the {p}", "{v} for the {p}", "{v} as {p}", "{v} is the {p}")
_JOINS = (" ", " ", " ", ", ", ": ", " with ", ". ", " - ", "\n")
_SEPARATORS = (", ", ", ", ", ", ", ", ", ", " ", "; ", " and ", ", and ", "\n")


@dataclass(slots=True)
class Ask:
    """A request for one call.

    Args:
        tool: the tool meant.
        args: arguments in schema order.
        text: what the user says, without a final full stop.
        open_end: the text ends with an unquoted value that only the end of the sentence ends.
        literal_end: the last value is unquoted code: no punctuation may follow it.
        raw_start: the text begins with a value: its first letter stays as it is.
        kinds: kind of value by argument name.
    """

    tool: Tool
    args: Json
    text: str
    open_end: bool = False
    literal_end: bool = False
    raw_start: bool = False
    kinds: dict[str, str] = field(default_factory=dict)


class Asker:
    """Makes the requests of one dialogue."""

    def __init__(self, rng: Rng, values: Values, held: bool) -> None:
        self.r, self.values, self.held = rng, values, held
        self._question = False  # the request being made is a question: its ? is no value's

    # ---- values
    def value(self, p: Param) -> Said:
        """A value of the parameter's type and the words for it."""
        r, kind = self.r, p.kind
        if kind == "enum":
            choice = r.pick(p.choices)
            odds = 0.0 if self.held else 0.3 if p.role else 0.06
            said = capital(choice) if r.chance(odds) else choice
            return choice if "enum" in p.schema else said, said
        if kind == "strings":
            words = [self.values.word() for _ in range(r.whole(1, 4))]
            return words, self._said_list(words)
        if kind == "integers":
            numbers = [self.values.integer() for _ in range(r.whole(1, 4))]
            return numbers, self._said_list([str(n) for n in numbers])
        if kind == "object":
            made = {f.name: self.value(f)[0] for f in p.fields}
            return made, self._said_object(p, made)
        if kind == "boolean":
            kind = "bool"
        if kind in ("quoted_short", "quoted_text"):
            kind = r.pick(("title", "phrase", "text")) if kind == "quoted_short" else "text"
        if kind == "dirpath" and p.role and r.chance(0.07):
            return ".", r.pick(pools.HERE)
        value, said = self.values.make(kind)
        kind_type = p.schema.get("type")
        if kind_type == "integer" and not isinstance(value, int):
            value = r.whole(1, 500)
            said = str(value)
        elif kind_type == "string" and not isinstance(value, str):
            value = said = str(value)
        return value, said

    def _said_list(self, words: list[str]) -> str:
        r = self.r
        if r.chance(0.25):
            return "[" + ", ".join(words) + "]"
        if len(words) > 1 and r.chance(0.5):
            return ", ".join(words[:-1]) + " and " + words[-1]
        return ", ".join(words)

    def _said_object(self, p: Param, made: Json) -> str:
        if self.r.chance(0.5):
            return dumps(made)
        inner = [f"{f.cue} {dumps_bare(made[f.name])}" for f in p.fields]
        return "(" + ", ".join(inner) + ")"

    def quoted(self, text: str) -> str:
        """The text in quotes that do not occur in it."""
        marks = [m for m in ('"', '"', "'", "“”", "`") if m[0] not in text and m[-1] not in text]
        mark = self.r.pick(marks or ["«»"])
        return mark[0] + text + mark[-1]

    def _said(self, p: Param, made: Said, last: bool, after: str = "") -> tuple[str, bool]:
        """The words for a value, quoted where its end could not be seen -> (words, open end)."""
        r, said = self.r, made[1]
        if p.schema.get("type", "string") != "string" or p.kind == "enum":
            return said, False
        blank = " " in said
        if made[0] != said:
            return said, p.kind in OPEN_KINDS
        odds = _QUOTE_CHANCE.get(p.kind, 0.12)
        if blank and p.kind in OPEN_KINDS and not last:
            odds = max(odds, 0.55)
        risky = (blank and after.startswith("{")) or (self._question and said[-1:] in "?!")
        following = after.split(" ", 1)[0].strip(",.:;?")
        risky = risky or (blank and not last and bool(following) and following in said.split(" "))
        risky = (
            risky
            or p.kind == "tangle"
            or "\n" in said
            or said[-1:] in ".,:;"
            or said[:1] in "'\"`([{"
        )
        risky = risky or (not last and any(c in said for c in (", ", "; ", ": ", " and ")))
        if risky or r.chance(odds):
            return self.quoted(said), False
        return said, blank or p.kind in OPEN_KINDS

    # ---- one request
    def ask(self, tool: Tool, by_name: bool | None = None) -> Ask:
        """A request that names a value for every required and some optional parameters."""
        r = self.r
        if tool.key and not (by_name or r.chance(0.08)):
            return self._catalogue_ask(tool)
        chosen = [p for p in tool.params if p.required or r.chance(0.4)]
        made = {p.name: self.value(p) for p in chosen}
        order = chosen[:]
        if len(order) > 1 and r.chance(0.35):
            r.shuffle(order)
        if by_name or tool.key or r.chance(0.1):
            intent = r.pick(_BY_NAME).replace("{N}", tool.name)
        else:
            verb = tool.verb
            if not self.held and r.chance(0.2):
                verb = r.pick(_SYNONYMS.get(verb, (verb,)))
            intent = r.pick(_INTENTS).replace("{v}", verb).replace("{n}", tool.noun)
        self._question = bool(_QUESTION.match(intent))
        ask = Ask(tool, {p.name: made[p.name][0] for p in chosen}, intent)
        ask.kinds = {p.name: p.kind for p in chosen}
        ask.raw_start = intent.startswith(tool.name)
        if order:
            self._pairs(ask, order, made, alone=len(order) == 1 and len(tool.params) == 1)
        return ask

    def _pairs(self, ask: Ask, order: list[Param], made: dict[str, Said], alone: bool) -> None:
        r = self.r
        lists = any(p.kind in ("strings", "integers", "object") for p in order)
        sep = r.pick(("; ", "; ", "\n", ". ")) if lists else r.pick(_SEPARATORS)
        pieces = []
        for i, p in enumerate(order):
            last = i == len(order) - 1
            said, ask.open_end = self._said(p, made[p.name], last or sep in ("; ", "\n"))
            if ask.open_end and not last and sep in (" ", " and "):
                said, ask.open_end = self.quoted(said), False
            pieces.append(self._pair(p, made[p.name][0], said, alone))
            ask.literal_end = ask.open_end and p.kind in _LITERAL
        join = r.pick(_JOINS)
        if len(pieces) > 1 and sep == ", " and r.chance(0.4):
            body = ", ".join(pieces[:-1]) + " and " + pieces[-1]
        else:
            body = sep.join(pieces)
        if join.endswith((" ", "\n")) and body.startswith("and "):
            body = body[4:]
        if join == " with " and body.startswith(("with ", "use ", "using ", "set ", "for ")):
            join = " "
        ask.text += join + body

    def _pair(self, p: Param, value: Any, said: str, alone: bool) -> str:
        r = self.r
        cue = p.cue if r.chance(0.65) else p.name
        if p.kind == "boolean":
            x = r.random()
            if x < 0.25:
                return f"{'enable' if value else 'disable'} {cue}"
            if x < 0.5:
                return f"{'with' if value else 'without'} {cue}"
            said = r.pick(
                ("true", "true", "yes", "on") if value else ("false", "false", "no", "off")
            )
            return r.pick(("{p} {v}", "{p}: {v}", "{p}={v}", "set {p} to {v}", "{p} is {v}")).replace(
                "{p}", cue
            ).replace("{v}", said)  # fmt: skip
        if p.phrases and r.chance(0.5):
            return r.pick(p.phrases).replace("{v}", said).strip(", ")
        if alone and p.kind not in ("strings", "integers", "object") and r.chance(0.3):
            return r.pick(("{v}", "for {v}", "with {v}", "{v}")).replace("{v}", said)
        pattern = r.pick(_VALUE_FIRST) if r.chance(0.05) else r.pick(_PAIRS)
        if "{p}={v}" in pattern and r.chance(0.5):
            cue = p.name
        return pattern.replace("{p}", cue).replace("{v}", said)

    def _catalogue_ask(self, tool: Tool) -> Ask:
        r = self.r
        pattern = r.pick(tool.entry["asks"])
        self._question = bool(_QUESTION.match(pattern))
        by_role = {p.role: p for p in tool.params}
        extra = [p for p in tool.params if "{" + p.role + "}" not in pattern]
        extra = [p for p in extra if p.phrases and (p.required or r.chance(0.4))]
        made: dict[str, Said] = {}
        out: list[str] = []
        open_end = literal_end = False
        rest = pattern
        while rest:
            head, brace, tail = rest.partition("{")
            out.append(head)
            if not brace:
                open_end = literal_end = open_end and not head
                break
            role, _, rest = tail.partition("}")
            p = by_role[role]
            value, said = self.value(p)
            while role in ("to", "b") and said in [s for _, s in made.values()]:
                value, said = self.value(p)
            made[p.name] = (value, said)
            last = not rest.strip("?.!") and not extra
            after = rest.lstrip() if rest else "in for with at" if extra else ""
            said, open_end = self._said(p, made[p.name], last, after)
            literal_end = open_end and p.kind in _LITERAL and not rest
            out.append(said)
        text = "".join(out)
        for p in extra:
            value, said = self.value(p)
            made[p.name] = (value, said)
            said, open_end = self._said(p, made[p.name], p is extra[-1])
            phrase = r.pick(p.phrases).replace("{v}", said)
            text += phrase if phrase.startswith(",") else " " + phrase
            literal_end = open_end and p.kind in _LITERAL
        args = {p.name: made[p.name][0] for p in tool.params if p.name in made}
        kinds = {p.name: p.kind for p in tool.params if p.name in made}
        return Ask(tool, args, text, open_end, literal_end, pattern.startswith("{"), kinds)

    # ---- several calls said in one breath, follow-ups
    def several(self, tool: Tool, count: int) -> list[Ask] | None:
        """`the weather in Paris and Rome`: calls that differ in one value, or None."""
        r = self.r
        needed = [p for p in tool.params if p.required]
        if not tool.key or len(needed) != 1 or not needed[0].follow:
            return None
        p = needed[0]
        if p.kind in OPEN_KINDS:
            return None
        made: list[Said] = []
        while len(made) < count:
            one = self.value(p)
            if one not in made and "," not in one[1] and " and " not in one[1]:
                made.append(one)
        said = [s for _, s in made]
        lead = r.pick(p.follow)
        glue = r.pick((" and ", " and ", " and also ", " and " + lead.replace("{v}", "")))
        text = ", ".join(said[:-1]) + glue + said[-1]
        many = tool.entry.get("many")
        pattern = r.pick(many) if many and r.chance(0.3) else r.pick(tool.entry["asks"])
        text = pattern.replace("{" + p.role + "}", text)
        kinds = {p.name: p.kind}
        asks = [Ask(tool, {p.name: v}, "", kinds=kinds) for v, _ in made]
        asks[0].text, asks[0].raw_start = text, pattern.startswith("{")
        return asks

    def same_place(self, first: Tool, second: Tool) -> list[Ask] | None:
        """`the time in Rome and what is the weather there`: two calls for one place, or None."""
        places = [[p for p in t.params if p.required] for t in (first, second)]
        if not second.entry.get("there") or any([p.kind for p in ps] != ["place"] for ps in places):
            return None
        ask = self.ask(first, by_name=False)
        if list(ask.args) != [places[0][0].name]:
            return None
        p = places[1][0]
        args, text = {p.name: next(iter(ask.args.values()))}, self.r.pick(second.entry["there"])
        return [ask, Ask(second, args, text, kinds={p.name: p.kind})]

    def follow_up(self, before: Ask) -> Ask | None:
        """`and in Berlin?` after a call with one argument: the same call anew, or None."""
        r = self.r
        params = [p for p in before.tool.params if p.name in before.args]
        if len(params) != 1 or not before.tool.key or not params[0].follow:
            return None
        p = params[0]
        value, said = self.value(p)
        self._question = True
        said, open_end = self._said(p, (value, said), True)
        lead = r.pick(
            ("and ", "And ", "and ", "now ", "what about ", "how about ", "and what about ")
        )
        phrase = said if lead.strip().endswith("about") else r.pick(p.follow).replace("{v}", said)
        text = lead + phrase
        literal = open_end and p.kind in _LITERAL
        kinds = {p.name: p.kind}
        return Ask(before.tool, {p.name: value}, text, open_end, literal, True, kinds)

    def finish(self, ask: Ask, text: str | None = None) -> str:
        """The user's message: case, politeness, punctuation and small additions."""
        r = self.r
        out = ask.text if text is None else text
        question = bool(_QUESTION.match(out))
        safe = not ask.open_end and not ask.literal_end
        if not question and r.chance(0.06) and not ask.raw_start:
            out = "please " + out
        if safe and r.chance(0.08):
            out += r.pick((" please", ", please", ", thanks", " for me", " now"))
        if r.chance(0.55) and not ask.raw_start:
            out = capital(out)
        ended = False
        if not ask.literal_end and out[-1:] not in "?!.":
            if question and r.chance(0.7):
                out, ended = out + "?", True
            elif r.chance(0.3):
                out, ended = out + ".", True
        if r.chance(0.14):
            out = self._opening() + out
        if (ended or out[-1:] in "?!") and r.chance(0.12):
            out += " " + self._closing()
        elif r.chance(0.04):
            out += "\n" + self._closing()
        return out

    def _opening(self) -> str:
        r, v = self.r, self.values
        return r.pick((
            "Hi! ", "Hello, ", "Hey, ", "hi, ", "Hey there. ", "Good morning. ", "I have a question. ",
            "Next task. ", "One more thing: ", "OK, ", "ok ", "so, ", "Quick question: ", "Hi there!\n",
            f"I am {v.given()}. ", f"My name is {v.person()}. ", f"I am in {v.city()} now. ",
            f"It is {v.clock()}. ", f"{capital(v.phrase())}. ", "Now ", "Then ", "Dear assistant, ",
        ))  # fmt: skip

    def _closing(self) -> str:
        r, v = self.r, self.values
        return r.pick((
            "Thanks!", "Thank you.", "Thanks in advance.", "It is urgent.", "No rush.", "Please hurry.",
            f"I am {v.given()}.", f"My name is {v.person()}.", "Be quick.", "That is all.",
            f"{capital(v.phrase())}.", "Let me know.", "I need it today.",
        ))  # fmt: skip


def dumps(value: Any) -> str:
    """JSON with blanks after commas and colons, non-ASCII kept."""
    return json.dumps(value, ensure_ascii=False)


def dumps_bare(value: Any) -> str:
    """A string as it is, anything else as JSON."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()
