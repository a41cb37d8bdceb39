"""The model outputs of the cases, as files and pieces that a scripted server plays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from conformance.dialect import respell
from conformance.model import Variant
from conformance.vocabulary import Vocabulary


def line(variant: Variant, vocabulary: Vocabulary | None = None) -> dict[str, Any] | None:
    """The script of a variant as `bathyal serve --backend scripted:FILE` reads it.

    `output` is text whose marker spellings are the real special tokens, `raw_output` plain text,
    `token_ids` what holds bytes that are no text.

    Args:
        variant: Whose script.
        vocabulary: Of the server's tokenizer, for scripts with bytes; None leaves those out.

    Returns:
        The line; None for a variant without a script, or with bytes and no vocabulary.
    """
    script = variant.case.script
    if script is None or (script.bytes and vocabulary is None):
        return None
    text = respell(script.output, variant.dialect or "v4.1")
    data: dict[str, Any] = {"name": variant.script_name, "finish": script.finish}
    if script.bytes and vocabulary is not None:
        data["token_ids"] = vocabulary.encode(
            text, special=not script.raw, insert=bytes(script.bytes)
        )
    else:
        data["raw_output" if script.raw else "output"] = text
    if script.delay_ms:
        data["delay_ms"] = script.delay_ms
    return data


def dump(variants: Iterable[Variant], vocabulary: Vocabulary | None = None) -> bytes:
    """JSON lines, one per output, each name once.

    Characters that some readers take for a line end are written as escapes.
    """
    lines = [line(variant, vocabulary) for variant in variants]
    found = {data["name"]: data for data in lines if data is not None}
    text = "".join(orjson.dumps(data).decode() + "\n" for _, data in sorted(found.items()))
    for character in "\u0085\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode()
