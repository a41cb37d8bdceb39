"""What a user may set, declared once: the field, its flag, its environment variable and its check.

A flag beats the variable (`--port 8080` over `BATHYAL_PORT=9000`), the variable beats the default.
A value that cannot be used stops the start and says where it came from; so does a `BATHYAL_`
variable that no setting reads, because a misspelt limit is a limit that is not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

from engine import TINY_CHECKPOINT

Device = Literal["auto", "cpu", "cuda"]

#: Prefix of every environment variable that the gateway reads.
ENV_PREFIX = "BATHYAL_"


class SettingsError(Exception):
    """A setting has a value that cannot be used; the message names it and what is accepted."""


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:
        raise ValueError
    return number


def _positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _positive_seconds(text: str) -> float:
    number = float(text)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError
    return number


def _name(text: str) -> str:
    if not text or text != text.strip() or not text.isprintable():
        raise ValueError
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(_name(part.strip()) for part in text.split(","))


def _backend(text: str) -> str:
    kind, _, argument = text.partition(":")
    if text != "embedded" and not (kind == "scripted" and argument):
        raise ValueError
    return text


def _device(text: str) -> Device:
    if text not in get_args(Device):
        raise ValueError
    return cast(Device, text)


def _folder(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_dir():
        raise ValueError
    return path


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a setting's text becomes its value, and the words for it."""

    parse: Callable[[str], Any]
    expected: str
    about: str


def _rule(parse: Callable[[str], Any], expected: str, about: str) -> dict[str, _Rule]:
    return {"rule": _Rule(parse, expected, about)}


@dataclass(frozen=True, slots=True)
class Settings:
    """The gateway's settings. Built in code as they are, or from flags and variables by `load`."""

    host: str = field(
        default="127.0.0.1", metadata=_rule(_name, "an address", "address to listen on")
    )
    port: int = field(
        default=8000,
        metadata=_rule(_port, "a port, 0 to 65535", "port to listen on; 0 takes a free one"),
    )
    model: Path = field(
        default=TINY_CHECKPOINT,
        metadata=_rule(
            _folder,
            "a folder that exists",
            "folder of the checkpoint: config.json, tokenizer.json, *.safetensors",
        ),
    )
    backend: str = field(
        default="embedded",
        metadata=_rule(
            _backend,
            "'embedded' or 'scripted:FILE'",
            "what makes the tokens: embedded (the engine, in this process) or scripted:FILE",
        ),
    )
    device: Device = field(
        default="auto",
        metadata=_rule(
            _device,
            "one of auto, cpu, cuda",
            "where the engine runs; auto takes the first NVIDIA GPU where there is one",
        ),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=_rule(
            _positive_int,
            "a whole number of tokens above 0",
            "context served, prompt and reply together (default: the model's own)",
        ),
    )
    max_num_seqs: int = field(
        default=16,
        metadata=_rule(
            _positive_int, "a whole number above 0", "most requests the engine runs at once"
        ),
    )
    name: str | None = field(
        default=None,
        metadata=_rule(_name, "a name", "name the model is served under (default: its own)"),
    )
    aliases: tuple[str, ...] = field(
        default=(),
        metadata=_rule(
            _names, "names separated by commas", "further names the model answers to, by commas"
        ),
    )
    keep_alive_seconds: float = field(
        default=10.0,
        metadata=_rule(
            _positive_seconds,
            "a number of seconds above 0",
            "silence after which a stream gets a keep-alive comment",
        ),
    )
    drain_seconds: int = field(
        default=30,
        metadata=_rule(
            _positive_int,
            "a whole number of seconds above 0",
            "how long open replies may go on after SIGTERM",
        ),
    )
    max_body_bytes: int = field(
        default=32 * 1024 * 1024,
        metadata=_rule(
            _positive_int, "a whole number of bytes above 0", "largest request body that is read"
        ),
    )

    @classmethod
    def load(cls, environ: Mapping[str, str], given: Mapping[str, str | None]) -> Settings:
        """Build settings from environment variables and command-line flags.

        Args:
            environ: the environment; variables without the prefix are none of ours.
            given: field name to the text given on the command line, None where none was.

        Raises:
            SettingsError: a value cannot be used, or a variable with our prefix is no setting.
        """
        known = {ENV_PREFIX + item.name.upper(): item for item in fields(cls)}
        unknown = sorted(
            name for name in environ if name.startswith(ENV_PREFIX) and name not in known
        )
        if unknown:
            raise SettingsError(
                f"{unknown[0]} is not a setting; there are {', '.join(sorted(known))}"
            )
        values: dict[str, Any] = {}
        for variable, item in known.items():
            text = given.get(item.name)
            if text is not None:
                values[item.name] = _parse(item, text, source=_flag(item.name))
            elif variable in environ:
                values[item.name] = _parse(item, environ[variable], source=variable)
        return cls(**values)


def flags() -> list[tuple[str, str, str]]:
    """List (field, flag, help) of every setting, for a command line."""
    return [
        (item.name, _flag(item.name), item.metadata["rule"].about + _shown(item.default))
        for item in fields(Settings)
    ]


def _flag(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _shown(default: Any) -> str:
    if default is None or default == ():
        return ""
    return " [the one that ships]" if default == TINY_CHECKPOINT else f" [{default}]"


def _parse(item: Field[Any], text: str, *, source: str) -> Any:
    rule: _Rule = item.metadata["rule"]
    try:
        return rule.parse(text)
    except ValueError:
        raise SettingsError(f"{source}: expected {rule.expected}, got {text!r}") from None
