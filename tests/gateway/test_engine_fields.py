"""What of a request and of the settings reaches the engine beside the prompt, and that it holds there."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.api import FinishReason, GenerateRequest, ModelInfo, TokenDelta, Usage
from gateway import Settings, create_app
from gateway.launch import open_backend
from tests.gateway.support import EOS, FunctionBackend, call, chat_body, loopback, run, running

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"


async def ended(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
    yield TokenDelta(request.id, (EOS,), None, FinishReason.STOP, Usage(1, 1))


def asked(info: ModelInfo, path: str, body: dict[str, Any], **options: Any) -> GenerateRequest:
    """The request that a backend is given for one call."""

    async def main() -> GenerateRequest:
        backend = FunctionBackend(info, ended)
        async with running(backend, **options.pop("settings", {})) as app:
            status, reply = await call(app, path, body, **options)
            assert status == 200, reply
        (request,) = backend.requests
        return request

    return run(main())


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat_body()), (COMPLETIONS, {"model": "test-model", "prompt": "q"})]
)
def test_moves_of_logits_reach_the_backend(
    info: ModelInfo, path: str, body: dict[str, Any]
) -> None:
    """In the engine's own terms."""
    moves = {"presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"7": 3}}
    params = asked(info, path, {**body, **moves}).sampling

    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -1)
    assert params.logit_bias == ((7, 3),)
    assert not asked(info, path, body).sampling.moves_logits


def test_keys_do_not_share_a_salt(info: ModelInfo, tmp_path: Path) -> None:
    """Every key has its own, always the same one, that gives the key away to nobody."""
    keys = tmp_path / "keys.toml"
    rows = [("a", "sk-aaaaaaaa"), ("b", "sk-bbbbbbbb")]
    keys.write_text("".join(f'[[keys]]\nname = "{n}"\nkey = "{k}"\n' for n, k in rows))

    def salt(key: str, path: str, body: dict[str, Any]) -> str:
        headers = {"authorization": f"Bearer {key}"}
        made = asked(info, path, body, headers=headers, settings={"api_keys": keys})
        return made.cache_salt

    completion = {"model": "test-model", "prompt": "q"}
    first, second = salt(rows[0][1], CHAT, chat_body()), salt(rows[1][1], CHAT, chat_body())
    assert len({first, second, ""}) == 3
    assert first == salt(rows[0][1], COMPLETIONS, completion)
    assert not any(key in first + second for _, key in rows)
    assert asked(info, CHAT, chat_body()).cache_salt == ""


def test_a_bias_decides_what_the_model_says() -> None:
    """The whole way, from the openai SDK to the checkpoint that ships: one token, again and again."""
    settings = Settings(device="cpu")
    backend = open_backend(settings)
    with (
        loopback(create_app(settings, backend)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        reply = client.completions.create(
            model="bathyal-tiny", prompt="Hello", max_tokens=5, logit_bias={"300": 100}, logprobs=0
        )
        once = client.completions.create(
            model="bathyal-tiny",
            prompt="Hello",
            max_tokens=5,
            temperature=0,
            logit_bias={"300": 18},
            frequency_penalty=2,
            presence_penalty=2,
            logprobs=0,
        )
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="bathyal-tiny", prompt="q", logit_bias={"999999": 1})
    assert reply.choices[0].logprobs is not None
    tokens = reply.choices[0].logprobs.tokens
    assert tokens is not None
    assert len(tokens) == 5
    assert len(set(tokens)) == 1
    assert once.choices[0].logprobs is not None
    assert len(set(once.choices[0].logprobs.tokens or ())) > 1
    assert caught.value.param == "logit_bias.999999"


def test_two_keys_never_share_a_prefix(tmp_path: Path) -> None:
    """The same prompt again is found under its own key and not under another's."""
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[[keys]]\nname = "a"\nkey = "sk-aaaaaaaa"\n[[keys]]\nname = "b"\nkey = "sk-bbbbbbbb"\n'
    )
    settings = Settings(device="cpu", api_keys=keys)
    body = chat_body("Tell me, what is the weather in Lima? " * 40, max_tokens=1)

    async def main() -> list[int]:
        found = []
        async with running(open_backend(settings), api_keys=keys) as app:
            for key in ("aaaaaaaa", "bbbbbbbb", "aaaaaaaa", "bbbbbbbb"):
                headers = {"authorization": f"Bearer sk-{key}"}
                _, reply = await call(app, CHAT, {**body, "model": "bathyal-tiny"}, headers=headers)
                found.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        return found

    first, second, third, fourth = run(main())
    assert (first, second) == (0, 0)
    assert third == fourth > 0


def test_the_prefix_cache_can_be_turned_off() -> None:
    """Under `--prefix-cache off` the same prompt again is computed again."""
    settings = Settings.load({}, {"prefix_cache": "off", "device": "cpu"})
    body = {
        **chat_body("What is the weather in Lima? " * 40, max_tokens=1),
        "model": "bathyal-tiny",
    }

    async def main() -> list[int]:
        async with running(open_backend(settings)) as app:
            replies = [(await call(app, CHAT, body))[1] for _ in range(2)]
        return [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in replies]

    assert run(main()) == [0, 0]


@pytest.mark.parametrize(
    ("aliases", "name", "served"),
    [
        ((), "claude-opus-4-1", False),
        (("claude-*",), "claude-opus-4-1[1m]", True),
        (("claude-*",), "gpt-5", False),
        (("claude-*", "gpt-*"), "gpt-5", True),
        (("*",), "a.model/of:any name", True),
        (("*",), "", False),
        (("a*c",), "abbc", True),
        (("a*c",), "abbcd", False),
        (("a.c*",), "abc", False),
    ],
)
def test_a_star_in_an_alias_stands_for_any_characters(
    info: ModelInfo, aliases: tuple[str, ...], name: str, served: bool
) -> None:
    """The reply repeats the name that was asked for; a pattern is not listed."""

    async def main() -> None:
        async with running(FunctionBackend(info, ended), aliases=aliases) as app:
            status, reply = await call(app, CHAT, {**chat_body(), "model": name})
            assert status == (200 if served else 400)
            assert (reply.get("model") == name) is served
            if not served:
                assert "test-model" in reply["error"]["message"]
            if name and "/" not in name:
                one, _ = await call(app, f"{MODELS}/{name}", method="GET")
                assert one == (200 if served else 404)
            _, listed = await call(app, MODELS, method="GET")
            assert [model["id"] for model in listed["data"]] == ["test-model"]

    run(main())
