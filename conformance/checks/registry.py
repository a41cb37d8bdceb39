"""The register of checks: each is a function with a stable slug.

A check takes an observation and yields findings; none means pass. It applies to a variant by its
declaration (protocols, modes) and by `when`, which looks at the reply. A breach that an observer
noted is reported by a check made with `grammar`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from conformance.model import Finding, Level, Mode, Protocol
from conformance.protocols.observation import Observation

Kind = Literal["answer", "error", "any", "abandoned"]
Body = Callable[[Observation], Iterable[Finding | str]]


@dataclass(frozen=True, slots=True)
class Check:
    """A requirement that code can judge.

    Attributes:
        slug: Stable name.
        level: The level it is judged at; a SHOULD case lowers it, nothing raises it.
        why: One sentence.
        kind: Replies it applies to: model output (200), errors, any, or those the client gave up,
            of which nothing else is judged.
        protocols, modes: Variants it applies to, empty for all.
        when: Further condition on the observation.
        body: The judgement.
    """

    slug: str
    level: Level
    why: str
    kind: Kind
    protocols: frozenset[Protocol]
    modes: frozenset[Mode]
    when: Callable[[Observation], bool]
    body: Body

    def applies(self, seen: Observation) -> bool:
        """Says whether the check has something to judge in this reply."""
        variant = seen.variant
        if (self.kind == "abandoned") != (variant.case.action == "abandon"):
            return False
        if self.protocols and variant.protocol not in self.protocols:
            return False
        if self.modes and variant.mode not in self.modes:
            return False
        if self.kind == "answer" and not seen.answered:
            return False
        if self.kind == "error" and seen.exchange.status < 400:
            return False
        return self.when(seen)

    def run(self, seen: Observation) -> Iterator[Finding]:
        """Yields what is wrong."""
        for finding in self.body(seen):
            yield Finding(finding) if isinstance(finding, str) else finding


CHECKS: dict[str, Check] = {}


def _always(_: Observation) -> bool:
    return True


def check(
    slug: str,
    *,
    level: Level = Level.MUST,
    kind: Kind = "answer",
    protocols: Iterable[Protocol] = (),
    modes: Iterable[Mode] = (),
    when: Callable[[Observation], bool] = _always,
) -> Callable[[Body], Body]:
    """Registers the decorated function; its docstring is the check's `why`.

    Raises:
        ValueError: If the slug is taken or the function has no docstring.
    """

    def register(body: Body) -> Body:
        if slug in CHECKS or not body.__doc__:
            raise ValueError(f"check {slug!r}: needs a new slug and a docstring")
        CHECKS[slug] = Check(
            slug,
            level,
            " ".join(body.__doc__.split()),
            kind,
            frozenset(protocols),
            frozenset(modes),
            when,
            body,
        )
        return body

    return register


def grammar(
    slug: str,
    why: str,
    *,
    level: Level = Level.MUST,
    kind: Kind = "answer",
    protocols: Iterable[Protocol] = (),
    modes: Iterable[Mode] = (),
    when: Callable[[Observation], bool] = _always,
) -> None:
    """Registers a check that reports what an observer noted under the same slug."""

    def body(seen: Observation) -> Iterable[Finding]:
        return seen.found(slug)

    body.__doc__ = why
    check(slug, level=level, kind=kind, protocols=protocols, modes=modes, when=when)(body)
