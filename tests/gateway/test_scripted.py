"""The scripted backend: what a line says is what is played, and a wrong line is named."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import orjson
import pytest
from tokenizers import Tokenizer

from engine.api import (
    EngineDeadError,
    EngineError,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    SamplingParams,
    TokenDelta,
)
from gateway.backends.scripted import Line, ScriptedBackend, load_script
from tests.gateway.support import EOS, eventually, run, text_line


def request(name: str | None = None, id: str = "r", **sampling: object) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 1000, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(id, (5, 6, 7), params, script=name)


async def play(backend: ScriptedBackend, asked: GenerateRequest) -> list[TokenDelta]:
    return [delta async for delta in backend.generate(asked)]


async def played(info: ModelInfo, *lines: Line, **sampling: object) -> list[TokenDelta]:
    backend = ScriptedBackend(lines, info)
    await backend.start()
    return await play(backend, request(**sampling))


def ids_of(deltas: list[TokenDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def test_markers_are_tokens_in_output_and_characters_in_raw_output(info: ModelInfo) -> None:
    """`output` and `raw_output` spell the same text, only the first with the special token."""
    tokenizer = Tokenizer.from_file(info.tokenizer_path)
    think = tokenizer.token_to_id("</think>")

    real = ids_of(run(played(info, Line("output", "a</think>"))))
    plain = ids_of(run(played(info, Line("raw_output", "a</think>"))))

    assert [tokenizer.token_to_id("a"), think, EOS] == real
    assert think not in plain
    assert tokenizer.decode(plain[:-1], skip_special_tokens=False) == "a</think>"


def test_a_stop_ends_with_the_eos_token_once(info: ModelInfo) -> None:
    """A played stop looks like a sampled one; a line that holds the token gets no second."""
    implied = run(played(info, Line("token_ids", (20, 21))))
    spelt = run(played(info, Line("token_ids", (20, 21, EOS))))

    assert [20, 21, EOS] == ids_of(implied) == ids_of(spelt)
    assert [delta.finish_reason for delta in implied] == [None, None, FinishReason.STOP]
    assert (implied[-1].usage.prompt_tokens, implied[-1].usage.completion_tokens) == (3, 3)


def test_a_length_finish_has_no_eos(info: ModelInfo) -> None:
    """An output that was cut off just ends."""
    deltas = run(played(info, Line("token_ids", (20, 21), finish="length")))

    assert ids_of(deltas) == [20, 21]
    assert FinishReason.LENGTH is deltas[-1].finish_reason


def test_max_tokens_cuts_a_line(info: ModelInfo) -> None:
    """The script does not outlive what the client asked for."""
    deltas = run(played(info, Line("token_ids", (20, 21, 22)), max_tokens=2))

    assert ids_of(deltas) == [20, 21]
    assert FinishReason.LENGTH is deltas[-1].finish_reason
    assert deltas[-1].usage.completion_tokens == 2


def test_an_error_comes_after_the_output(info: ModelInfo) -> None:
    """A failing line plays what it has, then reports."""
    deltas = run(played(info, Line("token_ids", (20,), finish="error", name="broken")))

    assert ids_of(deltas) == [20]
    assert FinishReason.ERROR is deltas[-1].finish_reason
    assert "broken" in deltas[-1].error


def test_an_empty_output_still_ends(info: ModelInfo) -> None:
    """No tokens is a reply too."""
    (only,) = run(played(info, Line("token_ids", (), finish="length")))

    assert (only.token_ids, only.finish_reason) == ((), FinishReason.LENGTH)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_any_step_size_plays_the_same_tokens(info: ModelInfo, size: int) -> None:
    """How many tokens a step holds does not change what is said."""
    line = text_line("héllo</think> wörld", tokens_per_step=size)

    deltas = run(played(info, line))

    whole = ids_of(run(played(info, text_line("héllo</think> wörld"))))
    assert whole == ids_of(deltas)
    assert all(len(delta.token_ids) <= size for delta in deltas)


def test_logprobs_come_only_when_asked_for(info: ModelInfo) -> None:
    """A script is certain of its tokens."""
    without = run(played(info, Line("token_ids", (20,))))
    with_rivals = run(played(info, Line("token_ids", (20,)), top_logprobs=3))
    chosen_only = run(played(info, Line("token_ids", (20,)), top_logprobs=0))

    assert without[0].logprobs is None
    assert (
        with_rivals[0].logprobs[0].logprob,
        with_rivals[0].logprobs[0].top,
    ) == (0.0, ((20, 0.0),))
    assert chosen_only[0].logprobs[0].top == ()


def test_lines_play_in_order_round_and_round_unless_named(info: ModelInfo) -> None:
    """Requests without a name walk through the file; a named one does not move the others."""

    async def main() -> list[int]:
        lines = [Line("token_ids", (20 + i,), name=f"line{i}") for i in range(3)]
        backend = ScriptedBackend(lines, info)
        await backend.start()
        asked = [None, "line2", None, None, "line0", None]
        return [ids_of(await play(backend, request(name)))[0] for name in asked]

    assert run(main()) == [20, 22, 21, 22, 20, 20]


def test_an_unknown_name_is_refused_with_the_known_ones(info: ModelInfo) -> None:
    """The error says which names there are."""
    with pytest.raises(EngineError, match="script has 'weather', got 'wether'"):
        run(played(info, Line("token_ids", (), name="weather"), name="wether"))


def test_a_backend_that_does_not_run_refuses(info: ModelInfo) -> None:
    """Before the start and after the stop nothing is played, and stats say so."""

    async def main() -> None:
        backend = ScriptedBackend([Line("token_ids", ())], info)
        assert not backend.stats().alive
        with pytest.raises(EngineDeadError):
            await play(backend, request())
        await backend.start()
        assert backend.stats().alive
        await backend.stop()
        with pytest.raises(EngineDeadError):
            await play(backend, request())

    run(main())


def test_abort_ends_a_wait_at_once_and_without_a_delta(info: ModelInfo) -> None:
    """An aborted generation is over even in the middle of a long pause."""

    async def main() -> None:
        backend = ScriptedBackend([Line("token_ids", (20, 21), delay_ms=60_000)], info)
        await backend.start()
        task = asyncio.create_task(play(backend, request()))
        await eventually(lambda: backend.stats().running == 1)
        backend.abort("r")
        backend.abort("r")
        backend.abort("never seen")
        assert await task == []
        assert backend.stats().running == 0
        backend.abort("r")

    run(main())


def test_stop_ends_open_generations_with_an_error(info: ModelInfo) -> None:
    """Nobody waits for a backend that was stopped."""

    async def main() -> list[TokenDelta]:
        backend = ScriptedBackend([Line("token_ids", (20, 21), delay_ms=60_000)], info)
        await backend.start()
        task = asyncio.create_task(play(backend, request()))
        await eventually(lambda: backend.stats().running == 1)
        await backend.stop()
        return await task

    (last,) = run(main())
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "the backend was stopped")


def test_closing_the_generator_ends_the_generation(info: ModelInfo) -> None:
    """A caller that turns away leaves nothing behind."""

    async def main() -> None:
        backend = ScriptedBackend([Line("token_ids", tuple(range(20, 40)))], info)
        await backend.start()
        async with aclosing(backend.generate(request())) as deltas:
            await anext(deltas)
            assert backend.stats().running == 1
        assert backend.stats().running == 0

    run(main())


def test_generations_run_side_by_side(info: ModelInfo) -> None:
    """A line without a delay lets the others have their turn between two steps."""

    async def main() -> None:
        backend = ScriptedBackend([Line("token_ids", tuple(range(20, 60)))], info)
        await backend.start()
        order: list[str] = []

        async def one(id: str) -> None:
            async for _ in backend.generate(request(id=id)):
                order.append(id)  # noqa: PERF401 (the moment of each append is the point)

        await asyncio.gather(one("a"), one("b"))
        assert order[:4] in (["a", "b", "a", "b"], ["b", "a", "b", "a"])

    run(main())


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object, got list"),
        ('{"name": "a"}', "exactly one of output, raw_output, token_ids, got none"),
        ('{"output": "a", "raw_output": "b"}', "got output and raw_output"),
        ('{"output": 5}', "output: expected a string, got 5"),
        ('{"token_ids": [1, -1]}', "token_ids: expected a list of token ids"),
        ('{"token_ids": [true]}', "token_ids: expected a list of token ids"),
        ('{"output": "a", "finish": "eos"}', "finish: expected one of"),
        ('{"output": "a", "delay_ms": -1}', "delay_ms: expected a number >= 0"),
        ('{"output": "a", "tokens_per_step": 0}', "tokens_per_step: expected an integer >= 1"),
        ('{"output": "a", "name": ""}', "name: expected a non-empty string"),
        ('{"output": "a", "delay": 3}', "delay: no such field"),
        ('{"output": "a", "name": "first"}', "name: 'first' is line 1 already"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, row: str, complaint: str) -> None:
    """The error gives the file, the line and the field."""
    path = tmp_path / "script.jsonl"
    path.write_text('{"output": "fine", "name": "first"}\n\n' + row + "\n", encoding="utf-8")

    with pytest.raises(EngineError) as caught:
        load_script(path)

    assert f"script {path}, line 3: " in str(caught.value)
    assert complaint in str(caught.value)


def test_a_script_that_is_empty_or_missing_is_refused(tmp_path: Path) -> None:
    """A server without a reply to give does not start."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")

    with pytest.raises(EngineError, match="at least one line"):
        load_script(empty)
    with pytest.raises(EngineError, match="No such file"):
        load_script(tmp_path / "absent.jsonl")


def test_every_field_is_read(tmp_path: Path) -> None:
    """A full line keeps what it says."""
    path = tmp_path / "script.jsonl"
    row = {
        "name": "n",
        "raw_output": "x",
        "finish": "length",
        "delay_ms": 1.5,
        "tokens_per_step": 4,
    }
    path.write_bytes(orjson.dumps(row))

    assert [Line("raw_output", "x", "n", "length", 1.5, 4)] == load_script(path)


def test_a_token_id_beyond_the_vocabulary_stops_the_start(info: ModelInfo) -> None:
    """An id that no tokenizer could have made is found before it is played."""
    backend = ScriptedBackend([Line("token_ids", (10**6,), name="big")], info)

    with pytest.raises(EngineError, match=r"'big'.*below the vocabulary's"):
        run(backend.start())


def test_a_broken_tokenizer_stops_the_start(tmp_path: Path, info: ModelInfo) -> None:
    """The error names the file."""
    from dataclasses import replace

    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    backend = ScriptedBackend([text_line("a")], replace(info, tokenizer_path=str(path)))

    with pytest.raises(EngineError, match=str(path)):
        run(backend.start())


def test_only_a_newline_ends_a_line(info: ModelInfo, tmp_path: Path) -> None:
    """Characters that some libraries take for line ends may stand in a string as they are."""
    path = tmp_path / "script.jsonl"
    text = "a\u2028b\u2029c\u0085d\x1ce"
    rows = [{"output": text}, {"output": "z"}]
    raw = b"\r\n".join(orjson.dumps(row) for row in rows)
    raw = raw.replace(rb"\u001c", b"\\u001c")
    path.write_bytes(raw)

    lines = load_script(path)

    assert [line.output for line in lines] == [text, "z"]
    assert "\u2028".encode() in raw  # the file itself holds it
