"""What every driver in Python shares: where the server is, and the tool that leaves a mark.

It imports nothing but the standard library: each driver runs in its client's own environment.
"""

import json  # noqa: TID251  clients' environments need not have orjson
import os
import sys
from pathlib import Path

URL = os.environ["E2E_URL"]
KEY = os.environ["E2E_KEY"]
MODEL = os.environ["E2E_MODEL"]
PROMPT = os.environ["E2E_PROMPT"]
PROTOCOL = os.environ["E2E_PROTOCOL"]
VARIANT = os.environ["E2E_VARIANT"]
STREAM = bool(os.environ["E2E_STREAM"])

DESCRIPTION = "Look up the weather of a city for some days."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def lookup(city: str, days: int) -> str:
    """Look up the weather of a city for some days.

    Args:
        city: its name.
        days: how many.
    """
    mark = json.dumps({"city": city, "days": days}, ensure_ascii=False, separators=(",", ":"))
    Path("mark.txt").write_text(mark, encoding="utf-8")
    return Path("result.txt").read_text(encoding="utf-8")


def say(text: str) -> None:
    """Show the final answer."""
    sys.stdout.write(text + "\n")
