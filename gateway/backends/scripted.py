"""A backend that plays recorded model output: for tests, demonstrations and conformance runs.

A script is a file of JSON lines, one per reply:

    {"name": "weather", "output": "Let me see.</think><｜DSML｜ calls>...", "finish": "stop"}

- exactly one of `output` (marker spellings become the real special tokens), `raw_output` (the same
  characters as plain text: what a model that imitates a marker would produce) and `token_ids`;
- `finish`: "stop" (the default; the end-of-sequence token is appended unless it is there), "length"
  (the output just ends) or "error" (the backend fails after the output);
- `tokens_per_step` (1 by default) and `delay_ms` (0 by default), the pause before every step;
- `name`, which a request chooses by the header `x-bathyal-script: NAME`.

Requests that choose no line get the lines in file order, each its own; after the last comes the
first again, so that a demonstration does not run dry. `max_tokens` holds as with any backend.

A forced tool choice while thinking is two generations (parsers.exchange), so it takes two lines:
the reasoning, and then the inside of the call that was opened for the model. A request may name
both, `x-bathyal-script: THINK, CALL`; without a name the next two in order are played. A call that is
tried once more takes a further line, or the last that was named again.

The tokenizer and the model's limits are those of a checkpoint folder; its weights are not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import orjson
from tokenizers import Tokenizer

from engine.api import (
    EngineDeadError,
    EngineError,
    EngineStats,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    TokenDelta,
    TokenLogprob,
    Usage,
)

_SOURCES = ("output", "raw_output", "token_ids")
_FINISHES = ("stop", "length", "error")
_KEYS = frozenset({*_SOURCES, "name", "finish", "delay_ms", "tokens_per_step"})


@dataclass(frozen=True, slots=True)
class Line:
    """One reply of a script. `source` says what `output` is: a text of a kind, or token ids."""

    source: Literal["output", "raw_output", "token_ids"]
    output: str | tuple[int, ...]
    name: str | None = None
    finish: Literal["stop", "length", "error"] = "stop"
    delay_ms: float = 0.0
    tokens_per_step: int = 1


def load_script(path: Path) -> list[Line]:
    """Read a script.

    Raises:
        EngineError: the file cannot be read or a line is wrong; names the line and the field.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EngineError(f"script {path}: {error.strerror}") from error
    lines: list[Line] = []
    first_use: dict[str, int] = {}
    # Only a newline ends a line of JSON: a string may hold U+2028 and its like as they are.
    for number, row in enumerate(content.split(b"\n"), start=1):
        if not row.strip():
            continue
        try:
            line = _parse_line(row)
            if line.name is not None and first_use.setdefault(line.name, number) != number:
                raise EngineError(f"name: {line.name!r} is line {first_use[line.name]} already")
        except EngineError as error:
            raise EngineError(f"script {path}, line {number}: {error}") from None
        lines.append(line)
    if not lines:
        raise EngineError(f"script {path}: expected at least one line, the file has none")
    return lines


def _parse_line(row: bytes) -> Line:
    try:
        fields = orjson.loads(row)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise EngineError(f"expected a JSON object, got {type(fields).__name__}")
    unknown = sorted(fields.keys() - _KEYS)
    if unknown:
        raise EngineError(f"{unknown[0]}: no such field; there are {', '.join(sorted(_KEYS))}")
    given = [source for source in _SOURCES if source in fields]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise EngineError(f"expected exactly one of {', '.join(_SOURCES)}, got {found}")
    source = cast(Literal["output", "raw_output", "token_ids"], given[0])
    name = _field(fields, "name", None, "a non-empty string", lambda v: isinstance(v, str) and v)
    output: str | tuple[int, ...]
    if source == "token_ids":
        ids = _field(fields, source, None, "a list of token ids >= 0", _is_ids)
        output = tuple(ids)
    else:
        output = _field(fields, source, None, "a string", lambda v: isinstance(v, str))
    return Line(
        source=source,
        output=output,
        name=name,
        finish=_field(fields, "finish", "stop", f"one of {_FINISHES}", lambda v: v in _FINISHES),
        delay_ms=_field(
            fields, "delay_ms", 0.0, "a number >= 0", lambda v: _is_number(v) and v >= 0
        ),
        tokens_per_step=_field(
            fields, "tokens_per_step", 1, "an integer >= 1", lambda v: _is_int(v) and v >= 1
        ),
    )


def _field(fields: dict[str, Any], key: str, default: Any, expected: str, accept: Any) -> Any:
    if key not in fields:
        return default
    value = fields[key]
    if not accept(value):
        raise EngineError(f"{key}: expected {expected}, got {value!r}")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_int(item) and item >= 0 for item in value)


class _Live:
    """A generation in progress."""

    def __init__(self) -> None:
        self.over = False
        self.ended = asyncio.Event()  # the same, to be waited for
        self.error: str | None = None  # what the last delta says

    def end(self, error: str | None = None) -> None:
        """Play no further; with an error, say so."""
        self.over, self.error = True, error
        self.ended.set()


class ScriptedBackend:
    """Plays a script; see the module's text for its form.

    Args:
        script: path of the JSON lines, or the lines themselves.
        info: the model it stands in for.

    Raises:
        EngineError: the script is wrong; names the line and the field.
    """

    def __init__(self, script: Path | Sequence[Line], info: ModelInfo) -> None:
        self._info = info
        self._lines = load_script(script) if isinstance(script, Path) else tuple(script)
        self._by_name = {
            line.name: index for index, line in enumerate(self._lines) if line.name is not None
        }
        self._token_ids: tuple[tuple[int, ...], ...] = ()
        self._next = 0
        self._live: dict[str, _Live] = {}
        self._steps = self._prompt_tokens = self._completion_tokens = 0
        self._alive = False

    @property
    def info(self) -> ModelInfo:
        """The model it stands in for."""
        return self._info

    async def start(self) -> None:
        """Encode every line, in a thread: scripts can be long.

        Raises:
            EngineError: the tokenizer cannot be read, or lacks a token id of the script.
        """
        self._token_ids = await asyncio.to_thread(self._encode)
        self._alive = True

    async def stop(self) -> None:
        """End every open generation with FinishReason.ERROR."""
        self._alive = False
        for live in self._live.values():
            live.end("the backend was stopped")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Play the line that the request names, or the next one.

        Raises:
            EngineDeadError: the backend is not running.
            EngineError: the script has no line of that name.
        """
        if not self._alive:
            raise EngineDeadError("the scripted backend is not running")
        if request.images and not self._info.has_vision:
            raise EngineError("images: expected none, for this model has no vision tower")
        index = self._choose(request.script)
        line, token_ids = self._lines[index], self._token_ids[index]
        finish = FinishReason(line.finish)
        if len(token_ids) > request.sampling.max_tokens:
            token_ids, finish = token_ids[: request.sampling.max_tokens], FinishReason.LENGTH
        request_id, top, size = request.id, request.sampling.top_logprobs, line.tokens_per_step
        usage = Usage(len(request.prompt_ids), len(token_ids))
        live = self._live[request_id] = _Live()
        self._prompt_tokens += len(request.prompt_ids)
        pause, steps = line.delay_ms / 1000, 0
        # where the last step begins, if it is one that ends well
        last = len(token_ids) if finish is FinishReason.ERROR else len(token_ids) - size
        try:
            for start in range(0, len(token_ids), size):
                if pause:
                    await _set_within(live.ended, pause)
                else:
                    await asyncio.sleep(0)  # others get their turn
                if live.over:
                    break
                step = token_ids[start : start + size]
                steps += 1
                logprobs = None if top is None else _certain(step, top)
                if start < last:
                    yield TokenDelta(request_id, step, logprobs)
                else:
                    yield TokenDelta(request_id, step, logprobs, finish, usage)
                    return
            if live.over:
                error = live.error
            elif finish is FinishReason.ERROR:
                error = f"the script fails here ({_described(line, index)})"
            else:
                error = None
                yield TokenDelta(request.id, (), None, finish, usage)
            if error is not None:
                yield TokenDelta(request.id, (), None, FinishReason.ERROR, usage, error)
        finally:
            del self._live[request.id]
            self._steps += steps
            self._completion_tokens += min(steps * size, len(token_ids))

    def abort(self, request_id: str) -> None:
        """End a generation without a further delta; harmless for an id that does not live."""
        live = self._live.get(request_id)
        if live is not None:
            live.end()

    def stats(self) -> EngineStats:
        """Count; a script has no blocks."""
        return EngineStats(
            running=len(self._live),
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            alive=self._alive,
        )

    def _choose(self, name: str | None) -> int:
        if name is None:
            index = self._next
            self._next = (index + 1) % len(self._lines)
            return index
        if name not in self._by_name:
            known = ", ".join(map(repr, sorted(self._by_name))) or "no named line"
            raise EngineError(f"x-bathyal-script: the script has {known}, got {name!r}")
        return self._by_name[name]

    def _encode(self) -> tuple[tuple[int, ...], ...]:
        eos = self._info.eos_token_ids
        by_source = encoders(self._info.tokenizer_path)
        size = by_source["output"].get_vocab_size()
        encoded = []
        for index, line in enumerate(self._lines):
            if isinstance(line.output, tuple):
                token_ids = line.output
                if max(token_ids, default=0) >= size:
                    raise EngineError(
                        f"script, {_described(line, index)}: token_ids: expected ids below the"
                        f" vocabulary's {size}, got {max(token_ids)}"
                    )
            else:
                encoding = by_source[line.source].encode(line.output, add_special_tokens=False)
                token_ids = tuple(encoding.ids)
            if line.finish == "stop" and token_ids[-1:] not in [(end,) for end in eos]:
                token_ids += eos[:1]
            encoded.append(token_ids)
        return tuple(encoded)


def encoders(tokenizer_path: str) -> dict[str, Tokenizer]:
    """Load two readings of one tokenizer: with its markers, and with the bare vocabulary.

    Returns:
        By the kind of text they encode: `output` and `raw_output`.

    Raises:
        EngineError: the file cannot be read or is no tokenizer.
    """
    try:
        spec = orjson.loads(Path(tokenizer_path).read_bytes())
        bare = {**spec, "added_tokens": [], "post_processor": None}
        return {
            "output": Tokenizer.from_str(orjson.dumps(spec).decode()),
            "raw_output": Tokenizer.from_str(orjson.dumps(bare).decode()),
        }
    except Exception as error:  # the library raises bare Exception for a file it cannot use
        raise EngineError(f"tokenizer {tokenizer_path}: {error}") from error


def _described(line: Line, index: int) -> str:
    return f"reply {index + 1}" if line.name is None else f"reply {line.name!r}"


def _certain(token_ids: tuple[int, ...], top: int) -> tuple[TokenLogprob, ...]:
    """Give each token probability 1 and no rival: a script knows what it says."""
    return tuple(TokenLogprob(0.0, ((token_id, 0.0),) if top else ()) for token_id in token_ids)


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, so long at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
