"""What a model's output consists of, as the DSML parser tells it.

Every event holds ``raw``, the exact source text it stands for (with the sentinels of
``parsers.dialects``); the ``raw`` of all events joined is the whole output. Only the cut between
neighbouring ``Text``, ``ParamText`` and ``Noise`` depends on how the output was split.
"""

from __future__ import annotations

from typing import NamedTuple


class Text(NamedTuple):
    """Answer or reasoning, outside of any markup."""

    raw: str


class ThinkEnd(NamedTuple):
    """The end-of-thinking token.

    Args:
        raw: the source text.
        joins: it ends no reasoning, and stands behind what may be the beginning of a marker.
    """

    raw: str
    joins: bool = False


class Stray(NamedTuple):
    """A marker that opens nothing: quoted, spelled by ordinary tokens, half, or out of place."""

    raw: str


class BlockOpened(NamedTuple):
    """The element around the calls; ``raw`` is empty where an invoke came without it.

    ``doubtful``: it stands inside the reasoning or a code fence. ``joins``: behind what may be the
    beginning of a marker.
    """

    raw: str
    doubtful: bool
    joins: bool = False


class InvokeOpened(NamedTuple):
    """A call begins; ``name`` is None where the tag has no readable one."""

    raw: str
    name: str | None


class ParamOpened(NamedTuple):
    """A parameter begins.

    ``name`` is None where the tag has no readable one, ``string`` None where the tag does not say
    ``true`` or ``false``.
    """

    raw: str
    name: str | None
    string: bool | None


class ParamText(NamedTuple):
    """A piece of a parameter's value."""

    raw: str


class ParamClosed(NamedTuple):
    """The value is whole; ``raw`` is empty where the closer of an outer element ended it."""

    raw: str


class InvokeClosed(NamedTuple):
    """The call ends; ``complete`` is False where the output ended first."""

    raw: str
    complete: bool


class BlockClosed(NamedTuple):
    """The calls end; ``complete`` is False where the output ended first."""

    raw: str
    complete: bool


class Noise(NamedTuple):
    """Anything else between the tags of a block: blanks, prose, a JSON body, unknown tags."""

    raw: str


Event = (
    Text
    | ThinkEnd
    | Stray
    | BlockOpened
    | InvokeOpened
    | ParamOpened
    | ParamText
    | ParamClosed
    | InvokeClosed
    | BlockClosed
    | Noise
)
