"""What a user may set, declared once: the field, its flag, its environment variable and its check.

A flag beats the variable (`--port 8080` over `BATHYAL_PORT=9000`), the variable beats the default.
A value that cannot be used stops the start and says where it came from; so does a `BATHYAL_`
variable that no setting reads, because a misspelt limit is a limit that is not there.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

from engine import TINY_CHECKPOINT
from engine.options import EngineConfig, new_file, old_file, rule_of

ProfileName = Literal["official", "sglang", "agent"]
LogLevel = Literal["error", "warning", "info"]

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


def _profile(text: str) -> ProfileName:
    if text not in get_args(ProfileName):
        raise ValueError
    return cast(ProfileName, text)


def _store(text: str) -> str:
    if text in ("off", "memory"):
        return text
    return str(new_file(text))


def _log_level(text: str) -> LogLevel:
    if text not in get_args(LogLevel):
        raise ValueError
    return cast(LogLevel, text)


def _key(text: str) -> str:
    if not re.fullmatch(r"[!-~]{8,256}", text):
        raise ValueError
    return text


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
    secret: bool = False  # never on a command line, which every user of the machine can read


_SECONDS = "a number of seconds above 0"


def _rule(
    parse: Callable[[str], Any], expected: str, about: str, *, secret: bool = False
) -> dict[str, _Rule]:
    return {"rule": _Rule(parse, expected, about, secret)}


def _engine_option(name: str) -> Any:
    """A setting that is an option of the engine, as engine.options declares it."""
    rule = rule_of(name)
    default = getattr(EngineConfig(), name)
    return field(default=default, metadata=_rule(rule.parse, rule.accepted, rule.about))


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
    device: Literal["auto", "cpu", "cuda"] = _engine_option("device")
    dtype: Literal["auto", "float32", "bfloat16"] = _engine_option("dtype")
    runner: Literal["auto", "reference", "fast"] = _engine_option("runner")
    kernels: Literal["auto", "torch", "triton"] = _engine_option("kernels")
    graphs: bool | None = _engine_option("graphs")
    lookahead: bool = _engine_option("lookahead")
    max_model_len: int | None = _engine_option("max_model_len")
    max_num_seqs: int = _engine_option("max_num_seqs")
    max_batched_tokens: int | None = _engine_option("max_batched_tokens")
    max_mixed_tokens: int | None = _engine_option("max_mixed_tokens")
    block_size: int = _engine_option("block_size")
    num_blocks: int | None = _engine_option("num_blocks")
    prefix_cache: bool = _engine_option("prefix_cache")
    prefill: Literal["off", "exact", "bounded"] = _engine_option("prefill")
    tail_graphs: bool | None = _engine_option("tail_graphs")
    speculation: Literal["off", "auto", "dspark", "mtp"] = _engine_option("speculation")
    max_snapshots: int = _engine_option("max_snapshots")
    expert_slots: int | None = _engine_option("expert_slots")
    expert_slots_file: Path | None = _engine_option("expert_slots_file")  # noqa: RUF009 - a declaration, as all
    resident_layers: int = _engine_option("resident_layers")
    expert_host_gb: int | None = _engine_option("expert_host_gb")
    expert_prefetch: bool = _engine_option("expert_prefetch")
    record_routing: Path | None = _engine_option("record_routing")  # noqa: RUF009 - a declaration, as all
    cpu_threads: int | None = _engine_option("cpu_threads")
    name: str | None = field(
        default=None,
        metadata=_rule(_name, "a name", "name the model is served under (default: its own)"),
    )
    aliases: tuple[str, ...] = field(
        default=(),
        metadata=_rule(
            _names,
            "names separated by commas",
            "further names the model answers to, by commas; * stands for any characters",
        ),
    )
    profile: ProfileName = field(
        default="agent",
        metadata=_rule(
            _profile,
            "one of official, sglang, agent",
            "rules for what the protocols leave open; docs/protocols.md has the table",
        ),
    )
    store: str = field(
        default="memory",
        metadata=_rule(
            _store,
            "'memory', 'off' or a file in a folder that exists",
            "where responses are kept for previous_response_id: in memory, in a file, or nowhere",
        ),
    )
    store_max_bytes: int = field(
        default=256 * 1024 * 1024,
        metadata=_rule(
            _positive_int,
            "a whole number of bytes above 0",
            "most that is kept of responses; the oldest go first",
        ),
    )
    record: Path | None = field(
        default=None,
        metadata=_rule(
            new_file,
            "a file in a folder that exists",
            "file that every exchange is appended to, prompt and reply, for bathyal replay",
        ),
    )
    keep_alive_seconds: float = field(
        default=10.0,
        metadata=_rule(
            _positive_seconds,
            _SECONDS,
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
    max_messages: int = field(
        default=10_000,
        metadata=_rule(
            _positive_int,
            "a whole number above 0",
            "most messages, or input items, of one request; more get 400",
        ),
    )
    max_tools: int = field(
        default=1024,
        metadata=_rule(
            _positive_int, "a whole number above 0", "most tools of one request; more get 400"
        ),
    )
    max_images: int = field(
        default=64,
        metadata=_rule(
            _positive_int,
            "a whole number above 0",
            "most images of one request to a model that sees; more get 400",
        ),
    )
    max_image_bytes: int = field(
        default=10 * 1024 * 1024,
        metadata=_rule(_positive_int, "a whole number of bytes above 0", "largest image"),
    )
    max_image_pixels: int = field(
        default=40_000_000,
        metadata=_rule(
            _positive_int, "a whole number above 0", "most pixels of an image, width times height"
        ),
    )
    image_seconds: float = field(
        default=20.0,
        metadata=_rule(
            _positive_seconds, _SECONDS, "how long fetching a request's images may take in all"
        ),
    )
    body_seconds: float = field(
        default=60.0,
        metadata=_rule(
            _positive_seconds, _SECONDS, "how long a client may take to send its request's body"
        ),
    )
    first_token_seconds: float = field(
        default=600.0,
        metadata=_rule(
            _positive_seconds, _SECONDS, "how long a request may wait for its first token, then 504"
        ),
    )
    step_seconds: float = field(
        default=120.0,
        metadata=_rule(
            _positive_seconds, _SECONDS, "how long a reply may wait for its next token, then 504"
        ),
    )
    request_seconds: float = field(
        default=3600.0,
        metadata=_rule(_positive_seconds, _SECONDS, "how long a reply may take in all, then 504"),
    )
    stall_seconds: float = field(
        default=60.0,
        metadata=_rule(
            _positive_seconds,
            _SECONDS,
            "how long a reader may leave a stream unread before it counts as gone",
        ),
    )
    max_open_requests: int = field(
        default=1024,
        metadata=_rule(
            _positive_int,
            "a whole number above 0",
            "most generating requests open at once, running or waiting; more get 503",
        ),
    )
    api_key: str | None = field(
        default=None,
        repr=False,
        metadata=_rule(
            _key,
            "8 to 256 visible ASCII characters",
            "the one key that clients must send; api_keys is for several",
            secret=True,
        ),
    )
    api_keys: Path | None = field(
        default=None,
        metadata=_rule(
            old_file,
            "a file that exists",
            "TOML file of the keys that clients must send, with limits of their own",
        ),
    )
    key_concurrency: int | None = field(
        default=None,
        metadata=_rule(
            _positive_int,
            "a whole number above 0",
            "most requests of one key open at once; more get 429 (default: no limit)",
        ),
    )
    key_requests_per_minute: int | None = field(
        default=None,
        metadata=_rule(
            _positive_int,
            "a whole number above 0",
            "requests a minute of one key, a sixth of them at once; more get 429"
            " (default: no limit)",
        ),
    )
    log: LogLevel = field(
        default="info",
        metadata=_rule(
            _log_level,
            "one of error, warning, info",
            "least level of what is logged to stderr, as lines of JSON; info has one a request",
        ),
    )

    @property
    def engine(self) -> EngineConfig:
        """The options of the engine.

        Raises:
            engine.api.EngineError: they contradict each other.
        """
        names = [item.name for item in fields(EngineConfig)]
        return EngineConfig(**{name: getattr(self, name) for name in names})

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
    """List (field, flag, help) of every setting that is no secret, for a command line."""
    return [
        (item.name, _flag(item.name), item.metadata["rule"].about + _shown(item.default))
        for item in fields(Settings)
        if not item.metadata["rule"].secret
    ]


def table() -> str:
    """Write the settings as a Markdown table: flag, variable, what is accepted, what it does."""
    lines = ["| flag | variable | accepted | default | what it sets |", "|---|---|---|---|---|"]
    for item in fields(Settings):
        rule: _Rule = item.metadata["rule"]
        flag = "(none: a secret)" if rule.secret else f"`{_flag(item.name)}`"
        default = _shown(item.default).strip(" []") or "unset"
        variable = f"`{ENV_PREFIX}{item.name.upper()}`"
        lines.append(f"| {flag} | {variable} | {rule.expected} | {default} | {rule.about} |")
    return "\n".join(lines) + "\n"


def _flag(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _shown(default: Any) -> str:
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        default = "on" if default else "off"
    return " [the one that ships]" if default == TINY_CHECKPOINT else f" [{default}]"


def _parse(item: Field[Any], text: str, *, source: str) -> Any:
    rule: _Rule = item.metadata["rule"]
    try:
        return rule.parse(text)
    except ValueError:
        came = "something else" if rule.secret else repr(text)
        raise SettingsError(f"{source}: expected {rule.expected}, got {came}") from None


if __name__ == "__main__":
    sys.stdout.write(table())
