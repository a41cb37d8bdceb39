"""The two spellings of tool tags.

Cases are written in the V4.1 spelling (a blank after the marker, block name "calls"); V4 has no
blank and calls the block "tool_calls". Respelling is textual, so that broken markup stays broken
in the same place.
"""

from __future__ import annotations

import re

from conformance.model import Dialect

MARK = "｜DSML｜"
SPECIALS = (
    MARK,
    "<think>",
    "</think>",
    "<｜end▁of▁sentence｜>",
    "<｜begin▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<｜latest_reminder｜>",
)


def respell(text: str, dialect: Dialect) -> str:
    """Writes V4.1 tags in the given dialect.

    Args:
        text: Model output in the V4.1 spelling.
        dialect: "v4.1" returns the text as it is.
    """
    if dialect == "v4.1":
        return text
    return text.replace(f"{MARK} calls", f"{MARK}tool_calls").replace(f"{MARK} ", MARK)


def split_special(text: str) -> list[tuple[str, bool]]:
    """Cuts text at the special-token spellings of the V4 family.

    Returns:
        Pieces in order, each with True where it is a special token.
    """
    pieces = re.split("(" + "|".join(map(re.escape, SPECIALS)) + ")", text)
    return [(piece, piece in SPECIALS) for piece in pieces if piece]
