"""The audit on the CPU: every switch is measured, and the report says what was found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

import engine.audit
import engine.audit_report
from engine.api import EngineError
from engine.architectures import read_config
from engine.audit import Load, audit
from engine.audit_report import open_folder, write_report
from engine.cli import main
from engine.core import EngineCore
from engine.options import EngineConfig
from tests.engine.model import build

LOAD = Load(lengths=(20,), concurrency=(2,), new_tokens=3, repeats=1)
OPTIONS = EngineConfig(device="cpu", max_num_seqs=4, block_size=16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.write(Path(tmp_path_factory.mktemp("v41")), build.v41())


def test_report_has_every_variant(checkpoint: Path, tmp_path: Path) -> None:
    """Tables, plots and numbers of all variants; replay's approximation shows, the cache's rounding too."""
    result = audit(checkpoint, OPTIONS, LOAD, say=lambda line: None)
    open_folder(tmp_path / "out")
    report = write_report(result, tmp_path / "out").read_text()
    assert "- `max_num_seqs = 4 (user)`\n" in report
    assert "- `dtype = float32 (device is cpu)`\n" in report
    assert "Cut" not in report
    names = ["as configured", "fast runner", "prefix cache off", "prefill exact", "prefill bounded"]
    assert list(dict.fromkeys(r["variant"] for r in result["rows"])) == names
    assert "## Not compared here" in report
    assert "- graphs, because a CPU has none\n" in report
    assert set(result["left_out"]) == {
        "graphs",
        "fused kernels",
        "lookahead",
        "paged experts and their prefetch",
        "speculation",
        "tail graphs",
    }
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


def test_paging_chooses_the_runner_of_all_variants(checkpoint: Path, tmp_path: Path) -> None:
    """What only the fast runner has is compared where another option has chosen it, and acts."""
    options = dataclasses.replace(OPTIONS, expert_slots=3, prefix_cache=False)
    result = audit(checkpoint, options, LOAD, say=lambda line: None)
    assert result["skipped"] == {}
    names = {row["variant"] for row in result["rows"]}
    assert {"lookahead off", "all experts resident", "prefetch of experts on"} <= names
    assert "fast runner" not in names
    assert (
        "speculation, because it does not go with paged experts"
        in write_report(result, tmp_path).read_text()
    )


def test_what_does_not_fit_is_refused(checkpoint: Path) -> None:
    """Prompts beyond the context and more requests than slots are named at once, with what there is."""
    with pytest.raises(EngineError) as error:
        audit(checkpoint, OPTIONS, Load((1000,), (5,), 3, 1))
    assert "needs 1035, the context is 1024; " in str(error.value)
    assert "concurrency: expected at most max_num_seqs 4, got 5" in str(error.value)


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
    flags = "--lengths 64,abc --concurrency 0 --repeats 0 --limit -1 --dtype x --block-size 0"
    assert main(["audit", *flags.split()]) == 2
    told = capsys.readouterr().err
    for flag in flags.split()[::2]:
        assert f"{flag}: expected" in told
    assert (
        main(["audit", "--lengths", "a", "--max-num-seqs", "9", "--max-batched-tokens", "5"]) == 2
    )
    told = capsys.readouterr().err
    assert "--lengths: expected" in told
    assert "max_batched_tokens: expected at least 10, got 5" in told


def test_the_command_audits_the_engine_that_its_flags_describe(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option but one is a flag, as it is for the server; the report is of that engine."""
    given: list[EngineConfig] = []

    def note(path: Path, options: EngineConfig, load: Load, keep: Any) -> None:
        given.append(options)
        assert path == checkpoint
        assert load == Load((5, 7), (2,), 3, 1, limit=60.0)
        keep({"model": "m", "machine": "", "load": {"repeats": 1}, "rows": [], "logprobs": {}, "skipped": {}, "left_out": {}, "missing": [], "configured": ["dtype = float32 (user)"]})  # fmt: skip

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
    told = (tmp_path / "report.md").read_text()
    assert told.startswith("# Audit of m")
    assert "## As configured\n\n- `dtype = float32 (user)`\n" in told
    assert main(["audit", "--record-routing", "x"]) == 2


@pytest.mark.parametrize("out", ["file", "file/below", "closed"])
def test_a_folder_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    out: str,
) -> None:
    """Whoever gives a file, or a folder of somebody else's, hears so at once."""
    (tmp_path / "file").touch()
    measured: list[object] = []
    monkeypatch.setattr(engine.audit, "audit", lambda *_, **__: measured.append(1))

    def closed(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    if out == "closed":  # a test may run as root, whom no mode keeps out
        monkeypatch.setattr(engine.audit_report.tempfile, "TemporaryFile", closed)
    assert main(["audit", "--out", str(tmp_path / out)]) == 2
    told = capsys.readouterr().err
    assert f"--out: expected a folder that can be written to, got {tmp_path / out} (" in told
    assert measured == []


def test_what_was_measured_is_kept_when_an_audit_is_cut(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C in the second variant: rows of the first, and what is missing, with the options asked for."""
    measure, begun = engine.audit._rows, []

    def rows(core: EngineCore, vocab: int, load: Load, end: float) -> Iterator[dict[str, Any]]:
        begun.append(core)
        for row in measure(core, vocab, load, end):
            yield row
            if len(begun) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(engine.audit, "_rows", rows)
    slots = tmp_path / "slots"
    slots.write_text("3\n" * len(read_config(checkpoint).layers))  # type: ignore[union-attr]
    out = tmp_path / "new" / "out"
    flags = "--device cpu --lengths 20 --concurrency 1 --new-tokens 2 --repeats 1"
    where = ["--model", str(checkpoint), "--out", str(out), "--expert-slots-file", str(slots)]
    with pytest.raises(KeyboardInterrupt):
        main(["audit", *where, *flags.split()])

    assert f"cut; {out / 'report.md'} has what was measured" in capsys.readouterr().err
    saved = orjson.loads((out / "audit.json").read_bytes())
    first, second = (row["variant"] for row in saved["rows"][1:])
    assert (first, second) == ("as configured", "lookahead off")
    assert saved["missing"][0] == second
    assert saved["options"]["expert_slots_file"] == str(slots)
    assert set(saved["logprobs"]) == {second}
    report = (out / "report.md").read_text()
    assert "**Cut: these were not measured to their end: `lookahead off`, `" in report
    assert f"- `expert_slots_file = {slots} (user)`" in report
