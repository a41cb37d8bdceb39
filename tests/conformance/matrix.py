"""Runs every broken server against the whole suite and prints which checks see which fault.

    python -m tests.conformance.matrix

Exit 1 if a fault is not seen by a check it names, or a check sees no fault at all (a blind check).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

from conformance.checks import CHECKS
from conformance.checks.cross import CROSS
from conformance.load import load_cases, variants
from conformance.model import Case, Variant, Verdict
from conformance.runner import Options, run
from tests.conformance.broken_servers import BROKEN
from tests.conformance.correct_server import CorrectServer, Mutation

OPTIONS = Options(model="m", concurrency=1)
SLUGS = [*CHECKS, *(rule.slug for rule in CROSS), "prompt/same", "prompt/longer"]


def everything() -> tuple[list[Case], list[Variant]]:
    cases = load_cases()
    return cases, variants(cases, protocols=("chat", "responses", "messages", "parse"))


def seen_by(
    mutation: Mutation | None, cases: list[Case], todo: Sequence[Variant]
) -> dict[str, str]:
    """Slugs of the checks that warn or fail, each with an example, against one server."""
    server = CorrectServer(cases, mutation)
    result = asyncio.run(run(todo, server, replace(OPTIONS, left=server.left)))
    bad = {Verdict.WARN, Verdict.FAIL, Verdict.ERROR}
    return {
        outcome.check: f"{outcome.variant}: {outcome.message}"
        for found in result.results
        for outcome in found.outcomes
        if outcome.verdict in bad
    }


def main() -> int:
    cases, todo = everything()
    matrix = {}
    clean = seen_by(None, cases, todo)
    missed = 0
    for name, mutation in BROKEN.items():
        matrix[name] = seen_by(mutation, cases, todo)
        unseen = [slug for slug in mutation.catches if slug not in matrix[name]]
        missed += len(unseen)
        note = f"  NOT SEEN BY {', '.join(unseen)}" if unseen else ""
        print(
            f"{name:34} {len(matrix[name]):3} checks: {', '.join(mutation.catches)}{note}",
            flush=True,
        )
    blind = [slug for slug in SLUGS if not any(slug in found for found in matrix.values())]
    unproven = [s for s in SLUGS if not any(s in m.catches for m in BROKEN.values())]
    print(f"\n{len(BROKEN)} broken servers, {len(SLUGS)} checks, {len(todo)} variants each")
    print(f"blind checks: {blind or 'none'}; checks no server is meant for: {unproven or 'none'}")
    print(f"findings against the correct server: {clean or 'none'}")
    return 1 if missed or blind or unproven or clean else 0


if __name__ == "__main__":
    sys.exit(main())
