"""How tool calls are spelled: the sentinels for real special tokens, and one table of tag names.

Reading accepts every spelling at any time (a model writes now and then the tags of another
version); a table row says what one version is taught to write.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Real special tokens travel through text as lone surrogates: no decoder of UTF-8 yields one, so
# text that merely spells a marker can never be taken for it.
MARK = "\ud800"
THINK_END = "\ud801"

MARK_TEXT = "｜DSML｜"
THINK_BEGIN_TEXT = "<think>"
THINK_END_TEXT = "</think>"
# A marker that is shown as text: readable, and no marker of any version.
MARK_QUOTED = "dsml:"

BLOCK_NAMES = frozenset({"tool_calls", "function_calls", "calls"})

_SURROGATE = re.compile("[\ud800-\udfff]")
# A marker spelled by ordinary tokens, with the bars of either width.
PLAIN_MARK = re.compile(r"[|｜]DSML[|｜]")
# The same in a piece that more text follows, whose first character may be the second bar.
_PLAIN_OR_BEGUN = re.compile(r"[|｜]DSML(?:[|｜]|\Z)")
# The end of a text that may still become one, or the "<" before a real one.
MARK_BEGUN = re.compile(r"(?:</?(?:[|｜](?:D(?:S(?:ML?)?)?)?)?|[|｜](?:D(?:S(?:ML?)?)?)?)\Z")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The tag names one model version writes.

    Args:
        block: name of the element around all calls of a turn.
        gap: what stands between the marker and a tag's name.
        bare: what stands in a call without parameters.
    """

    block: str
    gap: str
    bare: str = ""

    def opening(self) -> str:
        """Return the block's opening tag."""
        return f"<{MARK_TEXT}{self.gap}{self.block}>\n"

    def invoke(self, name: str) -> str:
        """Return the opening tag of a call."""
        return f'<{MARK_TEXT}{self.gap}invoke name="{name}">\n'

    def parameter(self, name: str) -> str:
        """Return the opening tag of a parameter whose value is spliced in as JSON."""
        return f'<{MARK_TEXT}{self.gap}parameter name="{name}" string="false">'

    def end(self, tag: str) -> str:
        """Return the closing tag of an element."""
        return f"</{MARK_TEXT}{self.gap}{tag}>\n"


DIALECTS = {
    "v3.2": Dialect(block="function_calls", gap=""),
    "v4": Dialect(block="tool_calls", gap=""),
    "v4.1": Dialect(block="calls", gap=" ", bare="\n"),
}


def mark_text(text: str) -> str:
    """Turn a spelled text into the parser's alphabet: every spelled marker counts as real.

    For sources that give text instead of token ids. Lone surrogates become U+FFFD first, so that
    none can pose as a marker.
    """
    clean = _SURROGATE.sub("\ufffd", text)
    return clean.replace(MARK_TEXT, MARK).replace(THINK_END_TEXT, THINK_END)


def spell(raw: str) -> str:
    """Return parser text as the model's vocabulary spells it."""
    return raw.replace(MARK, MARK_TEXT).replace(THINK_END, THINK_END_TEXT)


def quote(raw: str) -> str:
    """Return parser text fit to be shown: no marker of any width is left in it."""
    shown = raw.replace(MARK, MARK_QUOTED).replace(THINK_END, THINK_END_TEXT)
    return _PLAIN_OR_BEGUN.sub(MARK_QUOTED, shown)
