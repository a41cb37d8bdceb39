"""The nouns of the suite: Case, Variant, Finding, Outcome.

A case is data (cases/*.json), written once and free of any protocol. A variant is a case rendered
for one protocol, one mode (stream or whole) and one spelling of the tool tags. Running a variant
gives one outcome for each check that applies to it. Nothing here knows HTTP or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Protocol = Literal["chat", "responses", "messages", "parse"]
Mode = Literal["stream", "whole"]
Dialect = Literal["v4.1", "v4"]
Tier = Literal["live", "scripted", "parse", "agents", "prompt"]
Action = Literal["send", "leave", "abandon", "follow"]
Switch = Literal["thinking", "chat_template_kwargs"]

# "parse" is no protocol of the wire but the native parsing endpoints; only its tier uses it.
PROTOCOLS: tuple[Protocol, ...] = ("chat", "responses", "messages")
MODES: tuple[Mode, ...] = ("stream", "whole")
DIALECTS: tuple[Dialect, ...] = ("v4.1", "v4")
SWITCHES: tuple[Switch, ...] = ("thinking", "chat_template_kwargs")
TIERS: tuple[Tier, ...] = ("live", "scripted", "parse", "agents", "prompt")


class Level(StrEnum):
    """How binding a requirement is, in the words of RFC 2119."""

    MUST = "MUST"
    SHOULD = "SHOULD"


class Verdict(StrEnum):
    """What became of one check; the order of the members is the order of reports."""

    PASS = "pass"
    WARN = "warn"  # a SHOULD was missed
    FAIL = "fail"  # a MUST was missed
    ERROR = "error"  # no verdict: the endpoint could not be reached or the suite broke
    SKIP = "skip"  # not tested, for a stated reason; never counted as passed


SEVERITY: Mapping[Verdict, int] = {
    Verdict.SKIP: 0,
    Verdict.PASS: 1,
    Verdict.WARN: 2,
    Verdict.FAIL: 3,
    Verdict.ERROR: 4,
}


@dataclass(frozen=True, slots=True)
class Script:
    """Model output that is played behind the server under test.

    Attributes:
        output: Text in the V4.1 spelling, beginning where generation begins (inside the thinking
            section when thinking is on). The spellings of special tokens mean those tokens.
        raw: True when marker spellings in `output` are plain text and not special tokens.
        bytes: What U+FFFD in `output` stands for: bytes that are no character, a token each. They
            can be played as token ids only.
        finish: What the engine reports: "stop", "length" or "error" (a fault in the middle).
        delay_ms: Pause between two tokens, milliseconds.
    """

    output: str
    raw: bool = False
    bytes: tuple[int, ...] = ()
    finish: Literal["stop", "length", "error"] = "stop"
    delay_ms: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One requirement on an endpoint, free of any protocol.

    Attributes:
        id: Stable name, parts joined by "/"; ids are selected by prefix.
        tier: Which kind of run plays it.
        level: MUST fails, SHOULD warns.
        why: One sentence a person who sees the case fail can act on.
        source: Where the requirement comes from (specification, codec behaviour, public issue).
        profiles: Names of profiles the case belongs to.
        protocols, modes, dialects: The variants it is rendered to.
        request: Neutral request, see docs/conformance.md.
        script: Model output to play; None in tiers that play none.
        expect: Tuple of acceptable results; one of them has to be met.
        action: What the client does: "send" the request; "leave" in the middle of the reply and
            send it again; "abandon" it after its first bytes; "follow" the reply up with a second
            request that names it.
        needs: Features the endpoint may declare as unsupported; then the case is skipped.
        exempt: Slugs of checks that do not apply, each with the reason.
        file: File the case was read from, for messages.
    """

    id: str
    tier: Tier
    level: Level
    why: str
    source: str
    profiles: tuple[str, ...]
    protocols: tuple[Protocol, ...]
    modes: tuple[Mode, ...]
    dialects: tuple[Dialect, ...]
    request: Mapping[str, Any]
    script: Script | None
    expect: tuple[Mapping[str, Any], ...]
    action: Action
    needs: tuple[str, ...]
    exempt: Mapping[str, str]
    file: str


@dataclass(frozen=True, slots=True)
class Variant:
    """A case rendered for one protocol, mode and dialect.

    `dialect` is None where the tags do not occur (no script), `mode` says how the reply is asked.
    """

    case: Case
    protocol: Protocol
    mode: Mode
    dialect: Dialect | None

    @property
    def id(self) -> str:
        """`case-id[protocol,mode]` or `case-id[protocol,mode,dialect]`; unique in a run."""
        parts = [self.protocol, self.mode] + ([self.dialect] if self.dialect else [])
        return f"{self.case.id}[{','.join(parts)}]"

    @property
    def script_name(self) -> str:
        """Name under which a scripted server knows the output of this variant."""
        return f"{self.case.id}@{self.dialect}" if self.dialect else self.case.id


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a reply.

    Attributes:
        message: What was expected and what came.
        frame: Index of the SSE frame it was seen in, or None.
    """

    message: str
    frame: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict of one check on one variant.

    Attributes:
        variant: Id of the variant.
        case: Id of the case.
        check: Slug of the check.
        verdict: See `Verdict`.
        level: Level it was judged at.
        message: Findings joined, or the reason of a skip or an error; "" for a pass.
        expected: True when the expected-failures file announced it.
        repeats: How often the variant was run and how often this check passed (live tier).
    """

    variant: str
    case: str
    check: str
    verdict: Verdict
    level: Level
    message: str = ""
    expected: bool = False
    repeats: tuple[int, int] = (1, 1)


@dataclass(slots=True)
class Result:
    """All outcomes of one variant, with the raw exchange that led to them.

    Attributes:
        variant: The variant that ran.
        outcomes: One per check.
        exchange: Filled by the runner with the bytes sent and received (client.Exchange), or None.
        elapsed_ms: Wall time of the variant, milliseconds.
    """

    variant: Variant
    outcomes: list[Outcome]
    exchange: Any = None
    elapsed_ms: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of its outcomes; skip only if nothing was tested."""
        return max(
            (o.verdict for o in self.outcomes), key=SEVERITY.__getitem__, default=Verdict.SKIP
        )
