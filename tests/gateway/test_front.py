"""The layer before the routes: paths, keys, limits, error shapes, counters, log lines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st
from prometheus_client.parser import text_string_to_metric_families

from engine.api import (
    EngineDeadError,
    EngineError,
    GenerateRequest,
    ModelInfo,
    PromptTooLongError,
    TokenDelta,
)
from gateway.backends.scripted import ScriptedBackend
from gateway.front import canonical
from gateway.keys import Caller, Keys
from gateway.logs import JsonLines
from gateway.metrics import LONGEST_NAME, MOST_NAMES, OTHER, Metrics
from gateway.settings import Settings, SettingsError
from parsers import ClientError
from tests.gateway.support import (
    FunctionBackend,
    RawCall,
    call,
    chat_body,
    eventually,
    run,
    running,
    text_line,
)

CHAT = "/v1/chat/completions"
KEY = "sk-test-0123456789"
FILE = f"""
[[keys]]
name = "ci"
key = "{KEY}"
concurrency = 1

[[keys]]
name = "slow"
key = "sk-slow-0123456789"
requests_per_minute = 6
"""


def ask(info: ModelInfo, *args: Any, settings: Any = None, **options: Any) -> tuple[int, Any, Any]:
    """One call; returns status, headers and body."""

    async def main() -> tuple[int, Any, Any]:
        async with running(ScriptedBackend([text_line("a")], info), **settings or {}) as app:
            path, body = (*args, b"")[:2]
            raw = body if isinstance(body, bytes) else orjson.dumps(body)
            one = RawCall(app, path, raw, **options)
            status, headers = await one.start()
            data = await one.rest()
            return status, headers, orjson.loads(data) if data else None

    return run(main())


class TestPaths:
    """Every spelling of a path leads to its endpoint."""

    @pytest.mark.parametrize("prefix", ["", "/v1", "/beta", "/beta/v1", "/anthropic/v1"])
    def test_prefixes_are_aliases(self, info: ModelInfo, prefix: str) -> None:
        """SDKs of four vendors build their paths in their own ways."""
        assert ask(info, f"{prefix}/chat/completions", chat_body())[0] == 200
        assert ask(info, f"{prefix}/models", method="GET")[0] == 200

    def test_other_prefixes_are_not(self, info: ModelInfo) -> None:
        """Nothing else is guessed."""
        for path in ("/v2/models", "/v1/v1/models", "/gamma/models", "/beta", "/anthropic"):
            assert ask(info, path, method="GET")[0] == 404

    @given(st.text(max_size=20))
    def test_a_canonical_path_stays(self, tail: str) -> None:
        """Bringing a path to its one form twice changes nothing more."""
        for path in (tail, f"/{tail}", f"/beta/models/{tail}", f"/v1/responses/{tail}"):
            once = canonical(path)
            assert canonical(once) == once

    def test_a_long_path_is_not_repeated_whole(self, info: ModelInfo) -> None:
        """A 404 shows the beginning of what was asked for."""
        status, _, body = ask(info, "/" + "a" * 100_000, method="GET")

        assert status == 404
        assert body["error"]["message"].startswith("GET /aaa")
        assert len(body["error"]["message"]) < 300

    @pytest.mark.parametrize("method", ["GET", "HEAD"])
    def test_the_root_answers(self, info: ModelInfo, method: str) -> None:
        """One client asks HEAD / before anything else."""
        assert ask(info, "/", method=method)[0] == 200

    @pytest.mark.parametrize(
        ("path", "shape"),
        [
            ("/v1/messages/nothing", "messages"),
            ("/anthropic/v1/nothing", "messages"),
            ("/v1/messages", "messages"),
            ("/v1/responses/a/b/c", "nested"),
            ("/v1/responses", "nested"),
            ("/nothing", "nested"),
        ],
    )
    def test_errors_have_the_callers_shape(self, info: ModelInfo, path: str, shape: str) -> None:
        """A client of each protocol can read that there is no such path or method."""
        status, headers, body = ask(info, path, method="PUT")

        assert status in (404, 405)
        if shape == "messages":
            assert body["type"] == "error"
            assert body["request_id"] == headers["request-id"]
        else:
            assert set(body["error"]) == {"message", "type", "param", "code"}
        assert headers["x-request-id"] == headers["request-id"]

    def test_the_flat_shape_is_the_profiles(self, info: ModelInfo) -> None:
        """Under sglang chat errors are flat, also those that no parser makes."""
        settings = {"profile": "sglang", "api_key": KEY}
        status, _, body = ask(info, CHAT, chat_body(), settings=settings)
        _, _, unknown = ask(info, "/nothing", settings={"profile": "sglang"})

        assert (status, body["object"], body["code"]) == (401, "error", 401)
        assert unknown["code"] == 404


class TestKeys:
    """Who may ask."""

    @pytest.mark.parametrize(
        "headers",
        [
            {"authorization": f"Bearer {KEY}"},
            {"authorization": f"bearer  {KEY}"},
            {"x-api-key": KEY},
            {"authorization": f"Bearer {KEY}", "x-api-key": "something else"},
        ],
    )
    def test_a_known_key_is_let_in(self, info: ModelInfo, headers: dict[str, str]) -> None:
        """Both headers carry it; Bearer counts where both do."""
        assert ask(info, CHAT, chat_body(), headers=headers, settings={"api_key": KEY})[0] == 200

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"authorization": KEY},
            {"authorization": f"Basic {KEY}"},
            {"authorization": "Bearer "},
            {"authorization": f"Bearer {KEY}x"},
            {"authorization": f"Bearer {KEY[:-1]}"},
            {"authorization": "Bearer wrong", "x-api-key": KEY},
            {"x-api-key": "é" * 20},
        ],
    )
    @pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/metrics", "/nope"])
    def test_any_other_is_401_in_the_callers_shape(
        self, info: ModelInfo, headers: dict[str, str], path: str
    ) -> None:
        """Nothing of the key is repeated, and the scheme is named."""
        status, got, body = ask(info, path, chat_body(), headers=headers, settings={"api_key": KEY})

        assert status == 401
        assert got["www-authenticate"] == "Bearer"
        assert body["error"]["type"] == "authentication_error"
        assert ("request_id" in body) == (path == "/v1/messages")
        assert KEY[:-1] not in orjson.dumps(body).decode()

    @pytest.mark.parametrize("path", ["/health", "/healthz", "/readyz", "/"])
    def test_probes_need_none(self, info: ModelInfo, path: str) -> None:
        """A watchdog has no key."""
        assert ask(info, path, method="GET", settings={"api_key": KEY})[0] == 200

    def test_every_key_is_compared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The time of a look-up tells nothing: no comparison is left out after a hit."""
        compared = []

        def compare(a: bytes, b: bytes) -> bool:
            compared.append(a)
            return a == b

        monkeypatch.setattr("gateway.keys.hmac.compare_digest", compare)
        callers = {f"key-{i}-0123456789": Caller(str(i)) for i in range(5)}
        keys = Keys(callers, Caller("anonymous"))

        assert keys.enter("Bearer key-0-0123456789", "").name == "0"
        assert len(compared) == 5

    def test_a_file_holds_several_with_their_limits(self, tmp_path: Path) -> None:
        """What an entry does not say the settings say."""
        path = tmp_path / "keys.toml"
        path.write_text(FILE)
        keys = Keys.load(Settings(api_keys=path, key_concurrency=9))

        ci = keys.enter(f"Bearer {KEY}", "")
        slow = keys.enter("", "sk-slow-0123456789")
        assert (ci.name, ci.concurrency, ci.requests_per_minute) == ("ci", 1, None)
        assert (slow.name, slow.concurrency, slow.requests_per_minute) == ("slow", 9, 6)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", r"expected \[\[keys\]\]"),
            ("keys = 3", r"expected \[\[keys\]\]"),
            ("[[keys]]\nname = 'a'\nkey = 'short'", "key 1: key: expected 8 to 256"),
            ("[[keys]]\nkey = 'sk-0123456789'", "key 1: name: expected"),
            ("[[keys]]\nname = 'a'\nkey = 'sk-0123456789'\nlimit = 1", "limit: no such field"),
            (
                "[[keys]]\nname = 'a'\nkey = 'sk-0123456789'\nconcurrency = 0",
                "concurrency: expected a whole number above 0, got 0",
            ),
            (
                "[[keys]]\nname = 'a'\nkey = 'sk-0123456789'\nconcurrency = true",
                "concurrency: expected",
            ),
            ("[[keys]]\nname = 'a'\nkey = 'sk-0123456789'\n" * 2, "key 2: name: 'a' is used twice"),
            (
                "[[keys]]\nname='a'\nkey='sk-0123456789'\n[[keys]]\nname='b'\nkey='sk-0123456789'",
                "b: this key is a's",
            ),
            ("[[keys]", "keys.toml: not TOML: "),
        ],
    )
    def test_a_wrong_file_is_refused_by_entry(self, tmp_path: Path, text: str, words: str) -> None:
        """The message names the entry and the field, never the key."""
        path = tmp_path / "keys.toml"
        path.write_text(text)

        with pytest.raises(SettingsError, match=words) as refused:
            Keys.load(Settings(api_keys=path))
        assert "0123456789" not in str(refused.value)


class TestLimits:
    """How much one key, and all together, may ask at once."""

    def test_a_rate_is_held_and_says_when_to_come_again(self) -> None:
        """A burst of a sixth of a minute's requests, then one per interval."""
        caller = Caller("a", requests_per_minute=12)
        for _ in range(2):
            caller.enter(100.0)
        with pytest.raises(ClientError) as refused:
            caller.enter(100.0)
        assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
        assert refused.value.seconds == 5  # type: ignore[attr-defined]
        with pytest.raises(ClientError):
            caller.enter(104.9)
        caller.enter(105.0)

    @given(st.lists(st.floats(0, 30), max_size=40), st.integers(1, 120))
    def test_no_minute_holds_more_than_the_rate_and_a_burst(
        self, gaps: list[float], rate: int
    ) -> None:
        """However requests are spread, what is let in stays under the line."""
        caller, now, entered = Caller("a", requests_per_minute=rate), 0.0, []
        for gap in gaps:
            now += gap
            try:
                caller.enter(now)
            except ClientError:
                continue
            entered.append(now)
        for i, start in enumerate(entered):
            within = sum(start <= t <= start + 60 for t in entered[i:])
            assert within <= rate + max(1, rate / 6) + 1e-6

    def test_concurrency_counts_from_send_to_end(self, info: ModelInfo, tmp_path: Path) -> None:
        """A second request is 429 while the first streams, and served after it; others are not hit."""
        path = tmp_path / "keys.toml"
        path.write_text(FILE)
        mine = {"authorization": f"Bearer {KEY}"}
        other = {"authorization": "Bearer sk-slow-0123456789"}

        async def main() -> list[int]:
            backend = ScriptedBackend([text_line("a" * 30, delay_ms=10)], info)
            async with running(backend, api_keys=path) as app:
                body = orjson.dumps(chat_body(stream=True))
                first = RawCall(app, CHAT, body, headers=mine)
                await first.start()
                refused = RawCall(app, CHAT, body, headers=mine)
                status, headers = await refused.start()
                assert headers["retry-after"] == "1"
                await refused.rest()
                statuses = [status, (await call(app, CHAT, chat_body(), headers=other))[0]]
                await first.rest()
                return [*statuses, (await call(app, CHAT, chat_body(), headers=mine))[0]]

        assert run(main()) == [429, 200, 200]

    def test_a_client_that_leaves_gives_its_place_back(
        self, info: ModelInfo, tmp_path: Path
    ) -> None:
        """A broken connection holds nothing."""
        path = tmp_path / "keys.toml"
        path.write_text(FILE)
        mine = {"authorization": f"Bearer {KEY}"}

        async def main() -> int:
            backend = ScriptedBackend([text_line("a" * 3000, delay_ms=10)], info)
            async with running(backend, api_keys=path, max_open_requests=1) as app:
                first = RawCall(app, CHAT, orjson.dumps(chat_body(stream=True)), headers=mine)
                await first.start()
                first.leave()
                await first.task
                again = RawCall(app, CHAT, orjson.dumps(chat_body(stream=True)), headers=mine)
                status, _ = await again.start()
                again.leave()
                await again.task
                return status

        assert run(main()) == 200

    def test_a_full_server_is_503(self, info: ModelInfo) -> None:
        """One more than the bound is refused with a time to come again; other paths still answer."""

        async def main() -> tuple[Any, ...]:
            backend = ScriptedBackend([text_line("a" * 20, delay_ms=10)], info)
            async with running(backend, max_open_requests=2) as app:
                body = orjson.dumps(chat_body(stream=True))
                both = [RawCall(app, CHAT, body) for _ in range(2)]
                for one in both:
                    await one.start()
                third = RawCall(app, "/v1/messages", body)
                status, headers = await third.start()
                refusal = orjson.loads(await third.rest())
                models, _ = await call(app, "/v1/models", method="GET")
                for one in both:
                    await one.rest()
                after, _ = await call(app, CHAT, chat_body())
                return status, headers["retry-after"], refusal["type"], models, after

        assert run(main()) == (503, "1", "error", 200, 200)

    @pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "identity, gzip"])
    def test_a_compressed_body_is_415(self, info: ModelInfo, encoding: str) -> None:
        """It is refused by name, not as broken JSON."""
        headers = {"content-encoding": encoding}
        status, _, body = ask(info, CHAT, b"\x1f\x8b", headers=headers)

        assert (status, body["error"]["code"]) == (415, "unsupported_content_encoding")
        assert encoding in body["error"]["message"]

    @pytest.mark.parametrize(
        ("path", "fields", "param"),
        [
            (CHAT, {"messages": [{"role": "user", "content": "a"}] * 4}, "messages"),
            ("/v1/messages", {"messages": [{"role": "user", "content": "a"}] * 4}, None),
            ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 4}, "input"),
            (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}] * 3}, "tools"),
            ("/v1/responses", {"input": [{"role": "user", "content": "a" * 9000}] * 4}, "input"),
        ],
    )
    @pytest.mark.parametrize("store", ["memory", "off"])
    def test_too_many_entries_are_400(
        self, info: ModelInfo, path: str, fields: Any, param: str | None, store: str
    ) -> None:
        """The field, the limit and the count are named; the limit itself is allowed."""
        body = {**chat_body(max_tokens=9), **fields}
        settings = {"max_messages": 3, "max_tools": 2, "store": store}

        status, _, reply = ask(info, path, body, settings=settings)
        assert status == 400
        assert "expected at most" in reply["error"]["message"]
        if param is not None:
            assert (reply["error"]["param"], reply["error"]["code"]) == (param, "too_many_entries")
        allowed = {"max_messages": 4, "max_tools": 3, "store": store}
        _, _, reply = ask(info, path, body, settings=allowed)
        assert "expected at most" not in str(reply)

    def test_identity_is_no_encoding(self, info: ModelInfo) -> None:
        """The name for nothing is taken for nothing."""
        assert ask(info, CHAT, chat_body(), headers={"content-encoding": "Identity"})[0] == 200

    def test_a_body_that_trickles_is_408(self, info: ModelInfo) -> None:
        """A client that does not send holds no place."""

        async def main() -> tuple[int, Any]:
            backend = ScriptedBackend([text_line("a")], info)
            async with running(backend, body_seconds=0.05) as app:
                one = RawCall(app, CHAT, b"")
                one._incoming = asyncio.Queue()  # nothing comes
                one.task.cancel()
                one.task = asyncio.create_task(app(one._scope, one._incoming.get, one.sent.put))
                status, _ = await one.start()
                return status, orjson.loads(await one.rest())

        status, body = run(main())
        assert (status, body["error"]["code"]) == (408, "request_body_timeout")


class TestCounted:
    """What is counted and logged."""

    def test_metrics_tell_of_a_reply(self, info: ModelInfo) -> None:
        """Tokens, times, the gate's verdicts and ignored fields are there after one exchange."""
        text = (
            'ok\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n</｜DSML｜ invoke>\n'
            '<｜DSML｜ invoke name="g">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
        )
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

        async def main() -> str:
            async with running(ScriptedBackend([text_line(text)], info)) as app:
                await call(app, CHAT, chat_body(tools=[tool], top_k=2))
                await call(app, CHAT, b"{")
                one = RawCall(app, "/metrics", b"", method="GET")
                status, headers = await one.start()
                assert status == 200
                assert headers["content-type"].startswith("text/plain")
                return (await one.rest()).decode()

        found = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(run(main()))
            for sample in family.samples
        }
        assert found["bathyal_http_requests_total", "/v1/chat/completions", "200", "POST"] == 1
        assert found["bathyal_http_requests_total", "/v1/chat/completions", "400", "POST"] == 1
        assert found["bathyal_refused_requests_total", "invalid_request_error"] == 1
        assert found["bathyal_calls_total", "delivered"] == 1
        assert found["bathyal_calls_total", "withheld"] == 1
        assert found["bathyal_withheld_calls_total", "undeclared_tool"] == 1
        assert found["bathyal_ignored_fields_total", "top_k"] == 1
        assert found["bathyal_time_to_first_token_seconds_count",] == 1
        tokens = found["bathyal_completion_tokens_total",]
        assert found["bathyal_inter_token_seconds_count",] == tokens - 1
        assert found["bathyal_inter_token_seconds_bucket", "+Inf"] == tokens - 1
        assert found["bathyal_open_requests",] == 0
        assert found["bathyal_backend_alive",] == 1
        assert found["bathyal_prompt_tokens_total",] > 0

    def test_made_up_names_fill_no_memory(self, info: ModelInfo) -> None:
        """A client that invents fields is counted, its names only so far."""
        metrics = Metrics(ScriptedBackend([text_line("a")], info).stats)
        metrics.take_ignored(["x" * (LONGEST_NAME + 1)])
        metrics.take_ignored(f"field{i}" for i in range(MOST_NAMES + 6))
        metrics.take_ignored(["field0"])

        text = metrics.text().decode()
        assert text.count("bathyal_ignored_fields_total{") == MOST_NAMES + 1
        assert f'{{field="{OTHER}"}} 7.0' in text
        assert '{field="field0"} 2.0' in text

    def test_aborts_have_their_cause(self, info: ModelInfo) -> None:
        """A client that left is told from a backend that broke."""

        async def main() -> str:
            lines = [text_line("a" * 100, delay_ms=10), text_line("a", finish="error")]
            async with running(ScriptedBackend(lines, info)) as app:
                one = RawCall(app, CHAT, orjson.dumps(chat_body(stream=True)))
                await one.start()
                one.leave()
                await one.task
                await call(app, CHAT, chat_body())
                return (await call_text(app)).decode()

        text = run(main())
        assert 'bathyal_aborted_replies_total{cause="client_left"} 1.0' in text
        assert 'bathyal_aborted_replies_total{cause="backend_error"} 1.0' in text

    @pytest.mark.parametrize(
        ("when", "stream", "status"),
        [
            ("in its body", False, 499),
            ("before the reply", False, 499),
            ("before the reply", True, 499),
            ("in the reply", True, 200),
        ],
    )
    def test_a_client_that_left_counts_by_what_it_got(
        self, info: ModelInfo, when: str, stream: bool, status: int
    ) -> None:
        """One status for all that left with nothing; a reply that began has its own."""

        async def main() -> str:
            delay = 10 if when == "in the reply" else 10_000
            backend = ScriptedBackend([text_line("a" * 100, delay_ms=delay)], info)
            async with running(backend) as app:
                body = orjson.dumps(chat_body(stream=stream))
                one = RawCall(app, CHAT, body[:20], ends=False)
                if when != "in its body":
                    one = RawCall(app, CHAT, body)
                    await eventually(lambda: backend.stats().running > 0)
                if when == "in the reply":
                    await one.start()
                one.leave()
                await one.task
                return (await call_text(app)).decode()

        counted = f'{{method="POST",route="{CHAT}",status="{status}"}} 1.0'
        assert f"bathyal_http_requests_total{counted}" in run(main())

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("steps", "counted"),
        [
            ([PromptTooLongError(10, 5)], 'refused_requests_total{code="context_length_exceeded"}'),
            ([EngineError("no room")], 'refused_requests_total{code="unsupported_request"}'),
            ([0.1, EngineError("late")], 'refused_requests_total{code="unsupported_request"}'),
            ([EngineDeadError("dead")], 'aborted_replies_total{cause="backend_unavailable"}'),
            (
                [TokenDelta("", (0,)), EngineError("no room")],
                'aborted_replies_total{cause="unsupported_request"}',
            ),
        ],
        ids=["too-long", "refused", "refused-after-headers", "dead", "begun"],
    )
    def test_a_refusal_is_no_aborted_reply(
        self, info: ModelInfo, steps: list[Any], counted: str, stream: bool
    ) -> None:
        """What the engine refuses had no reply that could end early; what breaks off had one."""

        async def generate(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            for step in steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)  # a stream sends its headers with a comment
                else:
                    yield step._replace(request_id=request.id)

        async def main() -> str:
            backend = FunctionBackend(info, generate)
            async with running(backend, keep_alive_seconds=0.02) as app:
                one = RawCall(app, CHAT, orjson.dumps(chat_body(stream=stream)))
                await one.start()
                await one.rest()
                return (await call_text(app)).decode()

        lines = run(main()).splitlines()
        found = [x for x in lines if x.startswith(("bathyal_refused", "bathyal_aborted"))]
        assert [x for x in found if "_created" not in x] == [f"bathyal_{counted} 1.0"]

    def test_a_line_of_the_log_has_numbers_and_no_text(
        self, info: ModelInfo, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Who, what, how long; neither prompt nor reply nor key."""
        caplog.set_level(logging.INFO)
        body = chat_body("the secret question", stream=True)
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": "r-1"}
        settings = {"api_key": KEY}

        async def main() -> None:
            backend = ScriptedBackend([text_line("the secret answer")], info)
            async with running(backend, **settings) as app:
                one = RawCall(app, CHAT, orjson.dumps(body), headers=headers)
                await one.start()
                await one.rest()
                await eventually(lambda: bool(caplog.records))

        run(main())
        record = next(r for r in caplog.records if r.name == "gateway.requests")
        line = JsonLines().format(record)
        assert "secret" not in line
        assert KEY not in line
        fields = orjson.loads(line)
        assert fields["request_id"] == "r-1"
        assert fields["key"] == "default"
        assert (fields["route"], fields["status"], fields["outcome"]) == (CHAT, 200, "done")
        assert fields["completion_tokens"] == len("the secret answer") + 1
        assert fields["finish"] == "stop"
        assert fields["stream"] is True

    def test_what_an_error_says_to_programs_is_logged(
        self, info: ModelInfo, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The refusal of a thread is told from other 400s: a client asks for it on purpose."""
        caplog.set_level(logging.INFO, "gateway.requests")
        body = chat_body(max_tokens=5, thread={"id": "t"})

        async def main() -> int:
            async with running(ScriptedBackend([text_line("a")], info)) as app:
                return (await call(app, "/v1/messages", body))[0]

        assert run(main()) == 400
        record = next(r for r in caplog.records if r.name == "gateway.requests")
        details = orjson.loads(JsonLines().format(record))["details"]
        assert details["error_code"] == "thread_unsupported_request"

    def test_a_bug_is_500_with_an_id_and_a_count(self, info: ModelInfo) -> None:
        """What nobody foresaw is told in the caller's shape, and raised for the server's log."""

        class Broken(ScriptedBackend):
            def generate(self, request: Any) -> Any:
                raise ZeroDivisionError("secret")

        async def main() -> tuple[int, Any]:
            async with running(Broken([text_line("a")], info)) as app:
                one = RawCall(app, "/v1/messages", orjson.dumps(chat_body(max_tokens=5)))
                status, headers = await one.start()
                body = orjson.loads((await one.message())["body"])
                assert body["request_id"] == headers["request-id"]
                with pytest.raises(ZeroDivisionError):
                    await one.task
                assert 'status="500"' in (await call_text(app)).decode()
                return status, body

        status, body = run(main())
        assert (status, body["error"]["type"]) == (500, "api_error")
        assert "secret" not in body["error"]["message"]


async def call_text(app: Any) -> bytes:
    one = RawCall(app, "/metrics", b"", method="GET")
    await one.start()
    return await one.rest()
