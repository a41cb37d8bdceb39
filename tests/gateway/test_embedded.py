"""EmbeddedBackend: the Backend protocol over the real engine and a random tiny model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from engine import TINY_CHECKPOINT
from engine.api import (
    EngineDeadError,
    EngineError,
    FinishReason,
    GenerateRequest,
    PromptTooLongError,
    SamplingParams,
    TokenDelta,
    Usage,
)
from engine.architectures import read_config
from engine.options import EngineConfig
from gateway import Settings
from gateway.app import served_model
from gateway.backends import Backend
from gateway.backends.embedded import EmbeddedBackend, _joined
from tests.engine.model import build
from tests.gateway.support import eventually, run

ROOT = Path(__file__).parents[2]
OPTIONS = EngineConfig(
    device="cpu", cpu_threads=1, max_model_len=200, max_num_seqs=3, max_batched_tokens=32
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.write(tmp_path_factory.mktemp("checkpoints") / "my-model", build.v41(), seed=3)


def request(name: str, *, prompt_len: int = 5, max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(
        name, tuple(range(10, 10 + prompt_len)), SamplingParams(max_tokens, temperature=0.0)
    )


@asynccontextmanager
async def started(checkpoint: Path) -> AsyncIterator[EmbeddedBackend]:
    backend = EmbeddedBackend(checkpoint, OPTIONS)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


async def collect(backend: Backend, r: GenerateRequest) -> list[TokenDelta]:
    async with aclosing(backend.generate(r)) as deltas:
        return [delta async for delta in deltas]


async def all_free(backend: Backend) -> None:
    """Wait until all blocks are back; an abort takes effect between two steps."""

    def free() -> bool:
        stats = backend.stats()
        return stats.free_blocks == stats.total_blocks and not stats.running + stats.waiting

    await eventually(free)


def tokens(deltas: Sequence[TokenDelta]) -> int:
    """How many came; deltas of a reader who is late are joined."""
    return sum(len(delta.token_ids) for delta in deltas)


def test_info_is_known_before_the_model_is_loaded(checkpoint: Path) -> None:
    """Name, version, context, stop ids and tokenizer come from the folder."""
    backend: Backend = EmbeddedBackend(checkpoint, OPTIONS)

    info = backend.info
    assert (info.name, info.version, info.max_model_len) == ("my-model", "v4.1", 200)
    assert info.eos_token_ids == (1,)
    assert info.tokenizer_path == str(checkpoint / "tokenizer.json")
    assert not info.has_vision
    assert info.vocab_size == read_config(checkpoint).vocab_size
    assert served_model(Settings(), backend).vocab_size == info.vocab_size
    assert not backend.stats().alive


@pytest.mark.parametrize(("name", "want"), [(None, "my-model"), ("other", "other")])
def test_the_name_is_an_argument_or_the_folders(
    checkpoint: Path, name: str | None, want: str
) -> None:
    """A checkpoint is listed under its folder's name unless another is given."""
    assert EmbeddedBackend(checkpoint, OPTIONS, name=name).info.name == want


def test_the_checkpoint_that_ships_has_its_own_name() -> None:
    """Without arguments the tiny checkpoint is served under a name that says what it is."""
    info = EmbeddedBackend().info

    assert (info.name, info.version) == ("bathyal-tiny", "v4.1")
    assert Path(info.tokenizer_path) == TINY_CHECKPOINT / "tokenizer.json"


def test_importing_and_describing_loads_no_torch() -> None:
    """Only start() costs the GPU stack."""
    code = (
        "import sys; from gateway.backends.embedded import EmbeddedBackend;"
        "EmbeddedBackend().info; print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == "False"


def test_a_folder_that_cannot_be_served_is_refused_by_name(
    checkpoint: Path, tmp_path: Path
) -> None:
    """A missing config or tokenizer is an error that names the file."""
    with pytest.raises(EngineError, match=r"config\.json: file not found"):
        EmbeddedBackend(tmp_path)
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with pytest.raises(EngineError, match=r"tokenizer\.json: file not found"):
        EmbeddedBackend(tmp_path)


def test_start_raises_what_the_loader_says(checkpoint: Path, tmp_path: Path) -> None:
    """Weights that are not there are the start's error, not the first request's."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())

    async def scenario() -> None:
        backend = EmbeddedBackend(tmp_path, OPTIONS)
        with pytest.raises(EngineError, match="safetensors"):
            await backend.start()
        assert not backend.stats().alive
        await backend.stop()

    run(scenario())


def test_requests_at_once_equal_requests_alone(checkpoint: Path) -> None:
    """Ten requests over three slots each get the tokens they get alone, and one last delta."""

    async def scenario() -> None:
        async with started(checkpoint) as backend:
            requests = [request(f"r{i}", prompt_len=3 + 9 * i, max_tokens=4 + i) for i in range(10)]
            alone = [await collect(backend, r) for r in requests]
            together = await asyncio.gather(*(collect(backend, r) for r in requests))

            for r, one, many in zip(requests, alone, together, strict=True):
                tokens = [t for delta in many for t in delta.token_ids]
                assert tokens == [t for delta in one for t in delta.token_ids]
                assert len(tokens) == r.sampling.max_tokens
                assert [d.finish_reason for d in many[:-1]] == [None] * (len(many) - 1)
                assert many[-1].finish_reason is FinishReason.LENGTH
            await all_free(backend)

    run(scenario())


@pytest.mark.parametrize("after", [0, 1, 3])
def test_closing_the_stream_aborts_the_generation(checkpoint: Path, after: int) -> None:
    """A caller that leaves after some deltas leaves nothing running."""

    async def scenario() -> None:
        async with started(checkpoint) as backend:
            stream = backend.generate(request("a", max_tokens=190))
            for _ in range(after):
                await anext(stream)
            await stream.aclose()

            await all_free(backend)
            assert backend.stats().completion_tokens < 190

    run(scenario())


def test_a_cancelled_task_aborts_its_generation(checkpoint: Path) -> None:
    """Cancellation while the stream is quiet frees the request as closing does."""

    async def scenario() -> None:
        async with started(checkpoint) as backend:
            task = asyncio.create_task(collect(backend, request("a", max_tokens=190)))
            await eventually(lambda: backend.stats().completion_tokens > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            await all_free(backend)

    run(scenario())


def test_abort_from_elsewhere_ends_the_stream(checkpoint: Path) -> None:
    """An abort, once or twice, ends the stream without a further delta and frees the id."""

    async def scenario() -> None:
        async with started(checkpoint) as backend:
            stream = backend.generate(request("a", max_tokens=190))
            await anext(stream)
            await asyncio.sleep(0.02)  # more deltas are waiting by now
            backend.abort("a")
            backend.abort("a")
            backend.abort("never was")

            assert [delta async for delta in stream] == []
            assert tokens(await collect(backend, request("a"))) == 8
            await all_free(backend)

    run(scenario())


def test_a_late_close_does_not_harm_the_next_request_of_that_id(checkpoint: Path) -> None:
    """After its last delta a stream's id is free, even before the stream is closed."""

    async def scenario() -> None:
        async with started(checkpoint) as backend:
            first = backend.generate(request("a", max_tokens=1))
            assert (await anext(first)).finish_reason is FinishReason.LENGTH
            second = backend.generate(request("a", max_tokens=8))
            deltas = [await anext(second)]
            await first.aclose()
            deltas += [delta async for delta in second]

            assert tokens(deltas) == 8

    run(scenario())


def test_refusals_come_before_the_first_delta(checkpoint: Path) -> None:
    """A prompt that does not fit and an id in use are exceptions; the backend goes on."""

    async def scenario() -> None:
        async with started(checkpoint) as backend:
            with pytest.raises(PromptTooLongError, match="200 tokens does not fit"):
                await collect(backend, request("a", prompt_len=200))
            stream = backend.generate(request("a", max_tokens=190))
            await anext(stream)
            with pytest.raises(EngineError, match="not in use"):
                await collect(backend, request("a"))
            await anext(stream)
            await stream.aclose()
            deltas = await collect(backend, request("a"))
            assert tokens(deltas) == 8

    run(scenario())


def test_stop_in_the_middle_ends_streams_with_an_error(checkpoint: Path) -> None:
    """A server that stops tells its streams so, and refuses what comes later."""

    async def scenario() -> None:
        async with started(checkpoint) as backend:
            tasks = [
                asyncio.create_task(collect(backend, request(f"r{i}", max_tokens=190)))
                for i in range(5)
            ]
            await eventually(lambda: backend.stats().completion_tokens > 0)
            await backend.stop()
            await backend.stop()

            for task in tasks:
                last = (await task)[-1]
                assert last.finish_reason is FinishReason.ERROR
                assert last.error == "the server is shutting down"
            assert not backend.stats().alive
            with pytest.raises(EngineDeadError, match="shutting down"):
                await collect(backend, request("late"))

    run(scenario())


def test_before_start_nothing_is_served(checkpoint: Path) -> None:
    """A backend that was not started says so, and stops without complaint."""

    async def scenario() -> None:
        backend = EmbeddedBackend(checkpoint, OPTIONS)
        with pytest.raises(EngineDeadError, match="not loaded"):
            await collect(backend, request("a"))
        backend.abort("a")
        await backend.stop()

    run(scenario())


def test_joined_deltas_keep_the_newest_usage() -> None:
    """The first delta says what was cached; a slow reader that gets it joined still hears it."""
    first = TokenDelta("r", (5,), usage=Usage(9, 1, 7))
    middle = TokenDelta("r", (6,))
    last = TokenDelta("r", (7,), finish_reason=FinishReason.LENGTH, usage=Usage(9, 3, 7))

    early, whole = _joined([first, middle]), _joined([first, middle, last])

    assert (early.token_ids, early.usage, early.finish_reason) == ((5, 6), first.usage, None)
    assert (whole.token_ids, whole.usage) == ((5, 6, 7), last.usage)
    assert whole.finish_reason is FinishReason.LENGTH
