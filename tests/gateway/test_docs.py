"""The pages about the gateway say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.api import ModelInfo
from gateway import Settings, create_app
from gateway.backends.scripted import ScriptedBackend
from gateway.metrics import Metrics
from gateway.settings import table
from parsers.profiles import markdown
from tests.gateway.support import text_line

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "mark", "written"),
    [("configuration.md", "settings", table), ("protocols.md", "profiles", markdown)],
)
def test_tables_are_those_of_the_code(page: str, mark: str, written: object) -> None:
    """Between the marks stands what the command prints; run it again after a change."""
    assert callable(written)
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf"<!-- {mark}: begin -->\n(.*)<!-- {mark}: end -->", text, re.DOTALL)

    assert found is not None
    assert found[1] == written()


def test_every_route_is_on_the_page(info: ModelInfo) -> None:
    """No endpoint is secret, and none is promised that is not there."""
    text = (DOCS / "protocols.md").read_text(encoding="utf-8")
    table_rows = [line for line in text.splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`(?:(?:GET|POST|DELETE|HEAD) )?(/[\w/{}]*)`", "\n".join(table_rows)))
    app = create_app(Settings(), ScriptedBackend([text_line("a")], info))
    served = {route.path.replace("{model_id:path}", "{id}") for route in app.routes}  # type: ignore[attr-defined]

    assert named == served


def test_every_metric_is_on_the_page(info: ModelInfo) -> None:
    """What is counted is explained."""
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    exported = Metrics(ScriptedBackend([text_line("a")], info).stats).text().decode()
    names = set(re.findall(r"^# TYPE bathyal_(\w+)", exported, re.MULTILINE))
    names = {name for name in names if not name.endswith("_created")}

    assert len(names) > 20
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_every_flag_is_one(info: ModelInfo) -> None:
    """A page names no flag that is not there."""
    known = set(re.findall(r"`(--[\w-]+)`", table()))
    for page in ("operations.md", "configuration.md", "protocols.md"):
        named = set(re.findall(r"`(--[a-z-]+)", (DOCS / page).read_text(encoding="utf-8")))
        assert named - known == set(), page
