"""Every check is proven: the correct server passes, each broken one is caught by what it names."""

from __future__ import annotations

import pytest

from conformance.checks import CHECKS
from conformance.load import variants
from conformance.model import PROTOCOLS, Case, Variant
from tests.conformance.broken_servers import BROKEN
from tests.conformance.matrix import SLUGS, everything, seen_by

BATCH = 60  # variants; a fault is mostly seen in the first batch, so few need more


def in_order(cases: list[Case]) -> list[Variant]:
    """Core cases first, then small groups, then the rest; all variants of a case together."""
    small = {"prompt", "parse", "live", "choices", "faults"}

    def rank(case: Case) -> int:
        if "core" in case.profiles:
            return 0
        return 1 if small & {case.tier, *case.profiles} else 2

    ordered = sorted(cases, key=lambda c: (rank(c), c.id))
    return variants(ordered, protocols=(*PROTOCOLS, "parse"))


def test_correct_server_passes_every_case() -> None:
    """Nothing is found against a server that is right: no case contradicts a check."""
    cases, todo = everything()

    assert seen_by(None, cases, todo) == {}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_broken_server_is_caught(name: str, cases: list[Case]) -> None:
    """The fault is seen by each check that it names."""
    missing = set(BROKEN[name].catches)
    todo = in_order(cases)
    while missing and todo:
        batch, todo = todo[:BATCH], todo[BATCH:]
        while todo and todo[0].case is batch[-1].case:
            batch.append(todo.pop(0))
        if any("prompt/" in slug or "expect/prompt" in slug for slug in missing):
            batch = [v for v in in_order(cases) if v.case.tier == "prompt"]
            todo = []
        missing -= seen_by(BROKEN[name], cases, batch).keys()

    assert set() == missing


def test_every_check_has_a_broken_server() -> None:
    """A check that nothing can fail is no check."""
    proven = {slug for fault in BROKEN.values() for slug in fault.catches}

    assert set() == set(SLUGS) - proven
    assert set() == proven - set(SLUGS)


def test_checks_say_why() -> None:
    """Every check has a sentence for the person who sees it fail."""
    assert [slug for slug, check in CHECKS.items() if not check.why.endswith((".", "…"))] == []
