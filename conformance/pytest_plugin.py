"""Runs the suite from pytest: `pytest -p conformance.pytest_plugin --conform-url URL`.

Each variant becomes a test item, so that pytest's selection, reports and parallel runs apply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance import load
from conformance.client import HttpSender
from conformance.model import PROTOCOLS, Variant, Verdict
from conformance.runner import Options, run


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("conformance", "tool-call protocol conformance")
    group.addoption("--conform-url", help="endpoint to test; without it nothing is collected")
    group.addoption("--conform-model", default="", help="model to ask for")
    group.addoption("--conform-protocol", default="chat", help="comma list of protocols")
    group.addoption("--conform-tier", default="scripted", help="comma list of tiers")
    group.addoption("--conform-profile", help="profile, or 'full' (default: core if scripted)")
    group.addoption("--conform-cases", action="append", default=[], help="extra case folder")


def pytest_collection(session: pytest.Session) -> None:
    """Registers the collector as a plugin of the session."""
    if session.config.getoption("--conform-url"):
        session.config.pluginmanager.register(_Collector(session.config))


class _Collector:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        option = self.config.getoption
        names = option("--conform-protocol")
        protocols = PROTOCOLS if names == "all" else names.split(",")
        tiers = option("--conform-tier").split(",")
        profile = option("--conform-profile") or ("core" if tiers == ["scripted"] else "full")
        cases = load.select(
            load.load_cases([Path(p) for p in option("--conform-cases")]),
            tiers=tiers,
            profiles=[profile],
        )
        parent = _Suite.from_parent(session, name="conformance", path=session.path)
        items += parent.items(load.variants(cases, protocols=[*protocols, "parse"]))


class _Suite(pytest.Collector):
    def collect(self) -> Iterator[Any]:
        return iter(())

    def items(self, todo: list[Variant]) -> list[pytest.Item]:
        return [_Item.from_parent(self, name=variant.id, variant=variant) for variant in todo]


class _Item(pytest.Item):
    def __init__(self, *, variant: Variant, **rest: Any) -> None:
        super().__init__(**rest)
        self.variant = variant

    def runtest(self) -> None:
        option = self.config.getoption

        async def once() -> Any:
            sender = HttpSender(option("--conform-url"))
            try:
                return await run([self.variant], sender, Options(model=option("--conform-model")))
            finally:
                await sender.aclose()

        result = asyncio.run(once()).results[0]
        if result.verdict is Verdict.SKIP:
            pytest.skip(result.outcomes[0].message)
        bad = [o for o in result.outcomes if o.verdict in {Verdict.FAIL, Verdict.ERROR}]
        if bad:
            lines = [f"{o.check}: {o.message}" for o in bad]
            curl = result.exchange.curl() if result.exchange else ""
            raise ConformanceError("\n".join([self.variant.case.why, *lines, curl]))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, ConformanceError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return Path(self.variant.case.file), None, self.name


class ConformanceError(Exception):
    """A variant failed; the message names the checks and the curl line."""
