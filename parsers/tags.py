"""Reads one DSML tag, however a model may have spelled it.

Knows a piece of text that starts after a marker; knows neither states nor policies.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from parsers.dialects import BLOCK_NAMES, MARK, THINK_END

LONGEST_TAG = 512
"""Characters after which a tag that does not end is taken for text."""


class Tag(NamedTuple):
    """A tag: ``end`` is the index after it; name and string are an opener's attributes.

    ``empty`` says that the tag closes itself.
    """

    kind: str
    end: int
    name: str | None = None
    string: bool | None = None
    empty: bool = False


Reading = Tag | Literal["more", "none"]
"""A tag, or that its end has not come yet, or that this is no tag."""

# Models double the bars around the marker now and then, so one more may follow it.
_WORD = re.compile(r"｜?\s{0,2}([A-Za-z_]*)")
_CLOSER = re.compile(r"｜?\s{0,2}([A-Za-z_]*)(\s*>)?")
_ATTRIBUTES = re.compile(r"\s*(?:>|[A-Za-z_]+\s*(?:=|\Z)|\Z)")
_STOP = re.compile(f"</?｜?{MARK}|[{MARK}{THINK_END}]")
_STOP_BEGUN = re.compile("</?｜?")
_TYPOGRAPHIC = str.maketrans(
    dict.fromkeys("\u201c\u201d\u201e\u201f", '"') | dict.fromkeys("\u2018\u2019\u201a\u201b", "'")
)

_ATTRIBUTE = re.compile(r"""\s+([\w-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_ATTRIBUTE_LIST = re.compile(r"""(?:\s+[\w-]+\s*=\s*(?:"[^"]*"|'[^']*'|[^\s"'>]+))*\s*""")
_BEFORE = r"""(?:[^"'>]|"[^"]*"|'[^']*')*?\bname\s*=\s*"""
_INVOKE = (
    re.compile(_BEFORE + r"""\"(?P<name>[^"]*)"[^>]*"""),
    re.compile(_BEFORE + r"""'(?P<name>[^']*)'[^>]*"""),
    re.compile(_BEFORE + r"""(?P<name>[^\s"'>]+)[^"'>]*"""),
)
# In the order tried. The codec writes a parameter's name raw, whatever it holds, so the name ends
# only where a string attribute follows; the last of two string attributes counts, as there.
_NAME = r"""\s*name\s*=\s*"""
_SAYS = r"""string\s*=\s*["']?(?P<string>\w*)["']?\s*"""
_PARAMETER = (
    re.compile(_NAME + r"""\"(?P<name>.*?)"(?:\s+string\s*=\s*"(?P<string>[^"]*)")+\s*""", re.S),
    re.compile(
        _NAME + r"""["'](?P<name>[^"'>]*?)\s+""" + _SAYS, re.S
    ),  # the closing quote forgotten
    re.compile(_NAME + r"""(?P<q>["']?)(?P<name>.*?)(?P=q)\s+""" + _SAYS, re.S),
    re.compile(r"""\s*""" + _SAYS + _NAME + r"""(?P<q>["']?)(?P<name>.*?)(?P=q)\s*""", re.S),
    re.compile(_NAME + r"""\"(?P<name>[^"]*)"\s*"""),
    re.compile(_NAME + r"""'(?P<name>[^']*)'\s*"""),
    re.compile(_NAME + r"""(?P<name>[^\s"'>]+)\s*"""),
)
_FORMS = {"invoke": _INVOKE, "parameter": _PARAMETER}
_STRING = {"true": True, "false": False}


def read_closer(text: str, start: int, *, final: bool) -> Reading:
    """Read a closing tag whose marker ends at ``start``.

    Any word may follow; a missing ``>`` is forgiven, and so is one that stands too far away.
    """
    limit = start + LONGEST_TAG
    found = _CLOSER.match(text, start, limit)
    assert found is not None  # every part may be empty
    waits = not final and len(text) < limit
    if found[2] is None and waits and not text[found.end(1) :].strip():
        return "more"
    return Tag(_kind(found[1]), found.end())


def read_opener(text: str, start: int, *, final: bool, tried: int = 0) -> Reading:
    """Read an opening tag whose marker ends at ``start``.

    Args:
        text: holds the tag, perhaps not all of it.
        start: where the tag's name begins.
        final: nothing comes after ``text``.
        tried: how much of ``text`` was there at the last try, which gave ``more``.
    """
    word = _WORD.match(text, start)
    assert word is not None
    kind = _kind(word[1])
    if word.end() == len(text) and not final:
        return "more" if _may_become_known(word[1]) else "none"
    if kind == "other":
        return "none"
    if kind == "block":
        limit = start + LONGEST_TAG
        rest = text[word.end() : limit].lstrip()
        if not final and len(text) < limit and (not rest or _STOP_BEGUN.fullmatch(rest)):
            return "more"
        at = min(len(text), limit) - len(rest)
        if rest.startswith(">"):
            return Tag(kind, at + 1)
        return Tag(kind, at) if _STOP.match(rest) else "none"  # its ">" forgotten
    if _ATTRIBUTES.match(text, word.end()) is None:
        return "none"
    return _read_attributes(kind, text, word.end(), final=final, tried=tried)


def _read_attributes(kind: str, text: str, start: int, *, final: bool, tried: int) -> Reading:
    stop = _STOP.search(text, start)
    limit = min(stop.start() if stop else len(text), start + LONGEST_TAG)
    close = text.find(">", max(start, tried), limit)
    while close >= 0:
        tag = _complete(kind, text[start:close], close + 1)
        if tag is not None:
            return tag
        close = text.find(">", close + 1, limit)
    if limit == len(text) and not final:
        return "more"
    if stop and limit == stop.start() and _ATTRIBUTE_LIST.fullmatch(text, start, limit):
        tag = _complete(kind, text[start:limit], limit)  # its ">" forgotten: the next tag begins
        if tag is not None:
            return tag
    # It will never make sense: a tag without a readable name up to its first ">", or no tag.
    first = text.find(">", start, limit)
    return Tag(kind, first + 1) if first >= 0 else "none"


def _complete(kind: str, attributes: str, end: int) -> Tag | None:
    """Return the tag, if what stands before a ``>`` is all of it."""
    if '"' not in attributes and "'" not in attributes:
        attributes = attributes.translate(_TYPOGRAPHIC)
    bare = attributes.rstrip()
    empty = bare.endswith(('"/', "'/", " /"))
    if empty:
        attributes = bare[:-1]
    said = _listed(attributes)
    # A further attribute is likelier than a name that holds quotes, a blank and a sign of equality.
    if said is not None and len(said) > 2 and said.keys() >= {"name", "string"}:
        return Tag(kind, end, said["name"], _truth(said["string"]), empty)
    for form in _FORMS[kind]:
        if found := form.fullmatch(attributes):
            parts = found.groupdict()
            return Tag(kind, end, parts["name"], _truth(parts.get("string")), empty)
    if said is None:
        return None
    # Whole attributes, a name among others or none at all: the tag ends all the same.
    return Tag(kind, end, said.get("name"), _truth(said.get("string")), empty)


def _listed(attributes: str) -> dict[str, str] | None:
    """Read attributes that are spelled as such, each of them once."""
    if _ATTRIBUTE_LIST.fullmatch(attributes) is None:
        return None
    found = [(name, "".join(value)) for name, *value in _ATTRIBUTE.findall(attributes)]
    said = dict(found)
    return said if len(said) == len(found) else None


def _truth(said: str | None) -> bool | None:
    return _STRING.get((said or "").lower())


def _kind(word: str) -> str:
    if word in BLOCK_NAMES:
        return "block"
    return word if word in ("invoke", "parameter") else "other"


def _may_become_known(word: str) -> bool:
    return any(known.startswith(word) for known in (*BLOCK_NAMES, "invoke", "parameter"))
