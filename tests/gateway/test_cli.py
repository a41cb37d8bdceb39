"""The command line's small helpers: doctor, render, parse, and the way to the engine's own."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from engine import TINY_CHECKPOINT
from engine.api import EngineError
from engine.device.build import build
from engine.kernels import at_once
from engine.options import EngineConfig
from gateway import __version__
from gateway.cli import main
from gateway.settings import Settings
from tests.gateway.support import chat_body

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="{name}">\n'
    '<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


@pytest.fixture
def checkpoint(tmp_path: Path, tokenizer_path: Path) -> Path:
    folder = tmp_path / "test-model"
    folder.mkdir()
    shutil.copy(TINY_CHECKPOINT / "config.json", folder)
    shutil.copy(tokenizer_path, folder / "tokenizer.json")
    return folder


def write(path: Path, content: Any) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else orjson.dumps(content))
    return path


class TestRender:
    """`bathyal render` shows what a body becomes."""

    def test_the_prompt_is_shown_with_its_ids(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Text with markers, every id, the sampling, the fields without effect."""
        body = write(tmp_path / "body.json", chat_body("Grüße", user="me", temperature=0.5))

        assert main(["render", str(body), "--model", str(checkpoint)]) == 0
        out = capsys.readouterr().out
        assert "<｜begin▁of▁sentence｜><｜User｜>Grüße<｜Assistant｜></think>" in out
        assert "prompt_ids (11): 0 3 " in out  # four markers and seven bytes
        assert "temperature=0.5" in out
        assert "ignored: user" in out

    def test_a_wrong_body_is_named(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The request's error is the command's."""
        body = write(tmp_path / "body.json", chat_body(temperature=9))

        assert main(["render", str(body), "--model", str(checkpoint)]) == 2
        assert "bathyal: temperature: expected a number in [0, 2]" in capsys.readouterr().err

    def test_a_missing_file_is_named(
        self, checkpoint: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """No traceback for a misspelt path."""
        assert main(["render", "/no/such.json", "--model", str(checkpoint)]) == 2
        assert "/no/such.json" in capsys.readouterr().err


class TestParse:
    """`bathyal parse` plays raw output through today's parsers."""

    def parse(self, checkpoint: Path, tmp_path: Path, output: str, *flags: str) -> int:
        tools = write(tmp_path / "tools.json", [WEATHER])
        out = write(tmp_path / "out.txt", output)
        return main(["parse", str(out), "--tools", str(tools), "--model", str(checkpoint), *flags])

    def test_a_call_is_shown_frame_by_frame(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The wire JSON stands under the token that caused it; nothing was reported."""
        status = self.parse(checkpoint, tmp_path, "Look.</think>" + CALL.format(name="get_weather"))

        out = capsys.readouterr().out
        assert status == 0
        assert "7 '</think>'\n" in out
        assert '"reasoning_content":"L"' in out
        assert '"name":"get_weather"' in out
        assert '"finish_reason":"tool_calls"' in out
        assert out.rstrip().endswith("report: null")

    def test_what_the_gate_withheld_is_found(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """An undeclared tool is named in the report, and the exit status says so."""
        assert self.parse(checkpoint, tmp_path, CALL.format(name="rm_rf")) == 1
        out = capsys.readouterr().out
        assert '"withheld_calls"' in out
        assert '"name": "rm_rf"' in out
        assert '"tool_calls"' not in out  # not on the wire

    def test_raw_reads_markers_as_characters(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Imitated markers make no call."""
        self.parse(checkpoint, tmp_path, CALL.format(name="get_weather"), "--raw")

        assert '"finish_reason":"stop"' in capsys.readouterr().out

    def test_wrong_tools_are_named(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A file that is no JSON is the user's error."""
        out = write(tmp_path / "out.txt", "a")
        tools = write(tmp_path / "tools.json", "{")

        arguments = ["parse", str(out), "--tools", str(tools), "--model", str(checkpoint)]
        assert main(arguments) == 2
        assert f"{tools}: not JSON" in capsys.readouterr().err

    def test_bytes_that_are_no_text_are_refused(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The file is named, and what is wrong with it."""
        out = tmp_path / "out.txt"
        out.write_bytes(b"\xff")

        assert main(["parse", str(out), "--model", str(checkpoint)]) == 2
        assert f"bathyal: {out}: expected text in UTF-8: " in capsys.readouterr().err


class Driver:
    """What an NVIDIA driver of one GPU answers."""

    def __init__(self, name: bytes, capability: tuple[int, int], nbytes: int) -> None:
        self.name, self.capability, self.nbytes = name, capability, nbytes

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def cuDeviceGetName(self, buffer: Any, size: int, ordinal: int) -> int:
        buffer.value = self.name
        return 0

    def cuDeviceTotalMem_v2(self, nbytes: Any, ordinal: int) -> int:
        nbytes._obj.value = self.nbytes
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, ordinal: int) -> int:
        value._obj.value = dict(zip((75, 76), self.capability, strict=True))[attribute]
        return 0


class TestDoctor:
    """`bathyal doctor` finds what would stop a start."""

    def test_missing_weights_are_a_problem(
        self, checkpoint: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A folder without weights is told apart from a whole one."""
        assert main(["doctor", "--model", str(checkpoint)]) == 1
        without = capsys.readouterr().out
        (checkpoint / "model.safetensors").write_bytes(bytes(1000))
        assert main(["doctor", "--model", str(checkpoint)]) == 0
        whole = capsys.readouterr().out

        assert "PROBLEM checkpoint" in without
        assert "PROBLEM" not in whole
        assert "DeepSeek-V4.1" in whole
        assert f"bathyal            {__version__}" in whole
        assert "deepseek-recipe    0.2." in whole
        assert "rooms              all four in " in whole

    def test_every_option_of_the_engine_is_shown_with_the_rule_that_set_it(
        self, checkpoint: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Whoever asks why a value is what it is finds the rule, or the option that is wrong."""
        (checkpoint / "model.safetensors").write_bytes(bytes(1000))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BATHYAL_DEVICE", "cpu")
            assert main(["doctor", "--model", str(checkpoint)]) == 0
        shown = capsys.readouterr().out
        for item in fields(EngineConfig):
            assert f"engine option      {item.name} = " in shown
        assert "device = cpu (user)" in shown
        assert "runner = reference (device is cpu)" in shown

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BATHYAL_NUM_BLOCKS", "1")
            assert main(["doctor", "--model", str(checkpoint)]) == 1
        assert "PROBLEM engine options     num_blocks: " in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("given", "reasons"),
        [
            ({"EXPERT_SLOTS": "99"}, ["expert_slots: expected "]),
            (
                {"GRAPHS": "on"},
                ["the fast runner cannot be built: graphs on: expected an NVIDIA GPU, got the CPU"],
            ),
            (
                {"GRAPHS": "on", "RUNNER": "reference"},
                ["runner: expected fast, got reference beside graphs on", "graphs on: expected an"],
            ),
            (
                {"RUNNER": "fast", "GRAPHS": "on", "KERNELS": "triton", "EXPERT_SLOTS": "1"},
                ["graphs on: expected an NVIDIA GPU", "kernels triton: expected", "expert_slots: "],
            ),
        ],
    )
    def test_what_a_start_would_refuse_is_a_problem(
        self,
        given: dict[str, str],
        reasons: list[str],
        checkpoint: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The same words as those of the start, which needs no weights for them."""
        (checkpoint / "model.safetensors").write_bytes(bytes(1000))
        monkeypatch.setenv("BATHYAL_DEVICE", "cpu")
        for name, value in given.items():
            monkeypatch.setenv(f"BATHYAL_{name}", value)
        assert main(["doctor", "--model", str(checkpoint)]) == 1
        told = [line for line in capsys.readouterr().out.splitlines() if "PROBLEM" in line]
        assert len(told) == 1
        with pytest.raises(EngineError) as error:
            build(checkpoint, Settings.load(os.environ, {}).engine)
        assert str(error.value) in told[0]
        for reason in reasons:
            assert reason in told[0]

    def test_a_gpu_is_asked_for_what_a_start_looks_at(
        self,
        checkpoint: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Name, memory and compute capability come from the driver, and what is too old is refused."""
        (checkpoint / "model.safetensors").write_bytes(bytes(1000))
        for capability, old in (((9, 0), False), ((8, 0), True)):
            driver = Driver(b"Some GPU", capability, 80 * 10**9)
            monkeypatch.setattr(ctypes, "CDLL", lambda name, found=driver: found)
            assert main(["doctor", "--model", str(checkpoint)]) == int(old)
            shown = capsys.readouterr().out
            assert "device = cuda (found Some GPU)" in shown
            refused = (
                "compute capability: expected 8.9 or above for FP8 kernels, got Some GPU with 8.0"
            )
            assert (refused in shown) == old
        driver = Driver(b"Some GPU", (9, 0), 10**6)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
        assert main(["doctor", "--model", str(checkpoint)]) == 1
        assert "GPU memory: expected at most 1,000,000 bytes" in capsys.readouterr().out

    def test_a_missing_special_token_is_a_problem(
        self, checkpoint: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The token that the codec needs is named."""
        path = checkpoint / "tokenizer.json"
        path.write_text(path.read_text(encoding="utf-8").replace("<｜System｜>", "<｜Sistem｜>"))

        assert main(["doctor", "--model", str(checkpoint)]) == 1
        assert "<｜System｜>" in capsys.readouterr().out

    def test_a_broken_config_is_a_problem(
        self, checkpoint: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The configuration's own complaint is shown."""
        (checkpoint / "config.json").write_text("{}")

        assert main(["doctor", "--model", str(checkpoint)]) == 1
        assert "PROBLEM checkpoint" in capsys.readouterr().out

    def test_a_foreign_package_under_our_name_is_a_problem(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        """Our four rooms have generic names: another distribution's `conformance` is found."""
        foreign = tmp_path / "elsewhere"
        (foreign / "conformance").mkdir(parents=True)
        (foreign / "conformance" / "__init__.py").touch()

        result = subprocess.run(
            [sys.executable, "-m", "gateway", "doctor", "--model", str(checkpoint)],
            cwd=foreign,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

        assert result.returncode == 1
        assert f"conformance in {foreign}" in result.stdout


def test_the_engines_commands_are_the_engines(capsys: pytest.CaptureFixture[str]) -> None:
    """`bathyal engine ...` hands everything on, flags and exit status included."""
    assert main(["engine", "inspect", "/no/such/checkpoint"]) == 2
    assert "bathyal engine inspect: /no/such/checkpoint" in capsys.readouterr().err
    assert main(["engine", "--help"]) == 0
    assert "bathyal engine" in capsys.readouterr().out


def test_a_file_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the path and the system's words, no number of an error."""
    assert main(["render", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"bathyal: {tmp_path}/none: No such file or directory\n"


def test_an_interrupt_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a command of the engine shows no traceback."""

    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.cli.main", interrupted)
    assert main(["engine", "audit"]) == 130


def test_a_grid_that_does_not_fit_the_gpu_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that a start may not launch ends it as any option that cannot be served does."""
    room = at_once.Room(multiprocessors=132, threads=2048, shared=232448)
    compiled = SimpleNamespace(
        _init_handles=lambda: None, n_regs=128, metadata=SimpleNamespace(num_warps=2, shared=0)
    )

    def refuse(*args: object, **how: object) -> None:
        at_once._check("experts_kernel", compiled, 133 * 8, room)

    monkeypatch.setattr("engine.device.build.FastRunner", refuse)
    monkeypatch.setattr("gateway.cli.to_stderr", lambda level: None)
    status = main(["serve", "--port", "0", "--device", "cpu", "--runner", "fast"])

    told = capsys.readouterr().err
    assert status == 2
    assert told.count("\n") == 1
    assert told.startswith("bathyal: the kernels do not fit this GPU: experts_kernel: ")
    assert "expected at most 1056 (8 on each of 132 multiprocessors" in told
    assert told.endswith("got 1064; --kernels torch does without them\n")


def test_misuse_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown command or flag shows the usage."""
    for arguments in ([], ["sevre"], ["serve", "--prot", "1"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "usage: bathyal" in capsys.readouterr().err


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """`bathyal serve --help` is the whole reference of the settings."""
    with pytest.raises(SystemExit):
        main(["serve", "--help"])

    out = capsys.readouterr().out
    for flag in ("--host", "--port", "--model", "--backend", "--keep-alive-seconds"):
        assert flag in out


def test_a_flag_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    """`--max` could be three settings today and a fourth tomorrow: it is refused."""
    with pytest.raises(SystemExit):
        main(["serve", "--drain", "3"])

    assert "--drain" in capsys.readouterr().err
