"""Settings: one declaration, three sources, no silent mistake."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from engine import TINY_CHECKPOINT
from engine.api import EngineError
from engine.options import EngineConfig, rule_of
from gateway.settings import Settings, SettingsError, flags


def test_the_defaults_serve_the_tiny_model_on_loopback() -> None:
    """Without any setting the server listens on 127.0.0.1 and serves what ships."""
    settings = Settings.load({}, {})

    assert (
        settings.host,
        settings.backend,
        settings.model,
    ) == ("127.0.0.1", "embedded", TINY_CHECKPOINT)


def test_a_flag_beats_the_variable_and_the_variable_the_default() -> None:
    """The nearest source wins."""
    environ = {"BATHYAL_PORT": "9000", "BATHYAL_HOST": "::1", "PATH": "/bin"}

    settings = Settings.load(environ, {"port": "8080", "host": None})

    assert (settings.port, settings.host, settings.keep_alive_seconds) == (8080, "::1", 10.0)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("port", "0", 0),
        ("backend", "scripted:a.jsonl", "scripted:a.jsonl"),
        ("aliases", "gpt-5, deepseek-chat", ("gpt-5", "deepseek-chat")),
        ("keep_alive_seconds", "0.5", 0.5),
        ("max_model_len", "512", 512),
        ("device", "cpu", "cpu"),
        ("runner", "fast", "fast"),
        ("graphs", "off", False),
        ("lookahead", "on", True),
        ("max_batched_tokens", "64", 64),
        ("model", "/", Path("/")),
        ("profile", "sglang", "sglang"),
        ("store", "off", "off"),
        ("store", "responses.sqlite", "responses.sqlite"),
        ("record", "r.jsonl", Path("r.jsonl")),
    ],
)
def test_texts_become_values(field: str, text: str, value: object) -> None:
    """A setting means the same from a flag and from a variable."""
    by_flag = Settings.load({}, {field: text})
    by_variable = Settings.load({f"BATHYAL_{field.upper()}": text}, {})

    assert value == getattr(by_flag, field) == getattr(by_variable, field)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("host", ""),
        ("port", "http"),
        ("port", "65536"),
        ("port", "-1"),
        ("model", "/no/such/folder"),
        ("backend", "vllm"),
        ("backend", "scripted:"),
        ("backend", "scripted"),
        ("name", " x"),
        ("aliases", "a,,b"),
        ("device", "tpu"),
        ("kernels", "cuda"),
        ("graphs", "yes"),
        ("max_batched_tokens", "1"),
        ("max_model_len", "0"),
        ("max_num_seqs", "1.5"),
        ("keep_alive_seconds", "0"),
        ("keep_alive_seconds", "nan"),
        ("keep_alive_seconds", "inf"),
        ("drain_seconds", "-3"),
        ("max_body_bytes", "32M"),
        ("profile", "openai"),
        ("log", "loud"),
        ("store", "/no/such/folder/store.sqlite"),
        ("store", "/"),
        ("record", "/no/such/folder/record.jsonl"),
        ("record", ""),
        ("api_keys", "/no/such/file"),
        ("key_concurrency", "0"),
        ("key_requests_per_minute", "1.5"),
        ("max_open_requests", "0"),
        ("stall_seconds", "-1"),
    ],
)
def test_a_value_that_cannot_be_used_stops_the_start(field: str, text: str) -> None:
    """The message names the source, what is accepted and what came."""
    variable = f"BATHYAL_{field.upper()}"

    with pytest.raises(SettingsError) as by_variable:
        Settings.load({variable: text}, {})
    with pytest.raises(SettingsError) as by_flag:
        Settings.load({}, {field: text})

    assert str(by_variable.value).startswith(f"{variable}: expected ")
    assert str(by_flag.value).startswith(f"--{field.replace('_', '-')}: expected ")
    assert str(by_flag.value).endswith(f"got {text!r}")


def test_a_misspelt_variable_stops_the_start() -> None:
    """A limit that nobody reads is reported, not lost."""
    with pytest.raises(SettingsError, match=r"BATHYAL_MAX_BODY is not a setting; .*MAX_BODY_BYTES"):
        Settings.load({"BATHYAL_MAX_BODY": "1"}, {})


def test_every_setting_has_a_flag() -> None:
    """The command line offers what the dataclass holds, once each; but for a secret."""
    names = [item.name for item in fields(Settings)]
    assert [name for name in names if name != "api_key"] == [name for name, _, _ in flags()]


def test_a_key_is_never_shown() -> None:
    """Neither the settings nor the refusal of a bad key repeat it."""
    settings = Settings.load({"BATHYAL_API_KEY": "sk-0123456789"}, {})
    assert settings.api_key == "sk-0123456789"
    assert "sk-0123456789" not in repr(settings)

    with pytest.raises(SettingsError, match="BATHYAL_API_KEY: expected 8 to 256") as refusal:
        Settings.load({"BATHYAL_API_KEY": "se cret"}, {})
    assert "se cret" not in str(refusal.value)


def test_settings_do_not_change() -> None:
    """What the server was started with is what it runs with."""
    with pytest.raises(FrozenInstanceError):
        Settings().port = 1  # type: ignore[misc]


def test_every_option_of_the_engine_is_a_setting() -> None:
    """Defaults, help and accepted values are those that the engine declares, and all reach it."""
    listed = {name: about for name, _, about in flags()}
    for item in fields(EngineConfig):
        assert rule_of(item.name).about in listed[item.name]
    assert Settings().engine == EngineConfig()
    given = {"runner": "fast", "graphs": "off", "max_num_seqs": "3", "block_size": "256"}

    assert Settings.load({}, given).engine == EngineConfig(
        runner="fast", graphs=False, max_num_seqs=3, block_size=256
    )


def test_options_that_contradict_each_other_are_refused() -> None:
    """What the engine refuses together is refused with both values in the message."""
    settings = Settings.load({}, {"max_num_seqs": "8", "max_batched_tokens": "8"})

    with pytest.raises(EngineError, match="max_batched_tokens: expected at least 9, got 8"):
        _ = settings.engine


def test_files_of_the_engine_are_looked_for(tmp_path: Path) -> None:
    """A file that is read must be there, the folder of one that is written too."""
    slots = tmp_path / "slots"
    slots.write_text("2")
    given = {"expert_slots_file": str(slots), "record_routing": str(tmp_path / "new")}
    assert Settings.load({}, given).engine.expert_slots_file == slots
    with pytest.raises(SettingsError, match="--expert-slots-file: expected a file that exists"):
        Settings.load({}, {"expert_slots_file": str(tmp_path / "none")})
    with pytest.raises(SettingsError, match="--record-routing: expected a file in a folder that"):
        Settings.load({}, {"record_routing": str(tmp_path / "no" / "trace")})
    with pytest.raises(
        SettingsError, match="--expert-slots: expected a whole number of at least 1"
    ):
        Settings.load({}, {"expert_slots": "0"})
