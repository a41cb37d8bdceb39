"""Reads case files, checks them against the schema, and expands cases to variants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from jsonschema import Draft202012Validator

from conformance.model import (
    DIALECTS,
    MODES,
    PROTOCOLS,
    Case,
    Dialect,
    Level,
    Protocol,
    Script,
    Variant,
)

FOLDER = Path(__file__).parent / "cases"
NOT_CASES = {"case.schema.json", "tools.json"}


class CaseError(ValueError):
    """A case file that cannot be used; the message names file, case and fault."""


def load_cases(extra: Iterable[Path] = ()) -> list[Case]:
    """Reads the suite's own cases and those of extra folders or files.

    Args:
        extra: Folders (all *.json below) or single files.

    Returns:
        All cases, sorted by id.

    Raises:
        CaseError: For a file that breaks the schema, a repeated id, or a case without a source.
    """
    validator = Draft202012Validator(orjson.loads((FOLDER / "case.schema.json").read_bytes()))
    cases: dict[str, Case] = {}
    for root in (FOLDER, *extra):
        if not root.exists():
            raise CaseError(f"{root}: no such file or folder")
        for path in sorted(root.rglob("*.json")) if root.is_dir() else [root]:
            if path.name in NOT_CASES:
                continue
            for case in read_file(path, validator):
                if case.id in cases:
                    raise CaseError(f"{path}: case {case.id} is also in {cases[case.id].file}")
                cases[case.id] = case
    return [cases[name] for name in sorted(cases)]


def load_tools() -> dict[str, Mapping[str, Any]]:
    """The tool catalogue that cases name tools from."""
    tools: dict[str, Mapping[str, Any]] = orjson.loads((FOLDER / "tools.json").read_bytes())
    return tools


def read_file(path: Path, validator: Draft202012Validator) -> Iterator[Case]:
    """Yields the cases of one file.

    Raises:
        CaseError: With the place of the fault.
    """
    try:
        data = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise CaseError(f"{path}: not JSON: {error}") from None
    for fault in validator.iter_errors(data):
        where = "/".join(map(str, fault.absolute_path)) or "top"
        name = ""
        if len(fault.absolute_path) > 1 and fault.absolute_path[0] == "cases":
            name = f" (case {data['cases'][fault.absolute_path[1]].get('id')})"
        raise CaseError(f"{path}: {where}{name}: {fault.message[:300]}")
    defaults = data.get("defaults", {})
    for raw in data["cases"]:
        yield _case(defaults | raw, path)


def _case(raw: Mapping[str, Any], path: Path) -> Case:
    name = raw["id"]
    for key in ("source", "expect", "tier"):
        if key not in raw:
            raise CaseError(f"{path}: case {name}: {key!r} is missing, here and in the defaults")
    script = None
    if "script" in raw:
        script = Script(**raw["script"] | {"bytes": tuple(raw["script"].get("bytes", ()))})
    if raw["tier"] in {"scripted", "agents", "prompt"} and script is None:
        script = Script("R</think>ok" if raw.get("request", {}).get("thinking") else "ok")
    request = dict(raw.get("request", {}))
    if raw["tier"] in {"scripted", "prompt"}:
        # The switch is always sent, since servers differ in their default; null leaves it out.
        request.setdefault("thinking", False)
    if request.get("thinking", False) is None:
        del request["thinking"]
    marked = script is not None and "｜DSML｜" in script.output
    expect = raw["expect"]
    dialects: Sequence[Dialect] = raw.get("dialects", DIALECTS if marked else ())
    return Case(
        id=name,
        tier=raw["tier"],
        level=Level(raw.get("level", "MUST")),
        why=raw["why"],
        source=raw["source"],
        profiles=tuple(raw.get("profiles", ())),
        protocols=tuple(raw.get("protocols", PROTOCOLS)),
        modes=tuple(raw.get("modes", MODES)),
        dialects=tuple(dialects),
        request=request,
        script=script,
        expect=tuple(expect) if isinstance(expect, list) else (expect,),
        action=raw.get("action", "send"),
        needs=tuple(raw.get("needs", ())),
        exempt=raw.get("exempt", {}),
        file=path.name,
    )


def variants(
    cases: Iterable[Case],
    *,
    protocols: Sequence[Protocol] = PROTOCOLS,
    dialects: Sequence[Dialect] = DIALECTS,
) -> list[Variant]:
    """Expands cases to the variants of the given protocols and dialects.

    A case without dialects (no tags in its script) gives one variant per protocol and mode.
    """
    found = []
    for case in cases:
        spellings: list[Dialect | None] = [d for d in case.dialects if d in dialects]
        for dialect in spellings if case.dialects else [None]:
            for protocol in case.protocols:
                if protocol in protocols:
                    found += [Variant(case, protocol, mode, dialect) for mode in case.modes]
    return found


def _for_live(cases: Iterable[Case], tiers: Sequence[str]) -> Iterator[Case]:
    """Cases as they can be put to an endpoint whose model says what it likes.

    Of the scripted ones those remain that are answered before any model is asked: refusals, and
    pages such as the list of models. Clients' requests (agents) have to be accepted, and their
    replies keep the invariants; what they say is the model's.
    """
    for case in cases:
        if case.tier == "scripted" and all(map(_needs_no_model, case.expect)):
            yield replace(case, tier="live", script=None, dialects=())
        elif case.tier == "agents" and case.tier in tiers:
            expect = tuple({"status": one.get("status", 200)} for one in case.expect)
            yield replace(case, tier="live", script=None, dialects=(), expect=expect)
        elif case.tier in tiers:
            yield case


def _needs_no_model(expect: Mapping[str, Any]) -> bool:
    status = expect.get("status", 200)
    lowest = min(status) if isinstance(status, list) else status
    return "document_has" in expect or 400 <= lowest < 500


def select(
    cases: Iterable[Case],
    *,
    tiers: Sequence[str] = (),
    profiles: Sequence[str] = (),
    prefixes: Sequence[str] = (),
) -> list[Case]:
    """Keeps cases of the given tiers, of any of the profiles, with any of the id prefixes.

    An empty argument selects all; "full" is the profile of every case. The tier live without
    scripted brings the cases with it that need no model, and takes agents as live ones.
    """
    if "live" in tiers and "scripted" not in tiers:
        cases = _for_live(cases, tiers)
    return [
        case
        for case in cases
        if (not tiers or case.tier in tiers)
        and (not profiles or "full" in profiles or set(profiles) & set(case.profiles))
        and (not prefixes or any(case.id.startswith(prefix) for prefix in prefixes))
    ]
