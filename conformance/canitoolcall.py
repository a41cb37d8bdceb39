"""Turns fixtures of canitoolcall (Apache-2.0) into cases of this suite.

Nothing of that project is shipped here: the user points at an installed copy, and the file that is
written keeps each fixture's attribution and licence in its notice. Only the DeepSeek V4 and V4.1
fixtures are taken; their `expected` becomes what the case wants.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson

from conformance.dialect import MARK

MODELS = re.compile(r"DeepSeek-V4")


class FixtureError(ValueError):
    """Fixtures that cannot be read; the message names file and line."""


def convert(folder: Path, out: Path) -> int:
    """Writes a case file.

    Args:
        folder: Folder with the fixtures' *.jsonl files.
        out: Case file to write; use it with `--cases`.

    Returns:
        Number of cases written.

    Raises:
        FixtureError: If there are no fixtures or a line is not one.
    """
    files = sorted(folder.rglob("*.jsonl"))
    if not files:
        raise FixtureError(f"{folder}: no *.jsonl fixtures there")
    cases, notices = [], set()
    for path in files:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if not line.strip():
                continue
            try:
                fixture = orjson.loads(line)
                if not {"expected", "expected_error"} & fixture.keys() or not any(
                    MODELS.search(model) for model in fixture["models"]
                ):
                    continue
                cases.append(_case(fixture))
                origin = fixture.get("provenance", {})
            except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                raise FixtureError(f"{path}:{number}: no canitoolcall fixture: {error!r}") from None
            notices.add(f"{origin.get('attribution', 'unknown')} ({origin.get('license')})")
    notice = "From canitoolcall, Apache-2.0. " + "; ".join(sorted(notices))
    defaults = {"tier": "scripted", "profiles": ["imported"], "protocols": ["chat"]}
    data = {"notice": notice, "defaults": defaults, "cases": cases}
    out.write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2))
    return len(cases)


def _case(fixture: dict[str, Any]) -> dict[str, Any]:
    # An error of the official encoder, which takes whole outputs only: here the output was cut.
    want = fixture.get("expected", {})
    cut = "truncated" in fixture.get("tags", ()) or "expected" not in fixture
    calls = []
    for call in want.get("tool_calls") or ():
        arguments = call["arguments"]
        if isinstance(arguments, str):
            calls.append({"name": call["name"], "arguments_prefix": arguments})
        else:
            calls.append({"name": call["name"], "arguments": arguments})
    expect: dict[str, Any] = {"content": want.get("content") or "", "calls": calls}
    if want.get("reasoning_content") is not None:
        expect["reasoning"] = want["reasoning_content"]
    quotes = MARK in orjson.dumps(want).decode()
    name = re.sub(r"[^a-z0-9.-]+", "-", fixture["id"].lower().removeprefix("deepseek/"))
    case = {
        "id": f"imported/canitoolcall/{name}",
        "why": "The official encoder's reading of this output, as canitoolcall records it.",
        "source": fixture.get("provenance", {}).get("source_url", "canitoolcall"),
        "request": {
            "thinking": bool(fixture.get("thinking")),
            "tools": [tool["function"] for tool in fixture.get("tools", ())],
        },
        "script": {"output": fixture["raw_output"], "finish": "length" if cut else "stop"},
        "dialects": ["v4.1"],  # the text as it is: imported outputs are in their own spelling
        # What to do with a cut call is a policy; that the end says so is not.
        "expect": [expect | {"finish": "length"}, {"finish": "length"}] if cut else expect,
    }
    return case | ({"exempt": {"leak/dsml": "the wanted text quotes markup"}} if quotes else {})
