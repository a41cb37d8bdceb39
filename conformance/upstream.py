"""An engine without a model, which the suite serves behind the server under test.

It plays the output of the variant that runs (the runner sets it before each request, one at a
time) in three forms: OpenAI completions (`POST /v1/completions`: text), OpenAI chat
(`POST /v1/chat/completions`: the parsed result, for proxies that do not parse), and SGLang
(`POST /generate`: text and token ids). Loopback only; plain HTTP/1.1, one request a connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson

from conformance import strict_json
from conformance.dialect import respell
from conformance.model import Variant
from conformance.vocabulary import Vocabulary

Piece = tuple[str, list[int]]


class Upstream:
    """The engine.

    Args:
        port: Port on 127.0.0.1, 0 for a free one (see `port` after `start`).
        tokenizer: tokenizer.json for token ids; without it only text is played.
    """

    def __init__(self, port: int = 0, *, tokenizer: Path | None = None) -> None:
        self.port = port
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self._vocabulary = Vocabulary(tokenizer) if tokenizer else None
        self._variant: Variant | None = None
        self._left = asyncio.Event()
        self._playing: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begins to listen."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        """Stops listening, and ends replies that are still being played."""
        if self._server is not None:
            self._server.close()
            for task in self._playing:
                task.cancel()
            await asyncio.gather(*self._playing, return_exceptions=True)
            await self._server.wait_closed()

    def play(self, variant: Variant) -> None:
        """Makes this variant's output the one that is played next."""
        self._variant = variant
        self._left.clear()

    async def left(self, within_s: float) -> bool:
        """Waits until the server under test hangs up on a reply that is being played.

        Args:
            within_s: Seconds to wait at most.

        Returns:
            Whether it did.
        """
        try:
            await asyncio.wait_for(self._left.wait(), within_s)
        except TimeoutError:
            return False
        return True

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # a connection is served in a task of its own
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            path = head[0].split(" ")[1].split("?")[0]
            size = next(
                (
                    int(line.split(":")[1])
                    for line in head
                    if line.lower().startswith("content-length:")
                ),
                0,
            )
            body = orjson.loads(await reader.readexactly(size) or b"{}")
            self.requests.append((path, body))
            # Nobody sends more on this connection, so an end of file is a caller who hung up.
            gone = asyncio.ensure_future(reader.read())
            try:
                async for data in self._answer(path, body):
                    if gone.done():
                        self._left.set()
                        break
                    writer.write(data)
                    await writer.drain()
            finally:
                gone.cancel()
        except (ConnectionError, asyncio.IncompleteReadError, orjson.JSONDecodeError):
            pass  # the server under test left, or sent no JSON: its fault shows in its own reply
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        refused = self._refusal(body)
        if path.endswith("/chat/completions") and refused is not None:
            for data in _document(refused, "400 Bad Request"):
                yield data
            return
        if path.endswith("/chat/completions"):
            frames = self._chat(body)
        elif path.endswith("/completions"):
            frames = self._completions(body)
        elif path == "/generate":
            frames = self._generate(body)
        else:
            page = _page(path)
            status = "200 OK" if page else "404 Not Found"
            for data in _document(page or _error(f"no such path: {path}"), status):
                yield data
            return
        if not body.get("stream"):
            last = _finished(list(frames))
            status = "200 OK" if last else "500 Internal Server Error"
            for data in _document(last or _error("the script ends in a fault"), status):
                yield data
            return
        script = self._variant.case.script if self._variant else None
        delay = script.delay_ms / 1000 if script else 0.0
        yield b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        for frame in frames:
            yield b"data: " + orjson.dumps(frame) + b"\n\n"
            if delay:
                await asyncio.sleep(delay)
        if script is None or script.finish != "error":
            yield b"data: [DONE]\n\n"

    def _pieces(self) -> tuple[list[Piece], str]:
        """The output in small pieces, and how it finishes."""
        variant = self._variant
        if variant is None or variant.case.script is None:
            return [("ok", [])], "stop"
        script = variant.case.script
        text = respell(script.output, variant.dialect or "v4.1")
        if self._vocabulary is None:
            return [(text[n : n + 4], []) for n in range(0, len(text), 4)], script.finish
        ids = self._vocabulary.encode(text, special=not script.raw, insert=bytes(script.bytes))
        return [("", [number]) for number in ids], script.finish

    def _completions(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        pieces, finish = self._pieces()
        base = {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": body.get("model"),
        }
        whole = ""
        for text, ids in pieces:
            whole += text
            shown = text if body.get("stream") else whole
            choice = {"index": 0, "text": shown, "token_ids": ids, "finish_reason": None}
            yield base | {"choices": [choice]}
        if finish != "error":
            last = {
                "index": 0,
                "text": "" if body.get("stream") else whole,
                "finish_reason": finish,
            }
            usage = {
                "prompt_tokens": 20,
                "completion_tokens": len(pieces),
                "total_tokens": 20 + len(pieces),
            }
            yield base | {"choices": [last], "usage": usage}

    def _generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """SGLang's native stream: cumulative text, ids of the output so far."""
        pieces, finish = self._pieces()
        text = ""
        ids: list[int] = []
        for number, (piece, more) in enumerate(pieces, 1):
            text += piece
            ids = [*ids, *more]
            meta = {
                "id": body.get("rid") or "rid-1",
                "prompt_tokens": len(body.get("input_ids") or ()) or 20,
                "completion_tokens": number,
                "cached_tokens": 0,
                "finish_reason": None,
            }
            yield {"text": text, "output_ids": ids, "meta_info": meta}
        if finish != "error":
            reason = {"type": finish} | (
                {"matched": 1} if finish == "stop" else {"length": len(pieces)}
            )
            meta = {
                "id": body.get("rid") or "rid-1",
                "prompt_tokens": 20,
                "completion_tokens": len(pieces),
                "cached_tokens": 0,
                "finish_reason": reason,
            }
            yield {"text": text, "output_ids": ids, "meta_info": meta}

    def _refusal(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """What a chat engine answers where the case wants a refusal: proxies pass it on."""
        if body.get("n") not in (None, 1):
            return _error("n: this engine gives one choice", "n")
        expect = self._variant.case.expect[0] if self._variant else {}
        if expect.get("status", 200) != 400:
            return None
        param = expect.get("param")
        named = param.get("chat") if isinstance(param, dict) else param
        return _error(f"Not so: {' '.join(expect.get('message_has', ['refused']))}", named)

    def _chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The parsed result that the case wants, as a correct chat server sends it."""
        variant = self._variant
        expect = variant.case.expect[0] if variant else {}
        finish = variant.case.script.finish if variant and variant.case.script else "stop"
        content = str(expect.get("content", expect.get("content_has", "ok")))
        reasoning = expect.get("reasoning")
        calls = [
            {
                "id": f"call_{n:02}_abcdefghijklmnopqrst{n:04}",
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": call.get("arguments_text")
                    or call.get("arguments_prefix")
                    or strict_json.dumps(call.get("arguments", {})),
                },
            }
            for n, call in enumerate(expect.get("calls", ()))
        ]
        reason = expect.get("finish", "tool_calls" if calls else finish)
        model = body.get("model")
        usage = {"prompt_tokens": 20, "completion_tokens": 9, "total_tokens": 29}
        if not body.get("stream"):
            message: dict[str, Any] = {"role": "assistant", "content": content}
            message |= {"reasoning_content": reasoning} if reasoning else {}
            message |= {"tool_calls": calls} if calls else {}
            choice = {"index": 0, "message": message, "finish_reason": reason}
            choice["logprobs"] = _logprobs(content, body)
            if finish != "error":
                yield {
                    "id": "chatcmpl-1",
                    "object": "chat.completion",
                    "created": 1,
                    "model": model,
                    "choices": [choice],
                    "usage": usage,
                }
            return
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": part} for part in _cut(reasoning or "")]
        deltas += [{"content": part} for part in _cut(content)]
        for index, call in enumerate(calls):
            function = call["function"]
            assert isinstance(function, dict)
            opening = call | {"index": index, "function": function | {"arguments": ""}}
            deltas.append({"tool_calls": [opening]})
            deltas += [
                {"tool_calls": [{"index": index, "function": {"arguments": part}}]}
                for part in _cut(function["arguments"])
            ]
        base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model}
        for delta in deltas:
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            choice["logprobs"] = _logprobs(delta.get("content", ""), body)
            yield base | {"choices": [choice]}
        if finish != "error":
            yield base | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
            yield base | {"choices": [], "usage": usage}


def _cut(text: str) -> Iterator[str]:
    for start in range(0, len(text), 6):
        yield text[start : start + 6]


def _logprobs(text: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """One entry for each character, each with the rivals asked for."""
    if not body.get("logprobs") or not text:
        return None
    entries = [
        {"token": letter, "logprob": -0.5, "bytes": list(letter.encode())} for letter in text
    ]
    rivals = body.get("top_logprobs") or 0
    return {"content": [entry | {"top_logprobs": [entry] * rivals} for entry in entries]}


def _finished(frames: list[dict[str, Any]]) -> dict[str, Any] | None:
    """A whole reply is the last frame; a script that dies has no finished one."""
    if frames:
        last = frames[-1]
        choice = (last.get("choices") or [{}])[0]
        if choice.get("finish_reason") or (last.get("meta_info") or {}).get("finish_reason"):
            return last
    return None


def _page(path: str) -> dict[str, Any] | None:
    if path.endswith("/models"):
        model = {"id": "scripted", "object": "model", "owned_by": "suite"}
        return {"object": "list", "data": [model]}
    if path in {"/health", "/health_generate", "/get_model_info", "/model_info", "/"}:
        return {"status": "ok", "model_path": "scripted", "is_generation": True}
    return None


def _error(message: str, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": kind}}


def _document(value: dict[str, Any], status: str) -> Iterator[bytes]:
    data = orjson.dumps(value)
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    yield head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data
