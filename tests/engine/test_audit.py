"""The audit on the CPU: every switch is measured, and the report says what was found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

import engine.audit
from engine.api import EngineError
from engine.audit import Load, audit, variants
from engine.audit_report import write_report
from engine.cli import main
from engine.core import EngineCore
from engine.options import EngineConfig
from tests.engine.model import build

LOAD = Load(lengths=(20,), concurrency=(2,), new_tokens=3, repeats=1)
OPTIONS = EngineConfig(device="cpu", max_num_seqs=4, block_size=16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.write(Path(tmp_path_factory.mktemp("v41")), build.v41())


def test_each_variant_turns_one_switch() -> None:
    """A variant differs from the configured engine in exactly one option."""
    for has_tail in (False, True):
        found = variants(OPTIONS, has_tail=has_tail)
        assert found.pop("as configured") == OPTIONS
        assert len(found) == (4 if has_tail else 2)
        for options in found.values():
            changed = [f for f in OPTIONS.__slots__ if getattr(options, f) != getattr(OPTIONS, f)]
            assert len(changed) == 1


@pytest.mark.parametrize("switched", [None, True, False])
def test_graphs_of_tails_are_a_switch(
    switched: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU bounded is measured with and without them, where the model has a tail."""
    monkeypatch.setattr("engine.audit._on_gpu", lambda options: True)
    options = EngineConfig(device="cuda", runner="fast", tail_graphs=switched)
    name = f"prefill bounded, tail graphs {'on' if switched is False else 'off'}"

    found = variants(options, has_tail=True)
    assert found[name] == dataclasses.replace(
        found["prefill bounded"], tail_graphs=switched is False
    )
    assert name not in variants(options, has_tail=False)
    assert name not in variants(dataclasses.replace(options, graphs=False), has_tail=True)


def test_report_has_every_variant(checkpoint: Path, tmp_path: Path) -> None:
    """Tables, plots and numbers of all variants; replay's approximation shows, the cache's rounding too."""
    result = audit(checkpoint, OPTIONS, LOAD, say=lambda line: None)
    report = write_report(result, tmp_path / "out").read_text()
    names = variants(OPTIONS, has_tail=True)
    for name in names:
        assert f"| {name} |" in report
        rows = [r for r in result["rows"] if r["variant"] == name]
        assert [r["kind"] for r in rows] == ["cold", "warm"]
        assert all(r["ttft_ms"] > 0 and r["tok_s"] > 0 for r in rows)
    assert result["skipped"] == {}
    for name, differences in result["logprobs"].items():
        assert differences["prompt"]["tokens"] == 19
        assert differences["reply"]["tokens"] == 3
        assert differences["prompt"]["max"] < 1e-4
        assert (differences["reply"]["max"] > 1e-4) == (name == "prefill bounded")
    saved = orjson.loads((tmp_path / "out" / "audit.json").read_bytes())
    assert len(saved["rows"]) == 2 * len(names)
    for plot in ("ttft_ms", "itl_ms", "itl_p99_ms", "tok_s", "memory"):
        svg = (tmp_path / "out" / f"{plot}.svg").read_text()
        assert svg.count("<rect") == 2 * len(names)
    logprobs = (tmp_path / "out" / "logprobs.svg").read_text()
    assert logprobs.count("<rect") == 4 * (len(names) - 1)


def test_a_variant_that_takes_too_long_is_left(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured of it stays, the others go on, and the report says which and why."""
    measure = engine.audit._rows

    def rows(core: EngineCore, vocab: int, load: Load, end: float) -> Iterator[dict[str, Any]]:
        over = -1.0 if not core._scheduler.prefix.enabled else end
        yield from measure(core, vocab, load, over)

    monkeypatch.setattr(engine.audit, "_rows", rows)
    load = dataclasses.replace(LOAD, limit=1e6)
    result = audit(checkpoint, OPTIONS, load, say=lambda line: None)
    assert result["skipped"] == {"prefix cache off": "not measured to its end within 1e+06 s"}
    report = write_report(result, tmp_path).read_text()
    assert "`prefix cache off`: not measured to its end within 1e+06 s" in report


def test_what_does_not_fit_is_refused(checkpoint: Path) -> None:
    """Prompts beyond the context and more requests than slots are named with what there is."""
    with pytest.raises(EngineError, match="needs 1035, the context is 1024"):
        audit(checkpoint, OPTIONS, Load((1000,), (1,), 3, 1))
    with pytest.raises(EngineError, match="expected at most max_num_seqs 4, got 5"):
        audit(checkpoint, OPTIONS, Load((20,), (5,), 3, 1))


def test_a_configuration_that_cannot_be_loaded_is_an_error(checkpoint: Path) -> None:
    """Variants that cannot be loaded are left out with the reason, but not what they are compared with."""
    wrong = dataclasses.replace(OPTIONS, runner="fast", graphs=True)
    with pytest.raises(EngineError, match="graphs on: expected an NVIDIA GPU, got the CPU"):
        audit(checkpoint, wrong, LOAD, say=lambda line: None)


def test_misuse_of_the_command_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers that are none exit with 2 and the flag's name."""
    assert main(["audit", "--lengths", "12,x"]) == 2
    assert "--lengths: expected positive numbers" in capsys.readouterr().err
    assert main(["audit", "--max-num-seqs", "none"]) == 2
    assert (
        "--max-num-seqs: expected a whole number of at least 1, got 'none'"
        in capsys.readouterr().err
    )
    assert main(["audit", "--prefix-cache", "maybe"]) == 2
    assert "--prefix-cache: expected on or off, got 'maybe'" in capsys.readouterr().err
    for flag, accepted in (
        ("--new-tokens", "a whole number of at least 1"),
        ("--repeats", "a whole number of at least 1"),
        ("--limit", "a number of seconds above 0"),
    ):
        assert main(["audit", flag, "0"]) == 2
        assert f"{flag}: expected {accepted}, got 0" in capsys.readouterr().err


def test_the_command_audits_the_engine_that_its_flags_describe(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option but one is a flag, as it is for the server; the report is of that engine."""
    given: list[EngineConfig] = []

    def note(path: Path, options: EngineConfig, load: Load) -> dict[str, Any]:
        given.append(options)
        assert path == checkpoint
        assert load == Load((5, 7), (2,), 3, 1, limit=60.0)
        return {"model": "m", "machine": "", "load": {"repeats": 1}, "rows": [], "logprobs": {}, "skipped": {}}  # fmt: skip

    monkeypatch.setattr(engine.audit, "audit", note)
    flags = "--device cpu --max-num-seqs 4 --block-size 32 --prefix-cache off --speculation auto"
    load = "--lengths 5,7 --concurrency 2 --new-tokens 3 --repeats 1 --limit 60"
    where = ["--model", str(checkpoint), "--out", str(tmp_path)]
    assert main(["audit", *where, *flags.split(), *load.split()]) == 0
    assert given == [
        EngineConfig(
            device="cpu", max_num_seqs=4, block_size=32, prefix_cache=False, speculation="auto"
        )
    ]
    assert (tmp_path / "report.md").read_text().startswith("# Audit of m")
    assert main(["audit", "--record-routing", "x"]) == 2


@pytest.mark.parametrize("other", ["off", "on"])
def test_what_a_gpu_alone_has_is_a_switch_there(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs, fused kernels and lookahead are turned over whichever way they are; a CPU has but the last."""
    is_on = other == "off"
    options = EngineConfig(
        device="auto",
        runner="fast",
        graphs=None if is_on else False,
        kernels="auto" if is_on else "torch",
        lookahead=is_on,
    )
    monkeypatch.setattr("engine.audit._on_gpu", lambda options: True)
    found = variants(options, has_tail=False)
    assert found[f"graphs {other}"] == dataclasses.replace(options, graphs=not is_on)
    kernels = "torch" if is_on else "triton"
    assert found[f"fused kernels {other}"] == dataclasses.replace(options, kernels=kernels)
    assert found[f"lookahead {other}"] == dataclasses.replace(options, lookahead=not is_on)
    monkeypatch.setattr("engine.audit._on_gpu", lambda options: False)
    names = variants(options, has_tail=False)
    assert not any("graphs" in name or "kernels" in name for name in names)
    assert f"lookahead {other}" in names


def test_paging_is_a_switch() -> None:
    """Paged experts are compared with resident ones, whichever is configured; the reference has none."""
    fast = dataclasses.replace(OPTIONS, runner="fast")
    found = variants(fast, has_tail=False, slots=4)
    paged = found["experts paged, 4 slots"]
    assert paged == dataclasses.replace(fast, expert_slots=4)
    ahead = found["experts paged, 4 slots, prefetch"]
    assert ahead == dataclasses.replace(paged, expert_prefetch=True)
    some = dataclasses.replace(paged, resident_layers=1)
    found = variants(some, has_tail=False, slots=4)
    assert found["all experts resident"] == fast
    assert found["prefetch of experts on"] == dataclasses.replace(some, expert_prefetch=True)
    found = variants(ahead, has_tail=False, slots=4)
    assert found["all experts resident"] == fast
    assert found["prefetch of experts off"] == paged
    files = dataclasses.replace(some, expert_host_gb=1)
    assert not any("prefetch" in name for name in variants(files, has_tail=False, slots=4))
    assert not any("experts" in name for name in variants(OPTIONS, has_tail=False, slots=4))


def test_speculation_is_a_switch() -> None:
    """Drafts are compared with none where the model has draft stages, and the other way round."""
    fast = dataclasses.replace(OPTIONS, runner="fast")
    found = variants(fast, has_tail=False, drafter="mtp")
    assert found["speculation mtp"] == dataclasses.replace(fast, speculation="mtp")
    assert not any("speculation" in name for name in variants(fast, has_tail=False))
    assert not any("speculation" in n for n in variants(OPTIONS, has_tail=False, drafter="mtp"))
    drafting = dataclasses.replace(fast, speculation="mtp")
    found = variants(drafting, has_tail=False, drafter="mtp")
    assert found["speculation off"] == fast
