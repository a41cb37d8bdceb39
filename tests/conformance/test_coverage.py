"""Every known row of behaviour that a client can see has a case; the map is data.

tests/data/conformance_coverage.json lists rows and the cases that cover them. Its `output` rows
have the ids of the recorded codec cases, its `bugs` those of the reported faults, so that the map
can be compared with both.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from conformance.model import Case

DATA = Path(__file__).parents[1] / "data"
COVERAGE: dict[str, Any] = orjson.loads((DATA / "conformance_coverage.json").read_bytes())
TABLES = [name for name in COVERAGE if name != "about"]


def faults(table: Mapping[str, Mapping[str, Any]], known: Collection[str]) -> Iterator[str]:
    """What is wrong with a table: rows without case and without reason, cases nobody knows."""
    for name, row in table.items():
        covering = row.get("cases", [])
        if not covering and len(row.get("unseen", "")) < 20:
            yield f"{name}: no case, and no reason why no client can see it"
        if covering and "unseen" in row:
            yield f"{name}: has cases, so it can be seen"
        yield from (f"{name}: no case {case!r}" for case in covering if case not in known)


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_covered(name: str, cases: list[Case]) -> None:
    """Each row names cases that exist, or says why no client can see it."""
    assert list(faults(COVERAGE[name], {case.id for case in cases})) == []


def test_every_reported_fault_has_a_row() -> None:
    """The faults reported in public are all in the map, and the map has no other."""
    lines = (DATA / "codec" / "bug_cases.jsonl").read_bytes().splitlines()

    assert COVERAGE["bugs"].keys() == {orjson.loads(line)["id"] for line in lines}


def test_output_rows_are_recorded_cases() -> None:
    """Each row of model output is a case recorded from the official codec."""
    recorded = orjson.loads((DATA / "codec" / "codec_cases.json").read_bytes())
    known = {case["id"] for key in ("stream_cases", "token_cases") for case in recorded[key]}

    assert set(COVERAGE["output"]) - {name.split("-")[0] for name in known} == set()


def test_every_refusal_belongs_to_a_rule(cases: list[Case]) -> None:
    """A case that wants a refusal is listed under the rule it tests."""
    listed = {case for row in COVERAGE["rules"].values() for case in row["cases"]}
    listed |= {case for row in COVERAGE["bugs"].values() for case in row.get("cases", ())}

    assert {case.id for case in cases if case.id.startswith("refuse/")} - listed == set()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cases": []}, "no case, and no reason"),
        ({"cases": ["call/no-such-case"]}, "no case 'call/no-such-case'"),
        ({"unseen": "nobody can see it from outside"}, "so it can be seen"),
    ],
)
def test_gap_in_the_map_is_found(cases: list[Case], change: dict[str, Any], words: str) -> None:
    """An uncovered row, an unknown case and an idle excuse are each told."""
    table = copy.deepcopy(COVERAGE["output"])
    table["D01"] |= change

    found = list(faults(table, {case.id for case in cases}))

    assert len(found) == 1
    assert words in found[0]
    assert found[0].startswith("D01: ")
