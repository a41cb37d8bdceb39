"""The model outputs of the cases, as files and pieces that a scripted server plays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from conformance.dialect import respell
from conformance.model import Variant


def line(variant: Variant) -> dict[str, Any] | None:
    """The script of a variant as `bathyal serve --backend scripted:FILE` reads it.

    `output` is text whose marker spellings are the real special tokens, `raw_output` plain text.
    """
    script = variant.case.script
    if script is None:
        return None
    text = respell(script.output, variant.dialect or "v4.1")
    data: dict[str, Any] = {
        "name": variant.script_name,
        "raw_output" if script.raw else "output": text,
        "finish": script.finish,
    }
    if script.delay_ms:
        data["delay_ms"] = script.delay_ms
    return data


def dump(variants: Iterable[Variant]) -> bytes:
    """JSON lines, one per output, each name once.

    Characters that some readers take for a line end are written as escapes.
    """
    found = {data["name"]: data for data in map(line, variants) if data is not None}
    lines = [orjson.dumps(data).decode() for _, data in sorted(found.items())]
    text = "".join(line + "\n" for line in lines)
    for character in "\u0085\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode()
