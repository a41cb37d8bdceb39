"""Every refusal: its status, its nested body, its `param`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from engine.api import ModelInfo
from gateway.backends.scripted import ScriptedBackend
from tests.gateway.support import RawCall, call, chat_body, run, running, text_line

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def ask(info: ModelInfo, path: str, body: Any = b"", **options: Any) -> tuple[int, Any]:
    settings = options.pop("settings", {})

    async def main() -> tuple[int, Any]:
        async with running(ScriptedBackend([text_line("a")], info), **settings) as app:
            return await call(app, path, body, **options)

    return run(main())


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


RULES = [
    pytest.param(b"", None, "empty body", id="empty"),
    pytest.param(b"{", None, "expected a JSON object", id="not-json"),
    pytest.param(b"[1]", None, "expected a JSON object", id="not-an-object"),
    pytest.param(b'{"model": "\xff"}', None, "expected a JSON object", id="not-utf8"),
    pytest.param({"messages": user("a")}, "model", "test-model", id="no-model"),
    pytest.param(chat_body(model="gpt-5"), "model", "'gpt-5'", id="unknown-model"),
    pytest.param(chat_body(messages=[]), "messages", "non-empty", id="no-messages"),
    pytest.param(
        chat_body(messages=[{"role": "root", "content": "a"}]),
        "messages[0].role",
        "developer",
        id="unknown-role",
    ),
    pytest.param(chat_body(temperature=3), "temperature", "[0, 2]", id="temperature"),
    pytest.param(chat_body(temperature="0"), "temperature", "a number", id="temperature-text"),
    pytest.param(chat_body(max_completion_tokens=0), "max_completion_tokens", "[1, ", id="max-0"),
    pytest.param(chat_body(reasoning_effort=50), "reasoning_effort", "number 50", id="effort-50"),
    pytest.param(
        chat_body(
            tools=[TOOL],
            continue_final_message=True,
            messages=[*user("a"), {"role": "assistant", "content": "b"}],
        ),
        "continue_final_message",
        "tools",
        id="continue-with-tools",
    ),
    pytest.param(
        chat_body(messages=user([{"type": "image_url", "image_url": {"url": "data:,"}}])),
        "messages[0].content[0]",
        "vision tower",
        id="image",
    ),
    pytest.param(
        chat_body(tools=[{"type": "function", "function": {"name": "a b"}}]),
        "tools[0].function.name",
        "'a b'",
        id="tool-name",
    ),
    pytest.param(chat_body(n=9), "n", "at most 8", id="n"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param", "words"), RULES)
def test_a_wrong_request_is_400_with_the_field(
    info: ModelInfo, body: Any, param: str | None, words: str, stream: bool
) -> None:
    """The nested error body names the field, what was expected and what came, also for streams."""
    if stream and isinstance(body, dict):
        body = {**body, "stream": True}

    status, reply = ask(info, CHAT, body)

    assert status == 400
    assert set(reply["error"]) == {"message", "type", "param", "code"}
    assert reply["error"]["type"] == "invalid_request_error"
    assert reply["error"]["param"] == param
    assert words in reply["error"]["message"]


def test_numeric_effort_on_v4_is_400(info: ModelInfo) -> None:
    """V4 has named efforts only (issue 2)."""
    status, reply = ask(replace(info, version="v4"), CHAT, chat_body(reasoning_effort=0.5))

    assert (status, reply["error"]["param"]) == (400, "reasoning_effort")
    assert "v4" in reply["error"]["message"]


def test_a_prompt_beyond_the_context_is_400_with_both_numbers(info: ModelInfo) -> None:
    """The client learns how long its prompt is and how long it may be."""
    status, reply = ask(replace(info, max_model_len=100), CHAT, chat_body("x" * 500))

    assert status == 400
    assert reply["error"]["code"] == "context_length_exceeded"
    assert "100" in reply["error"]["message"]
    assert any(number in reply["error"]["message"] for number in ("504", "505", "503"))


def test_max_completion_tokens_counts(info: ModelInfo) -> None:
    """The modern name of the limit is a limit: with the prompt it must fit the context."""
    body = chat_body("x" * 50, max_completion_tokens=90)

    status, reply = ask(replace(info, max_model_len=100), CHAT, body)

    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")


def test_developer_is_rendered_as_system(info: ModelInfo) -> None:
    """Both roles give the same prompt length and the same reply."""

    async def main() -> list[Any]:
        async with running(ScriptedBackend([text_line("a")], info)) as app:
            replies = []
            for role in ("system", "developer"):
                head = {"role": role, "content": "Be brief."}
                body = chat_body(messages=[head, *user("Hi")])
                replies.append(await call(app, CHAT, body))
            return replies

    (status, system), (_, developer) = run(main())
    assert status == 200
    assert system["usage"] == developer["usage"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/completion", 404, "not_found"),
        ("GET", "/v2", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/parse_function_call", 405, "method_not_allowed"),
    ],
)
def test_unknown_paths_and_methods_have_the_nested_body(
    info: ModelInfo, method: str, path: str, status: int, code: str
) -> None:
    """404 and 405 say what was asked for in the same shape as every other error."""
    got, reply = ask(info, path, method=method)

    assert got == status
    assert reply["error"]["code"] == code
    assert f"{method} {path}" in reply["error"]["message"]


def test_a_wrong_method_is_told_the_right_one(info: ModelInfo) -> None:
    """RFC 9110 wants the Allow header with a 405."""

    async def main() -> dict[str, str]:
        async with running(ScriptedBackend([text_line("a")], info)) as app:
            return (await RawCall(app, CHAT, b"", method="GET").start())[1]

    assert run(main())["allow"] == "POST"


class TestBodySize:
    """The limit holds while the body is read."""

    def test_a_body_of_exactly_the_limit_is_read(self, info: ModelInfo) -> None:
        """The limit itself is allowed."""
        body = orjson.dumps(chat_body())

        assert ask(info, CHAT, body, settings={"max_body_bytes": len(body)})[0] == 200

    def test_a_declared_body_beyond_the_limit_is_413(self, info: ModelInfo) -> None:
        """Nothing is read of a body whose declared length is too large."""

        async def main() -> tuple[int, Any, int]:
            backend = ScriptedBackend([text_line("a")], info)
            async with running(backend, max_body_bytes=1000) as app:
                headers = {"content-length": "1001"}
                one = RawCall(app, CHAT, b"", parts=[b"x"] * 1001, headers=headers)
                status, _ = await one.start()
                return status, orjson.loads(await one.rest()), one._incoming.qsize()

        status, reply, unread = run(main())
        assert status == 413
        assert reply["error"]["code"] == "request_too_large"
        assert "1000" in reply["error"]["message"]
        assert unread == 1002  # every part, and the end

    def test_a_chunked_body_is_refused_as_soon_as_it_is_too_large(self, info: ModelInfo) -> None:
        """A body of undeclared length is refused in the middle, not after it was stored."""

        async def main() -> tuple[int, int]:
            backend = ScriptedBackend([text_line("a")], info)
            async with running(backend, max_body_bytes=1000) as app:
                one = RawCall(app, CHAT, b"", parts=[b"x" * 400] * 100)
                status, _ = await one.start()
                await one.rest()
                return status, one._incoming.qsize()

        status, unread = run(main())
        assert status == 413
        assert unread >= 97


class TestRequestId:
    """x-request-id comes back, or is made."""

    def id_of(self, info: ModelInfo, headers: dict[str, str], path: str = "/health") -> str:
        async def main() -> str:
            async with running(ScriptedBackend([text_line("a")], info)) as app:
                one = RawCall(app, path, b"", method="GET", headers=headers)
                return (await one.start())[1]["x-request-id"]

        return run(main())

    @pytest.mark.parametrize("path", ["/health", "/nowhere", "/v1/models"])
    def test_a_clients_id_is_echoed(self, info: ModelInfo, path: str) -> None:
        """The client finds its own id on every reply, errors included."""
        assert self.id_of(info, {"X-Request-Id": "my-id_1"}, path) == "my-id_1"

    @pytest.mark.parametrize("sent", ["", "a b", "x" * 129, "é", "a\tb"])
    def test_an_id_that_could_forge_a_log_line_is_replaced(
        self, info: ModelInfo, sent: str
    ) -> None:
        """Only short, visible ASCII is repeated."""
        got = self.id_of(info, {"x-request-id": sent})

        assert got != sent
        assert len(got) == 32

    def test_every_request_has_its_own(self, info: ModelInfo) -> None:
        """Ids that we make are unique."""
        assert self.id_of(info, {}) != self.id_of(info, {})


def test_any_content_type_is_read(info: ModelInfo) -> None:
    """curl -d sends a form's content type, some clients send none: the body decides."""
    for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}):
        assert ask(info, CHAT, chat_body(), headers=headers)[0] == 200


def test_before_the_start_and_after_the_end_requests_are_503(info: ModelInfo) -> None:
    """A model that is not loaded is said to be unavailable, in the error body."""
    from gateway import Settings, create_app

    async def main() -> list[tuple[int, str]]:
        backend = ScriptedBackend([text_line("a")], info)
        app = create_app(Settings(), backend)
        seen = []
        for _ in range(2):
            for path in (CHAT, "/parse_function_call"):
                status, reply = await call(app, path, chat_body())
                seen.append((status, reply["error"]["code"]))
            async with app.router.lifespan_context(app):
                assert backend.stats().alive
            assert not backend.stats().alive
        return seen

    assert run(main()) == [(503, "backend_unavailable")] * 4
