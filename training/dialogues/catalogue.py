"""The common real tools of catalogue.toml: each use draws names, parameters and a schema."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from training.dialogues.lexicon import Rng, parts
from training.dialogues.tools import TYPE_OF_KIND, Json, Param, Tool, declare, described, spoken
from training.dialogues.values import Values

# Two tools of one group may both serve a request: they are declared together only when their
# sentences differ (`PEACEFUL`), and "no tool fits" is said only if the whole group is absent.
GROUPS = {
    "sky": "weather forecast",
    "clock": "time timezone_time now",
    "math": "add subtract multiply divide calculator bmi units random tip dice coin",
    "web": "search wikipedia news fetch_url places define contact capital distance movie",
    "talk": "email email_short message payment inbox",
    "plan": "event appointment list_events reminder timer timer_seconds alarm note todo",
    "files": "read_file write_file list_directory delete_file grep run_command run_code database image",
    "money": "stock currency exchange_rate",
    "travel": "route flight hotel whereami",
    "home": "lights thermostat music volume",
    "kitchen": "food recipe",
    "records": "order_status user_info",
    "fun": "joke translate",
}
PEACEFUL = (
    "add subtract multiply divide random",
    "read_file write_file list_directory delete_file",
    "read_file write_file run_command",
    "event reminder timer alarm note",
    "list_events todo timer",
    "email message payment",
    "stock currency",
    "flight hotel",
    "lights thermostat music",
    "order_status user_info",
    "search fetch_url capital",
    "wikipedia news",
    "joke translate",
    "food recipe",
    "random dice coin",
    "email inbox",
    "message inbox",
    "stock exchange_rate",
    "appointment reminder timer alarm",
    "lights volume",
    "flight whereami",
)
GROUP_OF = {key: group for group, keys in GROUPS.items() for key in keys.split()}
# These could answer many a question that no sentence of theirs foresees.
SERVES_ALL = {"web", "files", "math"}
_ENDING = re.compile(r"\{(\w+)\}")


@cache
def entries() -> dict[str, Json]:
    """Catalogue by key; every sentence is checked to name each required role once.

    Raises:
        ValueError: a sentence names an unknown role or lacks a required one.
    """
    text = Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8")
    out: dict[str, Json] = {}
    for entry in tomllib.loads(text)["tool"]:
        roles: dict[str, Any] = {role["key"]: role for role in entry["roles"]}
        needed = sorted(k for k, role in roles.items() if not role.get("optional"))
        for ask in entry["asks"] + entry.get("many", []):
            if sorted(_ENDING.findall(ask)) != needed:
                raise ValueError(f"catalogue {entry['key']}: {ask!r} does not name {needed}")
        if entry["key"] not in GROUP_OF:
            raise ValueError(f"catalogue {entry['key']}: in no group")
        entry["names"] = entry["names"].split()
        for role in entry["roles"]:
            role["names"] = role["names"].split()
        out[entry["key"]] = entry
    return out


@cache
def weighted_keys() -> tuple[str, ...]:
    """Keys, each repeated by its weight."""
    return tuple(k for k, e in entries().items() for _ in range(int(2 * e.get("weight", 1))))


def clash(key: str, declared: list[str]) -> bool:
    """Whether a tool cannot be declared beside others without making a request ambiguous."""
    return key in declared or any(
        GROUP_OF[key] == GROUP_OF[other]
        and not any({key, other} <= set(p.split()) for p in PEACEFUL)
        for other in declared
    )


def foreign(key: str, declared: list[str]) -> bool:
    """Whether no declared tool could serve a request for `key`."""
    groups = {GROUP_OF[d] for d in declared}
    return GROUP_OF[key] not in groups and not groups & SERVES_ALL


def tool(r: Rng, values: Values, key: str, taken: set[str]) -> Tool:
    """One declaration of a catalogue tool under a free name; its words are added to `taken`."""
    entry = entries()[key]
    name = r.pick(entry["names"])
    while name in taken:
        name = f"{r.pick(entry['names'])}_{r.whole(2, 99)}"
    about = r.pick(entry["about"]) if r.chance(0.88) else None
    taken.update((name, *parts(name), *parts(about or "")))
    params: list[Param] = []
    used: set[str] = set()
    for role in entry["roles"]:
        optional = role.get("optional", False)
        if optional and r.chance(0.5):
            continue
        # the first name is the usual one
        free = [n for n in role["names"] if n not in used]
        pname = free[0] if r.chance(0.35) else r.pick(free)
        used.add(pname)
        params.append(_param(r, role, pname, optional))
    if len(params) > 1 and r.chance(0.08):
        r.shuffle(params)
    if about and r.chance(0.2):
        about += "."
    declaration = declare(r, name, about, params, values)
    noun = spoken(key)
    return Tool(name, "get", noun, params, declaration, key=key, entry=entry)


def _param(r: Rng, role: Json, name: str, optional: bool) -> Param:
    kind, words = role["kind"], []
    if kind == "enum":
        words = role["enum"].split()
        if r.chance(0.15):
            words = words[::-1]
        schema: Json = {"type": "string", "enum": words}
        if r.chance(0.12):
            schema = {"type": "string"}
    else:
        kind_type = TYPE_OF_KIND.get(kind, "string")
        if kind_type == "number" and r.chance(0.3) and kind != "height":
            kind_type = "integer"
        if kind_type == "integer" and r.chance(0.2):
            kind_type = "number"
        if kind == "user_id" and r.chance(0.4):
            kind_type = "integer"
        schema = {"type": kind_type}
    if r.chance(0.45):
        schema = described(r, schema, r.pick(role["about"]))
    return Param(
        name, kind, schema, not optional or r.chance(0.08), spoken(name),
        tuple(role.get("say", ())), tuple(role.get("follow", ())), role["key"],
        choices=tuple(words),
    )  # fmt: skip
