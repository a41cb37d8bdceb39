"""A model without a chat format: raw completions are served, chats are refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.api import EngineError
from engine.options import EngineConfig
from gateway.backends.embedded import EmbeddedBackend
from gateway.doctor import examine
from tests.engine.paging.checkpoints import write_qwen
from tests.gateway.support import call, run, running, save_tokenizer

OPTIONS = EngineConfig(
    device="cpu", cpu_threads=1, max_model_len=96, max_num_seqs=2, max_batched_tokens=32
)
CHATS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/tokenize": {"messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_qwen(tmp_path_factory.mktemp("models") / "small-qwen")
    save_tokenizer(path / "tokenizer.json")
    return path


def test_prompts_are_text_or_ids(qwen: Path) -> None:
    """Both give the same continuation; /v1/tokenize says which ids a text is."""

    async def ask() -> None:
        async with running(EmbeddedBackend(qwen, OPTIONS)) as app:
            status, told = await call(app, "/v1/tokenize", {"prompt": "Hello"})
            assert status == 200
            how = {"model": "small-qwen", "max_tokens": 5, "temperature": 0, "seed": 1}
            texts = []
            for prompt in ("Hello", told["tokens"]):
                status, reply = await call(app, "/v1/completions", {**how, "prompt": prompt})
                assert status == 200, reply
                assert reply["usage"]["prompt_tokens"] == 5
                texts.append(reply["choices"][0]["text"])
            assert texts[0] == texts[1]

    run(ask())


@pytest.mark.parametrize("path", CHATS)
def test_chats_are_refused(qwen: Path, path: str) -> None:
    """400, naming the model and where its prompts go."""

    async def ask() -> None:
        async with running(EmbeddedBackend(qwen, OPTIONS)) as app:
            status, reply = await call(app, path, {"model": "small-qwen", **CHATS[path]})
            assert status == 400
            assert "'small-qwen' has no chat format here" in reply["error"]["message"]
            assert "/v1/completions" in reply["error"]["message"]

    run(ask())


def test_model_output_is_not_parsed(qwen: Path) -> None:
    """The parsers of DeepSeek's calls do not answer for another model's output."""

    async def ask() -> None:
        async with running(EmbeddedBackend(qwen, OPTIONS)) as app:
            for path in ("/parse_function_call", "/separate_reasoning"):
                status, reply = await call(app, path, {"text": "x", "tools": []})
                assert status == 400
                assert "no chat format" in reply["error"]["message"]

    run(ask())


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    """The gateway needs one; the engine alone does not."""
    with pytest.raises(EngineError, match=r"tokenizer\.json: file not found"):
        EmbeddedBackend(write_qwen(tmp_path), OPTIONS)


def test_doctor_looks_at_it(qwen: Path) -> None:
    """Nothing to complain of, and no special tokens asked for."""
    found = {f.subject: f for f in examine(qwen, OPTIONS)}
    assert "completions only" in found["checkpoint"].text
    assert found["checkpoint"].ok
    assert "special tokens" not in found
