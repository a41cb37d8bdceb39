"""Declared tools: their names, schemas and what is known of them for asking and answering.

A tool is either invented here (a verb, a noun, a handful of parameters) or an entry of the
catalogue of common tools (catalogue.py). Both are a `Tool`, so requests and checks are one code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from training.dialogues.lexicon import Lexicon, Rng
from training.dialogues.values import Values

Json = dict[str, Any]


@dataclass(slots=True)
class Param:
    """One parameter of a tool.

    Args:
        name: property name in the schema.
        kind: kind of value: `string`, `enum`, `boolean`, `strings`, `integers`, `object`, or a
            method of `Values`.
        schema: its JSON Schema.
        required: whether the schema's `required` lists it.
        cue: the words a user names it by.
        phrases: natural ways to say a value, each with `{v}`; they name no parameter.
        follow: phrases for a follow-up question (`and in {v}?`).
        role: key of the catalogue's role, "" for invented tools.
        fields: sub-parameters of an object.
        choices: the words of an enum.
    """

    name: str
    kind: str
    schema: Json
    required: bool
    cue: str
    phrases: tuple[str, ...] = ()
    follow: tuple[str, ...] = ()
    role: str = ""
    fields: tuple[Param, ...] = ()
    choices: tuple[str, ...] = ()


@dataclass(slots=True)
class Tool:
    """A declared tool.

    Args:
        name: function name.
        verb: what it does, as a user says it.
        noun: what it does it to; its words make the tool recognisable.
        params: parameters in schema order.
        declaration: the `tools` entry of a chat-completions body.
        key: catalogue key, "" for an invented tool.
        entry: its catalogue entry, {} for an invented tool.
        opaque: the name says nothing; only the description tells what the tool does.
        words: words of the noun.
    """

    name: str
    verb: str
    noun: str
    params: list[Param]
    declaration: Json
    key: str = ""
    entry: Json = field(default_factory=dict)
    opaque: bool = False
    words: frozenset[str] = field(default_factory=frozenset)


# Parameters whose value follows from their name; every other one is drawn freely.
KIND_OF = {
    **dict.fromkeys(
        "city location address region origin destination from_city to_city venue place "
        "province village".split(),
        "place",
    ),
    **dict.fromkeys("date start_date end_date due_date delivery_date return_date expires".split(), "date"),
    **dict.fromkeys("time start_time end_time deadline".split(), "time"),
    **dict.fromkeys("recipient sender author name artist passenger actor customer owner speaker "
                    "manager member guest_name username nickname".split(), "person"),
    **dict.fromkeys("path file_path file_name filename".split(), "path"),
    **dict.fromkeys("directory folder".split(), "dirpath"),
    **dict.fromkeys("url website link image_url endpoint".split(), "url"),
    **dict.fromkeys("user_id order_id account_id customer_id device_id event_id item_id task_id "
                    "ticket_id job_id invoice_id issue_id product_id coupon code token".split(), "code"),
    **dict.fromkeys("message text body content comment note notes description instructions "
                    "prompt remark caption summary".split(), "text"),
    **dict.fromkeys("title subject playlist album movie topic headline".split(), "title"),
    **dict.fromkeys("query keyword question search".split(), "query"),
    **dict.fromkeys("task reminder action".split(), "task"),
    **dict.fromkeys("days hours minutes duration quantity count limit offset page guests retries "
                    "timeout port width height size priority level year copies attendees "
                    "max_results batch_size page_size room_number floor quarter".split(), "integer"),
    **dict.fromkeys("amount price distance weight temperature rating score threshold ratio percent "
                    "discount tax max_price min_price balance latitude longitude angle volume "
                    "speed fee cost interest factor".split(), "number"),
    **dict.fromkeys("include_details verbose notify force recursive dry_run active public urgent "
                    "overwrite debug hidden silent strict".split(), "boolean"),
    **dict.fromkeys("unit format language currency mode sort_by order_by color category class "
                    "room_type status type difficulty direction gender frequency quality "
                    "visibility".split(), "enum"),
    "email": "email", "phone": "phone", "version": "version",
}  # fmt: skip
PHRASES = {
    "city": ("in {v}", "for {v}"), "location": ("in {v}", "at {v}"), "date": ("on {v}", "for {v}"),
    "time": ("at {v}",), "start_date": ("from {v}", "starting {v}"),
    "end_date": ("until {v}", "to {v}"), "recipient": ("to {v}",), "email": ("to {v}",),
    "from_city": ("from {v}",), "to_city": ("to {v}",), "origin": ("from {v}",),
    "destination": ("to {v}",), "days": ("for {v} days",), "hours": ("for {v} hours",),
    "minutes": ("for {v} minutes",), "limit": ("up to {v}", "at most {v}"),
    "query": ("about {v}", "for {v}"), "topic": ("about {v}", "on {v}"),
    "title": ("titled {v}", "called {v}"), "name": ("named {v}", "called {v}"),
    "message": ("saying {v}",), "text": ("saying {v}",), "guests": ("for {v} guests",),
    "author": ("by {v}",), "artist": ("by {v}",), "path": ("at {v}",), "folder": ("in {v}",),
    "max_price": ("under {v}", "for less than {v}"), "user_id": ("for user {v}",),
    "order_id": ("for order {v}",), "customer_id": ("for customer {v}",),
}  # fmt: skip
TYPE_OF_KIND = {
    "integer": "integer", "int_small": "integer", "int_minutes": "integer",
    "integer_percent": "integer",
    "number": "number", "money": "number", "calc_num": "number", "temp_num": "number",
    "height": "number", "boolean": "boolean", "strings": "array", "integers": "array",
    "object": "object",
}  # fmt: skip
_FREE_KINDS = (
    "word word phrase phrase title text code place person date time email path url query exotic "
    "identifier capital filename version id pieces pieces pieces pieces tangle"
).split()
_PARAM_ABOUT = (
    "The {p}", "The {p}", "{P}", "{P}", "Value of {p}", "The {p} to use", "{P} of the {n}",
    "The {p} of the {n}", "Which {p}", "{P} to {v}", "The {p}.", "{P} for the {n}", "Sets the {p}",
    "Optional {p}", "The {p} that the user gives", "{P} (as given)", "{P}, see {w}",
)  # fmt: skip
_ABOUT = (
    "{V} {n}", "{V} the {n}", "{V} a {n}", "{V} {n} for the user", "Use this to {v} {n}",
    "{V} the {n} and return the result", "{V} the {n}.", "Tool to {v} a {n}", "Will {v} the {n}",
    "{V} any {n}", "This function will {v} the {n} of the {w}", "{V} the {n} in {w}",
    "Call this to {v} the {n}", "Helper that can {v} any {n}", "API: {v} {n}",
    "{V} the {n}. Returns a {w}.", "{V} the given {n}, or fail with {w}", "{V} one {n}",
)  # fmt: skip
_LONG_TAIL = (
    " Returns a JSON object with the {w}.", " Use only when the user asks for it.",
    " The {w} must be {w}.", " Do not use it for {w}.", " See the {w} for details.",
    " It takes a few seconds.", " Results are sorted by {w}.", " Needs the {w} permission.",
)  # fmt: skip


def capital(text: str) -> str:
    """The text with an upper-case first letter, the rest unchanged."""
    return text[:1].upper() + text[1:]


def spoken(name: str) -> str:
    """A parameter name as words: blanks for underscores and hyphens."""
    return name.replace("_", " ").replace("-", " ")


class ToolMaker:
    """Makes the invented tools of one dialogue.

    Args:
        rng: source of all randomness.
        lex: word pools.
        values: value generator over the same rng.
    """

    def __init__(self, rng: Rng, lex: Lexicon, values: Values) -> None:
        self.r, self.lex, self.values = rng, lex, values

    # ---- names
    def _verb(self) -> str:
        if not self.lex.held and self.r.chance(0.3):
            return self.lex.coin(self.r)
        return self.r.pick(self.lex.verbs)

    def _noun(self) -> str:
        if self.lex.held:
            return self.r.pick(self.lex.nouns)
        x = self.r.random()
        if x < 0.38:
            return self.lex.coin(self.r)
        return self.r.pick(self.lex.nouns if x < 0.8 else self.lex.english)

    def _name(self, verb: str, nouns: list[str]) -> str:
        words, x = [verb, *nouns], self.r.random()
        if x < 0.62:
            return "_".join(words)
        if x < 0.72:
            return verb + "".join(capital(w) for w in nouns)
        if x < 0.76:
            return "".join(capital(w) for w in words)
        if x < 0.86:
            return "-".join(words)
        if x < 0.92:
            return "_".join([*nouns, verb])
        if x < 0.94:
            return "_".join(w.upper() for w in words)
        prefix = self.lex.word(self.r)
        return f"{prefix}{self.r.pick(('__', '_', '-'))}" + "_".join(words)

    def tool(self, taken: set[str], like: Tool | None = None, few: bool = False) -> Tool:
        """A tool whose noun no word of `taken` uses; its words are added to `taken`.

        Args:
            taken: lower-case words that the dialogue's tools already own.
            like: share this tool's verb, so that the noun alone tells them apart.
            few: at most two parameters (dialogues with many tools).
        """
        r = self.r
        verb = like.verb if like and not like.key else self._verb()
        while True:
            nouns = [self._noun() for _ in range(2 if r.chance(0.22) else 1)]
            if not taken & set(nouns) and len({verb, *nouns}) == 1 + len(nouns):
                break
        if like and not like.key and r.chance(0.3):
            nouns = [nouns[0], like.noun.split(" ")[0]]
        name, opaque = self._name(verb, nouns), r.chance(0.05)
        if opaque:
            w = self.lex.word(r)
            name = r.pick((w, f"{w}_{self.lex.word(r)}", f"{w}{r.whole(1, 99)}", f"fn_{r.whole(1, 99)}",
                           f"tool{r.whole(1, 99)}", f"{w}-v{r.whole(1, 9)}"))  # fmt: skip
        if name in taken:
            name += f"_{r.whole(2, 99)}"
        taken.update((name, *nouns))
        noun = " ".join(nouns)
        about = r.pick(_ABOUT)
        about = about.replace("{V}", capital(verb)).replace("{v}", verb).replace("{n}", noun)
        if r.chance(0.12):
            about = about.rstrip(".") + "." + r.pick(_LONG_TAIL)
        about = self.values.fill(about)
        count = r.pick((0, 1, 1, 1, 1, 2, 2) if few else (0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 5))
        used: set[str] = set()
        params = [self.param(used, verb, noun) for _ in range(count)]
        if params and not any(p.required for p in params):
            params[0].required = True
        declaration = declare(
            r,
            name,
            about if opaque or not name.islower() or r.chance(0.8) else None,
            params,
            self.values,
        )
        return Tool(name, verb, noun, params, declaration, opaque=opaque, words=frozenset(nouns))

    # ---- parameters
    def _param_name(self) -> str:
        r, lex, x = self.r, self.lex, self.r.random()
        if lex.held:
            name = r.pick(lex.params) if x < 0.7 else f"{r.pick(lex.params)}_{lex.word(r)}"
        elif x < 0.5:
            name = r.pick(lex.params)
        elif x < 0.72:
            name = lex.coin(r)
        elif x < 0.86:
            name = r.pick(lex.nouns)
        elif x < 0.95:
            name = f"{lex.word(r)}_{lex.word(r)}"
        else:
            name = r.pick(lex.english)
        if "_" in name and r.chance(0.2):
            first, *rest = name.split("_")
            name = first + "".join(capital(w) for w in rest)
        return name

    def param(self, used: set[str], verb: str, noun: str, nested: bool = False) -> Param:
        """A parameter whose name and cue are not in `used`; both are added to it."""
        r = self.r
        while True:
            name = self._param_name()
            if name.lower() not in used and name not in noun.split(" "):
                break
        used.add(name.lower())
        kind = KIND_OF.get(name) or r.pick(
            ("string",) * 13 + ("integer",) * 5 + ("number",) * 3 + ("boolean", "boolean")
            + ("enum",) * 3 + (() if nested else ("strings", r.pick(("integers", "object"))))
        )  # fmt: skip
        if kind == "enum" and r.chance(0.25):
            kind = "string"
        if kind == "string":
            kind = r.pick(_FREE_KINDS)
        fields: tuple[Param, ...] = ()
        if kind == "object":
            inner: set[str] = set()
            fields = tuple(self.param(inner, verb, noun, True) for _ in range(r.whole(1, 3)))
        schema = self.schema(kind, fields)
        cue, about, hidden = spoken(name), "", not nested and r.chance(0.04)
        if hidden:  # an opaque name: only the description says what it is
            cue = self.lex.word(r) if r.chance(0.5) else f"{self.lex.word(r)} {self.lex.word(r)}"
            if cue in used:
                cue, hidden = spoken(name), False
            used.add(cue)
        if hidden or r.chance(0.35):
            about = r.pick(_PARAM_ABOUT[:4] if hidden else _PARAM_ABOUT)
            about = about.replace("{p}", cue).replace("{P}", capital(cue)).replace("{n}", noun)
            about = self.values.fill(about.replace("{v}", "use"))
            schema = described(r, schema, about)
        phrases = () if hidden or self.lex.held else PHRASES.get(name, ())
        choices = tuple(schema.get("enum", ()))
        return Param(
            name, kind, schema, r.chance(0.78), cue, phrases, fields=fields, choices=choices
        )

    def schema(self, kind: str, fields: tuple[Param, ...] = ()) -> Json:
        """JSON Schema of a kind of value."""
        r = self.r
        if kind == "enum":
            count = r.whole(2, 5)
            words: list[str] = []
            while len(words) < count:
                w = r.pick(self.lex.enums) if r.chance(0.6) else self.lex.word(r)
                if w not in words:
                    words.append(w)
            return {"type": "string", "enum": words}
        if kind == "strings":
            return {"type": "array", "items": {"type": "string"}}
        if kind == "integers":
            return {"type": "array", "items": {"type": "integer"}}
        if kind == "object":
            out: Json = {"type": "object", "properties": {p.name: p.schema for p in fields}}
            if r.chance(0.5):
                out["required"] = [p.name for p in fields]
            return out
        schema: Json = {"type": TYPE_OF_KIND.get(kind, "string")}
        if r.chance(0.06):
            if schema["type"] == "integer":
                schema["minimum"] = r.pick((0, 1, -100))
            elif kind in ("date", "email", "time"):
                schema["format"] = kind
        return schema


def described(r: Rng, schema: Json, about: str) -> Json:
    """The schema with a description, mostly last, at times first."""
    if r.chance(0.15):
        return {"description": about, **schema}
    return {**schema, "description": about}


def declare(r: Rng, name: str, about: str | None, params: list[Param], values: Values) -> Json:
    """The `tools` entry: one of the shapes that common client libraries write."""
    style = r.random()
    properties: Json = {p.name: p.schema for p in params}
    required = [p.name for p in params if p.required]
    top: Json = {}
    if style < 0.08:  # as pydantic writes models: titles, optional as a union with null
        for p in params:
            title = " ".join(capital(w) for w in spoken(p.name).split(" "))
            if p.required or p.kind in ("enum", "object", "strings", "integers"):
                properties[p.name] = {**p.schema, "title": title}
            else:
                rest = {k: v for k, v in p.schema.items() if k != "type"}
                union = [{"type": p.schema["type"]}, {"type": "null"}]
                properties[p.name] = {"anyOf": union, "default": None, "title": title, **rest}
        top = {"properties": properties}
        if required:
            top["required"] = required
        top |= {"title": capital(name), "type": "object"}
    elif style < 0.14:  # as zod writes them
        top = {"type": "object", "properties": properties}
        if required:
            top["required"] = required
        top |= {"additionalProperties": False, "$schema": "http://json-schema.org/draft-07/schema#"}
    else:
        top = {"type": "object", "properties": properties}
        if required or r.chance(0.5):
            top["required"] = required
        if style < 0.24:
            top["additionalProperties"] = False
        if style > 0.95:
            items = list(top.items())
            r.shuffle(items)
            top = dict(items)
    if not params and r.chance(0.3):
        top = {"type": "object", "properties": {}}
    function: Json = {"name": name}
    if about is not None:
        function["description"] = about
    if params or r.chance(0.8):
        function["parameters"] = top
    return {"type": "function", "function": function}
